"""Recorded traces as scenarios: how many machines a cloud let one hold, how fast workers were.

Spot traces are those of skypilot-org/spot-traces (NSDI'24), a JSON file
`{"metadata": {"gap_seconds": 300}, "data": [16, 16, 11, ...]}` with the number of machines held,
one value every gap. Batch times are those of alibaba/clusterdata (cluster-trace-gpu-v2020), a CSV
file with the columns `worker`, `time` and `batch_time_norm` (0 to 1000).
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from raycloud.errors import DataError
from raycloud.simulate.scenario import Fault, Kind

_USUAL = 100.0  # a batch time of this is a second per micro-batch


def held(path: Path, *, nodes: int, until_s: float) -> tuple[Fault, ...]:
    """So many nodes are there as the trace has machines, of as many as it has at most.

    Args:
        path: A spot trace.
        nodes: As many are there where the trace has most.
        until_s: What comes later is left out.

    Raises:
        DataError: The file is no such trace.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        gap_s = float(content["metadata"]["gap_seconds"])
        values = [int(value) for value in content["data"]]
        most = max(values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_trace(path, "gap_seconds and data", error) from error
    if most < 1 or gap_s <= 0:
        raise DataError(f"{path}: no machine was ever there", hint="another trace")
    found, before = [], most
    for number, value in enumerate(values):
        at_s = number * gap_s
        if value != before and at_s < until_s:
            found.append(Fault(at_s=at_s, kind=Kind.HOLD, many=nodes * value // most))
        before = value
    return tuple(found)


def speeds(path: Path) -> tuple[float, ...]:
    """Seconds per micro-batch of each worker of a trace: the median of its batch times.

    Raises:
        DataError: The file is no such trace.
    """
    times: dict[int, list[float]] = defaultdict(list)
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for line in csv.DictReader(lines):
                times[int(line["worker"])].append(float(line["batch_time_norm"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_trace(path, "worker and batch_time_norm", error) from error
    found = tuple(median(times[worker]) / _USUAL for worker in sorted(times))
    if not found or min(found) <= 0:
        raise DataError(f"{path}: a worker needs batch times > 0", hint="another trace")
    return found


def _no_trace(path: Path, what: str, error: Exception) -> DataError:
    return DataError(
        f"{path} is no trace with {what}: {error!r}", hint="see docs/simulation.md for its format"
    )
