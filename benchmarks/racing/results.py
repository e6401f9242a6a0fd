"""The rows of races in a JSON file: written as each is done, so that a broken run goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

FORMAT = 1
LIMIT = "limit"  # the contestant that is no contestant: every node alone
OURS = "raycloud"  # and its variants are named "raycloud-..."
SOFTWARE = ("commit", "changed_since_commit")  # of a machine's description
FRESH = timedelta(hours=1)  # of a limit: a machine is not as fast at all times
QUIET = 0.03  # part of the machine's CPU time that others may use in a run

Row = Mapping[str, Any]
_WORDS = frozenset({"title", "notes"})  # of a testbed's settings: they set nothing
_SHOWN = 60  # characters of a value
_KEY = ("scenario", "repeat", "contestant")


class ResultsError(Exception):
    """A results file is not one; the message names file, value and remedy."""


class Results:
    """The rows of one file, by scenario, repeat and contestant.

    Args:
        path: The file; it need not be there yet.

    Raises:
        ResultsError: It is there and holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = {_key(row): row for row in load(path)} if path.exists() else {}

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows; their order does not depend on that of adding."""
        return tuple(self._rows[key] for key in sorted(self._rows))

    def find(self, scenario: str, repeat: int, contestant: str) -> Row | None:
        """One row; None where it has not been run."""
        return self._rows.get((scenario, repeat, contestant))

    def of(self, scenario: str, repeat: int) -> tuple[Row, ...]:
        """All rows of one repeat."""
        return tuple(r for r in self.rows if (r["scenario"], r["repeat"]) == (scenario, repeat))

    def check_fresh(self, scenario: str, repeat: int, now: datetime) -> None:
        """Check that the limit of a repeat, if there is one, is not too old for more contestants.

        Raises:
            ResultsError: It is.
        """
        began = (self.find(scenario, repeat, LIMIT) or {}).get("began")
        if began is not None and (age := now - datetime.fromisoformat(began)) > FRESH:
            raise ResultsError(
                f"{self.path}: the limit of {scenario} repeat {repeat} was measured "
                f"{age.total_seconds() / 3600:.1f} h ago, and the machine may be faster or slower "
                "by now; begin with another repeat by --first"
            )

    def add(self, row: Row) -> None:
        """Keep a row, in place of one with the same key; the file holds it once this returns.

        Raises:
            ResultsError: It cannot be written; the file stays as it was.
        """
        self._rows[_key(row)] = dict(row)
        self._publish()

    def check_writable(self) -> None:
        """Find out before anything is run whether rows can be kept.

        Raises:
            ResultsError: They cannot.
        """
        there = self.path.exists()
        self._publish()
        if not there:
            self.path.unlink()

    def _publish(self) -> None:
        draft = self.path.with_name(f".{self.path.name}.draft")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("w", encoding="utf-8") as file:
                file.write(render(self.rows))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.path)
        except OSError as error:
            remedy = "make room there, or name another file with --json"
            raise ResultsError(f"{self.path}: cannot be written: {error}; {remedy}") from error


def render(rows: Sequence[Row]) -> str:
    """The file's text."""
    return json.dumps({"format": FORMAT, "rows": list(rows)}, indent=1, allow_nan=False) + "\n"


def load(path: Path) -> tuple[Row, ...]:
    """The rows of a file.

    Raises:
        ResultsError: It is no such file.
    """
    remedy = "name a file that benchmarks.run wrote, or another one to write to"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: cannot be read: {error}; {remedy}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        given = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ResultsError(f"{path}: format is {given}, expected {FORMAT}; {remedy}")
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and set(_KEY) <= set(row) for row in rows
    ):
        raise ResultsError(f"{path}: rows must each hold {', '.join(_KEY)}; {remedy}")
    return tuple(rows)


