"""A run's `events.jsonl`: a JSON object per line, `{"format":1,"t":unix seconds,"event":kind,...}`.

Several members' reports of steps are one line, of format 2: what is the same in all of them stands
once under `same`, unless it is the default, the rest as a list by field under `each`, in the order
of `members`; by `late_us` microseconds each came before `t`. They are read as if each had a line of
its own.

Lines are appended and never changed. A process that is killed while it writes leaves a torn last
line: readers leave it out, and the next writer cuts it off before it appends. JSON has no word for
a number that is not finite; such numbers are the texts `NaN`, `Infinity` and `-Infinity`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

from raycloud.bounded import LARGEST_BYTES, json_value, open_regular
from raycloud.errors import InternalError, RunDirectoryError
from raycloud.events import FORMAT, Event, StepsCommitted
from raycloud.redact import redact

MERGED_FORMAT = 2
MOST_MERGED = 1000  # reports in one line

_NOT_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})
_KINDS: dict[str, tuple[type, ...]] = {  # by the word in a field's annotation
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "tuple": (tuple,),
    "Mapping": (dict,),
}
_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_BLOCK_BYTES = 1 << 16
_MOST_BYTES = 1 << 20  # of a tail at a time: a long log must not keep a page from being drawn
_FARTHEST_T = 6e10  # unix seconds from 1970, either way: a date of the years 68 to 3871
_LARGEST = 2**63  # of whole numbers: beyond it, arithmetic with floats may overflow


def to_microseconds(t: float) -> float:
    """A moment, in unix seconds, as the log keeps it."""
    return round(t, 6)


class Entry(NamedTuple):
    """What happened at unix second `t`.

    Attributes:
        word: The member that sent it, and its number among that member's messages; None: no member.
    """

    t: float
    event: Event
    word: tuple[int, int] | None = None


def to_line(t: float, event: Event, word: tuple[int, int] | None = None) -> str:
    """The line of an entry (see `Entry`), redacted, without its newline.

    Raises:
        InternalError: The event holds something that is not a plain value.
    """
    record = {"format": FORMAT, "t": to_microseconds(t), "event": type(event).__name__}
    record |= {name: _plain(getattr(event, name)) for name in _SHAPES[type(event)]}
    if word is not None:
        record["word"] = list(word)
    return _text(record)


def to_merged_line(reports: Sequence[Entry]) -> str:
    """The line of several members' reports of steps, at most `MOST_MERGED`, without its newline.

    Args:
        reports: In the order in which they came; `t` as `to_microseconds` has it.

    Raises:
        InternalError: One holds something that is not a plain value.
    """
    t = reports[-1].t
    same: dict[str, Any] = {}
    each: dict[str, list[Any]] = {}
    for name, field in _SHAPES[StepsCommitted].items():
        first, *others = values = [_plain(getattr(one.event, name)) for one in reports]
        if name == "member":
            members = values
        elif any(value != first for value in others):
            each[name] = values
        elif first != field.default:
            same[name] = first
    record: dict[str, Any] = {"format": MERGED_FORMAT, "t": t, "event": StepsCommitted.__name__}
    record |= {"members": members, "late_us": [round((t - one.t) * 1e6) for one in reports]}
    if any(one.word is not None for one in reports):
        record["words"] = [None if one.word is None else one.word[1] for one in reports]
    return _text({**record, "same": same, "each": each})


def entries_of(line: str) -> Iterator[Entry]:
    """What a line holds: one event, or several members' reports.

    Raises:
        ValueError: The line is no JSON object, or is of a newer format or an unknown kind.
    """
    record = json_value(line)
    if not isinstance(record, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - one exception for all bad lines
    merged = record.get("format") == MERGED_FORMAT and type(record["format"]) is int
    if record.get("format") != FORMAT and not merged:
        raise ValueError(
            f"its format is {record.get('format')!r}, this raycloud reads {FORMAT} and "
            f"{MERGED_FORMAT}"
        )
    try:
        t = _time(record["t"])
        kind = _EVENTS.get(str(record.get("event")))
        if kind is None:
            raise ValueError(f"unknown event {record.get('event')!r}: written by a newer raycloud?")
        if merged:
            yield from _parted(t, kind, record)
        else:
            word = record.get("word")
            yield Entry(t, _built(kind, record), None if word is None else _word(*word))
    except (KeyError, TypeError, OverflowError, AttributeError) as error:
        raise ValueError(f"a field is missing or of the wrong kind: {error}") from error


def _parted(t: float, kind: type[Event], record: Mapping[str, Any]) -> Iterator[Entry]:
    members, late_us, same, each = (record[name] for name in ("members", "late_us", "same", "each"))
    columns = [members, late_us, *each.values()]
    words = record.get("words", [None] * len(members))
    if kind is not StepsCommitted or not 0 < len(members) <= MOST_MERGED:
        raise ValueError(f"reports of {len(members)} members in one line")
    if any(not isinstance(column, list) for column in columns):
        raise TypeError("what each member has is no list")
    rows = zip(members, late_us, words, *each.values(), strict=True)
    for member, us, number, *values in rows:
        word = None if number is None else _word(member, number)
        own = {**same, **dict(zip(each, values, strict=True)), "member": member}
        yield Entry(_time(to_microseconds(t - us * 1e-6)), _built(kind, own), word)


def _word(member: Any, number: Any) -> tuple[int, int]:
    if type(member) is not int or type(number) is not int:
        raise TypeError(f"{member!r:.80}, {number!r:.80} names no word")
    return member, number


def _time(value: Any) -> float:
    t = float(value)
    if not abs(t) <= _FARTHEST_T:  # also what is no number
        raise ValueError("its time is no date")
    return t


class _Field(NamedTuple):
    """How a field's value is checked: it is of one of these types, and of a bearable size."""

    kinds: tuple[type, ...] | None  # None: any
    kind: str
    numbers: bool  # by name
    default: Any  # as the log has it, and a merged line has not


