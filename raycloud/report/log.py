"""A run's `events.jsonl`: a JSON object per line, `{"format":1,"t":unix seconds,"event":kind,...}`.

Lines are appended and never changed. A process that is killed while it writes leaves a torn last
line: readers leave it out, and the next writer cuts it off before it appends. JSON has no word for
a number that is not finite; such numbers are the texts `NaN`, `Infinity` and `-Infinity`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from raycloud.bounded import json_value, open_regular, text_lines
from raycloud.errors import InternalError, RunDirectoryError
from raycloud.events import FORMAT, Event, StepsCommitted
from raycloud.redact import redact
from raycloud.report.records import from_record, to_record

_NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
_KINDS: dict[str, type | tuple[type, ...]] = {  # by the word in a field's annotation
    "bool": bool,
    "int": int,
    "float": (int, float),
    "str": str,
    "tuple": tuple,
    "Mapping": Mapping,
}
_BLOCK_BYTES = 1 << 16
_FARTHEST_T = 6e10  # unix seconds from 1970, either way: a date of the years 68 to 3871
_LARGEST = 2**63  # of whole numbers: beyond it, arithmetic with floats may overflow


def to_microseconds(t: float) -> float:
    """A moment, in unix seconds, as the log keeps it."""
    return round(t, 6)


def to_line(t: float, event: Event, word: tuple[int, int] | None = None) -> str:
    """The line of an event, redacted, without its newline.

    Args:
        t: When it happened, in unix seconds.
        event: What.
        word: The member that said so, and which of its words it was; None: it was no member.

    Raises:
        InternalError: The event holds something that is not a plain value.
    """
    record = {"format": FORMAT, "t": to_microseconds(t), **_spelled(redact(to_record(event)))}
    if word is not None:
        record["word"] = list(word)
    try:
        return json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except TypeError as error:
        raise InternalError(
            f"the event {type(event).__name__} cannot be written as JSON: {error}"
        ) from error


def from_line(line: str) -> tuple[float, Event]:
    """The inverse of `to_line`, but for what was redacted.

    Raises:
        ValueError: The line is no JSON object, or is of a newer format or an unknown kind.
    """
    record = json_value(line)
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - one exception for all bad lines
    if record.get("format") != FORMAT:
        raise ValueError(f"its format is {record.get('format')!r}, this raycloud reads {FORMAT}")
    try:
        return _time(record["t"]), _restored(_checked(from_record(record)))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a field is missing or of the wrong kind: {error}") from error


def read_events(path: Path) -> Iterator[tuple[float, Event]]:
    """The (unix seconds, event) of each line in order; a torn last line is left out.

    Raises:
        RunDirectoryError: The log is missing, a line is damaged, or a newer raycloud wrote it.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read the event log {path}: {error.strerror}",
            hint="name the directory of a run, the one that holds events.jsonl",
        ) from error
    with file:
        lines, number = text_lines(file), 0
        while True:
            number, line = number + 1, None
            try:
                if (line := next(lines, None)) is None:
                    return
                entry = from_line(line)
            except ValueError as error:
                if line is not None and not line.endswith("\n"):
                    return  # torn: its writer was killed
                raise RunDirectoryError(
                    f"{path}, line {number} cannot be read: {error}",
                    hint="read this run with the raycloud that wrote it, or a newer one",
                ) from error
            yield entry


def last_words(path: Path, members: Collection[int]) -> dict[int, int]:
    """For each of these members the number of its newest word in a log; 0 where there is none.

    Read from the end. A torn last line has been cut off.
    """
    found = dict.fromkeys(members, 0)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        taken = _BLOCK_BYTES
        while True:
            start = file.seek(max(0, size - taken))
            if start:
                file.readline()  # the rest of a line
            for line in file:
                if b'"word":' in line:
                    member, number = json.loads(line).get("word") or (-1, 0)
                    if member in found:
                        found[member] = number
            if all(found.values()) or taken >= size:
                return found
            taken *= 4


def skips_told(path: Path, members: Collection[int]) -> dict[int, list[Mapping[str, Any]]]:
    """What each of these members has reported, in a log, that did not count."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            if '"skips":[{' not in line:
                continue
            event = from_line(line)[1]
            if isinstance(event, StepsCommitted) and event.member in members:
                found.setdefault(event.member, []).extend(event.skips)
    return found


def _time(value: Any) -> float:
    t = float(value)
    if not abs(t) <= _FARTHEST_T:  # also what is no number
        raise ValueError("its time is no date")
    return t


def _checked(event: Event) -> Event:
    """The event, if its fields are of the kinds that their annotations name."""
    for field in fields(event):
        value, (kind, _, rest) = getattr(event, field.name), str(field.type).partition("[")
        kind, _, other = kind.partition(" | ")
        known = _KINDS.get(kind)
        if known is None or (value is None and (other or rest).endswith("None")):
            continue
        if kind == "float" and value in _NOT_FINITE:
            continue
        if not isinstance(value, known) or (isinstance(value, bool) and kind != "bool"):
            raise TypeError(f"{field.name} = {value!r:.80} is no {kind}")
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise ValueError(f"{field.name} is {_LARGEST} or more")
    return event


def cut_torn_line(path: Path) -> int:
    """Make a file end with a whole line, so that it can be appended to; the bytes that were cut."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = keep = file.seek(0, 2)
        while keep:
            start = max(0, keep - _BLOCK_BYTES)
            file.seek(start)
            at = file.read(keep - start).rfind(b"\n")
            if at >= 0:
                keep = start + at + 1
                break
            keep = start
        file.truncate(keep)
    return size - keep


def _spelled(value: Any) -> Any:
    """Numbers that are not finite as texts, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _spelled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_spelled(inner) for inner in value]
    return value


def _restored(event: Event) -> Event:
    """The spelled numbers as numbers again, in the fields that hold numbers."""
    changed: dict[str, Any] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.type == "float" and value in _NOT_FINITE:
            changed[field.name] = float(value)
        elif field.type == "Mapping[str, float]" and not _NOT_FINITE.isdisjoint(value.values()):
            changed[field.name] = {name: float(number) for name, number in value.items()}
    return replace(event, **changed) if changed else event