def load_all(directory: Path) -> tuple[Row, ...]:
    """The rows of a directory: of all scenarios' files, none of other files."""
    return tuple(row for path in sorted(directory.glob("S*.json")) for row in load(path))


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows; where one has a speed and no `ratio_to_limit`, with it.

    It is then its samples per second over those of the limit's row of the same scenario and repeat,
    unless that was measured on another machine or on other nodes.
    """
    limits = {(r["scenario"], r["repeat"]): r for r in rows if r["contestant"] == LIMIT}
    return [_with_ratio(row, limits.get((row["scenario"], row["repeat"]))) for row in rows]


def _with_ratio(row: Row, limit: Row | None) -> Row:
    if limit is None or row.get("ratio_to_limit") is not None or row.get("samples_per_s") is None:
        return row
    if not limit.get("samples_per_s") or _ground(row) != _ground(limit):
        return row
    speed = limit["samples_per_s"]
    ratio = row["samples_per_s"] / speed
    return {**row, "limit_samples_per_s": speed, "ratio_to_limit": ratio}


def _ground(row: Row) -> list[Any]:
    """What a limit depends on: the processor, and the nodes."""
    machine, bed = row.get("machine") or {}, row.get("settings_of_testbed") or {}
    return [machine.get("cpu"), machine.get("cores"), bed.get("nodes"), bed.get("later")]


def differing(part: str, row: Row, now: Mapping[str, Any]) -> list[str]:
    """What a part of a row has other than a run of now would have."""
    found, ours, theirs = [], json.loads(json.dumps(now)), row[part]
    for field in sorted((ours.keys() | theirs.keys()) - _WORDS - {*SOFTWARE}):
        if ours.get(field) != theirs.get(field):
            shown = [json.dumps(one.get(field))[:_SHOWN] for one in (theirs, ours)]
            found.append(f"{part}.{field} is {shown[0]}, now {shown[1]}")
    return found


def machine_use(row: Row) -> Mapping[str, float]:
    """Parts of the machine's CPU time in the window: `steal`, its host's, and `outside`, others'.

    It was called `steal` as a whole once. Empty where it was not measured.
    """
    return row.get("machine_use") or row.get("steal") or {}


def disturbed(row: Row) -> bool:
    """Whether more than `QUIET` of the machine was used by others than the testbed."""
    return machine_use(row).get("outside", 0.0) > QUIET


def by_contestant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of one scenario by contestant: the limit, ours, then the peers, each by repeat."""
    names = sorted({row["contestant"] for row in rows}, key=_rank)
    return {
        name: sorted((r for r in rows if r["contestant"] == name), key=lambda r: r["repeat"])
        for name in names
    }


def values(rows: Sequence[Row], measure: str) -> dict[int, float]:
    """A measure by repeat, where it was measured."""
    return {r["repeat"]: r[measure] for r in rows if r.get(measure) is not None}


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ratios of the repeats that both have.

    >>> paired({0: 3.0, 1: 4.0}, {1: 2.0, 2: 1.0})
    [2.0]
    """
    return [ours[r] / theirs[r] for r in sorted(ours.keys() & theirs.keys()) if theirs[r]]


def best_peer(rows: Sequence[Row], among: frozenset[str] | None = None) -> dict[int, float]:
    """The samples per second of the fastest peer, by repeat.

    Args:
        rows: Of one scenario.
        among: Only these peers; None: all that are neither the limit nor ours.
    """
    fastest: dict[int, float] = {}
    for name, theirs in peers(rows):
        if among is not None and name not in among:
            continue
        for repeat, value in values(theirs, "samples_per_s").items():
            fastest[repeat] = max(value, fastest.get(repeat, 0.0))
    return fastest


def peers(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Name and rows of every contestant that is not ours."""
    for name, theirs in by_contestant(rows).items():
        if name != LIMIT and not is_ours(name):
            yield name, theirs


def is_ours(name: str) -> bool:
    """Whether a contestant is raycloud, in whatever variant."""
    return name == OURS or name.startswith(f"{OURS}-")


def spread(found: Sequence[float], digits: int = 1) -> str:
    """Median [least..most], or the only value.

    >>> spread([3.0, 1.0, 2.0]), spread([1.5]), spread([])
    ('2.0 [1.0..3.0]', '1.5', '-')
    """
    if not found:
        return "-"
    middle = f"{median(found):,.{digits}f}"
    if len(found) == 1:
        return middle
    return f"{middle} [{min(found):,.{digits}f}..{max(found):,.{digits}f}]"


def few(count: int, of: int) -> str:
    """How many there are, where some are missing.

    >>> few(1, 3), few(3, 3), few(0, 3)
    (' (1 of 3)', '', '')
    """
    return f" ({count} of {of})" if 0 < count < of else ""


def _key(row: Row) -> tuple[str, int, str]:
    return row["scenario"], row["repeat"], row["contestant"]


def _rank(name: str) -> tuple[int, str]:
    return (0 if name == LIMIT else 1 if is_ours(name) else 2, name)