def _shape(kind: type[Any]) -> dict[str, _Field]:
    """The fields of a kind of event, by what their annotations name."""
    shape = {}
    for field in fields(kind):
        word, (name, _, rest) = str(field.type), str(field.type).partition("[")
        name, _, other = name.partition(" | ")
        kinds = _KINDS.get(name)
        if kinds is not None and (other or rest).endswith("None"):
            kinds = (*kinds, type(None))
        default = [] if field.default == () else field.default
        shape[field.name] = _Field(kinds, name, word == "Mapping[str, float]", default)
    return shape


_SHAPES: dict[type[Any], dict[str, _Field]] = {kind: _shape(kind) for kind in _EVENTS.values()}


def _built(kind: type[Any], record: Mapping[str, Any]) -> Event:
    """The event, if its fields are of the kinds that their annotations name; others are ignored."""
    values: dict[str, Any] = {}
    for name, field in _SHAPES[kind].items():
        if name not in record:
            continue
        value: Any = record[name]
        if isinstance(value, list):
            value = tuple(tuple(v) if isinstance(v, list) else v for v in value)
        if field.kind == "float" and isinstance(value, str) and value in _NOT_FINITE:
            value = float(value)
        values[name] = value
        if field.kinds is None:
            continue
        if not isinstance(value, field.kinds) or (isinstance(value, bool) and field.kind != "bool"):
            raise TypeError(f"{name} = {value!r:.80} is no {field.kind}")
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise ValueError(f"{name} is {_LARGEST} or more")
        if field.numbers and isinstance(value, dict):
            values[name] = {key: _number(number) for key, number in value.items()}
    built: Event = kind(**values)
    return built


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


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def _text(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except TypeError as error:
        what = f"the event {record['event']} cannot be written as JSON: {error}"
        raise InternalError(what) from error


def _plain(value: Any) -> Any:
    """A field's value as the log has it. Only what may hold a text is looked into for secrets."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _spelled(value)
    return _spelled(redact(value))


def _spelled(value: Any) -> Any:
    """Numbers that are not finite as texts, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _spelled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_spelled(inner) for inner in value]
    return value


class Tail:
    """The lines of a log that are whole, each once, as they come.

    A line without its newline is still being written, or torn: it waits. A log that is replaced by
    a shorter one is read from its start.

    Args:
        path: The log; it need not be there yet.
        at: So many bytes, which are `lines` lines, have been read already.
        lines: Are counted where a damaged line is named.
    """

    def __init__(self, path: Path, *, at: int = 0, lines: int = 0) -> None:
        self.path, self.at, self.lines = path, at, lines
        self._torn: tuple[int, int] | None = None  # the file, when no whole line was left

    def read(self) -> list[Entry]:
        """The entries that have come since; a part of them if that is much.

        Raises:
            RunDirectoryError: The log cannot be read, a line is damaged or without end, or a newer
                raycloud wrote it.
        """
        block = self._block()
        whole = block[: block.rfind(b"\n") + 1]
        if not whole and len(block) > LARGEST_BYTES:
            raise RunDirectoryError(
                f"{self.path}, line {self.lines + 1} is longer than {LARGEST_BYTES} bytes",
                hint="it is no event log, or is damaged",
            )
        self.at += len(whole)
        entries: list[Entry] = []
        for line in whole.splitlines():
            self.lines += 1
            try:
                entries += entries_of(line.decode("utf-8", errors="replace"))
            except ValueError as error:
                raise RunDirectoryError(
                    f"{self.path}, line {self.lines} cannot be read: {error}",
                    hint="read this run with the raycloud that wrote it, or a newer one",
                ) from error
        return entries

    def rest(self) -> Iterator[Entry]:
        """All entries that have come since, of a log that has to be there.

        Raises:
            RunDirectoryError: As `read`; or the log is missing.
        """
        try:
            self.path.stat()
        except OSError as error:
            raise _no_log(self.path, error) from error
        at = -1
        while at < self.at:  # a part may hold nothing that this raycloud knows
            at = self.at
            yield from self.read()

    def _block(self) -> bytes:
        """What stands behind the lines that have been read, if it may hold a whole one by now."""
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                if found.st_size < self.at:
                    self.at = self.lines = 0
                now = (found.st_size, found.st_mtime_ns)
                if now == self._torn:
                    return b""
                file.seek(self.at)
                block = file.read(_MOST_BYTES)
                if b"\n" not in block:  # a line that is longer than a block
                    block += file.readline(LARGEST_BYTES + 1 - len(block))
                self._torn = None if b"\n" in block else now
                return block
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise _no_log(self.path, error) from error


def _no_log(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot read the event log {path}: {error.strerror}",
        hint="name the directory of a run, the one that holds events.jsonl",
    )


def read_events(path: Path) -> Iterator[tuple[float, Event]]:
    """The (unix seconds, event) of each entry in order; a torn last line is left out.

    Raises:
        RunDirectoryError: The log is missing, a line is damaged, or a newer raycloud wrote it.
    """
    return ((t, event) for t, event, _ in Tail(path).rest())
