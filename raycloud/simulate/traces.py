"""Traces of real machines: how many are held, and how long each takes, moment by moment.

Spot traces are those of skypilot-org/spot-traces (NSDI'24), a JSON file
`{"metadata": {"gap_seconds": 300}, "data": [16, 16, 11, ...]}` with the number of machines held,
one value every gap. Batch times are those of alibaba/clusterdata (cluster-trace-gpu-v2020), a CSV
file with the columns `worker`, `time` and `batch_time_norm`.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from raycloud.errors import SpecError
from raycloud.simulate.scenario import Fault, Kind
from raycloud.spec.load import option_text

COLUMNS = ("worker", "time", "batch_time_norm")
_USUAL = 100.0  # a batch time of this is a second per micro-batch
_FORMAT = "see docs/simulation.md for its format"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """How many machines are held: one value every `gap_s`."""

    name: str
    gap_s: float
    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most machines that are ever held."""
        return max(self.counts)

    def faults(self, *, nodes: int, until_s: float, again: bool = False) -> tuple[Fault, ...]:
        """So many of `nodes` are there as it has machines; where it has most, all are.

        With `again` it begins anew at its end.
        """
        found, before, number = [], self.most, 0
        while number * self.gap_s < until_s and (again or number < len(self.counts)):
            value = self.counts[number % len(self.counts)]
            if value != before:
                many = nodes * value // self.most
                found.append(Fault(at_s=number * self.gap_s, kind=Kind.HOLD, many=many))
            before, number = value, number + 1
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Paced:
    """Batch times: of each moment, those of each worker, in the trace's unit."""

    name: str
    rows: tuple[tuple[float, ...], ...]

    @property
    def workers(self) -> int:
        """How many it tells of."""
        return len(self.rows[0])

    def slow(self) -> tuple[tuple[float, ...], ...]:
        """The same as times of the usual: 1 is the median of all."""
        usual = median(value for row in self.rows for value in row)
        return tuple(tuple(value / usual for value in row) for row in self.rows)


def read_trace(path: Path) -> Held | Paced:
    """A trace of either kind, by the ending of its file.

    Raises:
        SpecError: It cannot be read, or is none; names line, column and value.
    """
    if path.suffix not in {".json", ".csv"}:
        what = "is no trace: its name ends neither in .json nor in .csv"
        raise SpecError("--trace", str(path), what, hint=_FORMAT)
    text = option_text("--trace", path, "give a JSON or CSV file")
    try:
        return (_held if path.suffix == ".json" else _paced)(text, path.name)
    except csv.Error as error:
        raise SpecError("--trace", str(path), f"is no CSV: {error}", hint=_FORMAT) from error


def _held(text: str, name: str) -> Held:
    try:
        told = json.loads(text)
    except ValueError as error:
        raise SpecError(name, text[:40], f"is no JSON: {error}", hint=_FORMAT) from error
    metadata = told.get("metadata") if isinstance(told, Mapping) else None
    gap = metadata.get("gap_seconds") if isinstance(metadata, Mapping) else None
    data = told.get("data") if isinstance(told, Mapping) else None
    if not isinstance(gap, int | float) or not (_is_number(gap) and gap > 0):
        what = "is no trace with gap_seconds and data: seconds above 0 are needed"
        raise SpecError(f"{name}: metadata.gap_seconds", gap, what, hint=_FORMAT)
    if not isinstance(data, list) or not data:
        what = "is no trace with gap_seconds and data: numbers of machines are needed"
        raise SpecError(f"{name}: data", data, what, hint=_FORMAT)
    for number, value in enumerate(data):
        if not _is_number(value) or value < 0 or value != int(value):
            what = "is no number of machines"
            raise SpecError(f"{name}: data[{number}]", value, what, hint="correct it")
    if not max(data):
        raise SpecError(f"{name}: data", 0, "no machine was ever there", hint="use another trace")
    return Held(name=name, gap_s=float(gap), counts=tuple(map(int, data)))


_LARGEST = 1e300  # whole numbers may be larger than any float


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < _LARGEST


def _paced(text: str, name: str) -> Paced:
    """Only moments of which all workers tell."""
    moments: dict[int, dict[int, float]] = defaultdict(dict)
    lines = csv.DictReader(io.StringIO(text))
    heads = [head.strip() for head in lines.fieldnames or ()]
    lines.fieldnames = heads
    missing = [column for column in COLUMNS if column not in heads]
    if missing:
        what = f"is not the names of columns: {missing[0]} is missing"
        hint = f"begin with a line that has {', '.join(COLUMNS)}"
        raise SpecError(f"{name}, line 1", ",".join(heads), what, hint=hint)
    for number, line in enumerate(lines, 2):
        where = f"{name}, line {number}"
        worker, moment = (_whole(where, column, line[column]) for column in COLUMNS[:2])
        moments[moment][worker] = _seconds(where, line[COLUMNS[2]])
    most = max(map(len, moments.values()), default=0)
    whole = [row for _, row in sorted(moments.items()) if len(row) == most]
    if not whole:
        raise SpecError(name, "", "a worker needs batch times > 0", hint="use another trace")
    return Paced(name=name, rows=tuple(tuple(row[at] for at in sorted(row)) for row in whole))


def _whole(where: str, column: str, told: str | None) -> int:
    try:
        return int(told or "")
    except ValueError:
        what = "is no whole number"
        raise SpecError(f"{where}: {column}", told, what, hint="correct it") from None


def _seconds(where: str, told: str | None) -> float:
    try:
        seconds = float(told or "")
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        what = "is no time above 0"
        raise SpecError(f"{where}: {COLUMNS[2]}", told, what, hint="correct it")
    return seconds


def faults_of_trace(path: Path, *, nodes: int, until_s: float) -> tuple[Fault, ...]:
    """See `Held.faults`.

    Raises:
        SpecError: The file is no such trace.
    """
    trace = read_trace(path)
    if not isinstance(trace, Held):
        raise SpecError("--spot", str(path), "tells of batch times", hint="give it as --speeds")
    return trace.faults(nodes=nodes, until_s=until_s)


def speeds_of_trace(path: Path) -> tuple[float, ...]:
    """Seconds per micro-batch of each worker of a trace: the median of its batch times.

    Raises:
        SpecError: The file is no such trace.
    """
    trace = read_trace(path)
    if not isinstance(trace, Paced):
        raise SpecError("--speeds", str(path), "tells of machines held", hint="give it as --spot")
    return tuple(median(column) / _USUAL for column in zip(*trace.rows, strict=True))
