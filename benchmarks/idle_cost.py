"""What being elastic costs while nothing happens: worker CPU-seconds per sample, with and without.

    python -m benchmarks.idle_cost --json FILE

`elastic` is `raycloud train` of a job that may run with one or two workers, on a machine that holds
two, as raycloud sets it: shares follow speed, members answer and are watched. `fixed` are the same
members in the same Ray in a group that never changes and of which nobody asks anything (see
`benchmarks.peers.fixed_members`). Both take turns, and the first turn goes round.

Where the machine's speed changes from run to run by more than 1% the first ratio says little. The
second one is of each run's own threads: all of them, over the one that computes. What being elastic
costs that thread itself, which looks once a step whether anything has changed, it does not see.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.contestants import Attempt, Contestant, raycloud_command
from benchmarks.machine import describe
from benchmarks.peers.fixed_members import fixed_job
from benchmarks.statistics import Ratio, paired_ratio
from benchmarks.throughput import FORMAT, LIMIT_S, WARM_UP, Row, measure_one, turns, warm_caches

AT_MOST = 1.01
_STEADY = "all threads' CPU-seconds over those of the threads that compute"


def _elastic(attempt: Attempt) -> list[str]:
    return raycloud_command(attempt, elastic_job(attempt))


def elastic_job(attempt: Attempt) -> dict[str, Any]:
    """The fixed group's job, with the range of workers that may compute it."""
    elastic = {"min_workers": 1, "max_workers": workload.WORKERS}
    return {**fixed_job(attempt), "elastic": elastic}


def _fixed(attempt: Attempt) -> list[str]:
    return [
        *(sys.executable, "-m", "benchmarks.peers.fixed_members"),
        *("--steps", str(attempt.steps), "--directory", str(attempt.directory)),
    ]


CONTESTANTS: Mapping[str, Contestant] = {
    "elastic": Contestant(command=_elastic),
    "fixed": Contestant(command=_fixed),
}


def ratio_of(rows: Sequence[Mapping[str, Any]], quantity: str = "cpu_s_per_sample") -> Ratio:
    """A quantity of `elastic` over that of `fixed`, paired by repeat."""
    costs: dict[str, dict[int, float]] = {name: {} for name in CONTESTANTS}
    for row in rows:
        costs[row["contestant"]][row["repeat"]] = row[quantity]
    both = sorted(costs["elastic"].keys() & costs["fixed"].keys())
    return paired_ratio(*([costs[name][r] for r in both] for name in ("elastic", "fixed")))


def told(ratio: Ratio, what: str = "worker CPU-seconds per sample") -> str:
    """A ratio for people."""
    interval = "" if ratio.low is None else f" (95%: {ratio.low:.4f} to {ratio.high:.4f})"
    verdict = "held" if ratio.mean <= AT_MOST else "not held"
    return (
        f"{what}, elastic over fixed, {ratio.count} pairs: "
        f"{ratio.mean:.4f}{interval}, median {ratio.median:.4f}; at most {AT_MOST}: {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare, write and print."""
    asked = _parse(arguments)
    cpus = set(sorted(os.sched_getaffinity(0))[: workload.WORKERS])
    os.sched_setaffinity(0, cpus)  # inherited by all that is started
    warm_caches()
    rows: list[Row] = []
    for repeat, name in turns(tuple(CONTESTANTS), asked.repeats):
        row = measure_one(
            name,
            repeat,
            steps=asked.steps,
            warm_up=asked.warm_up,
            limit_s=LIMIT_S,
            among=CONTESTANTS,
        )
        rows.append(row)
        cost_ms, over = row["cpu_s_per_sample"] * 1e3, row["cpu_over_computing"]
        what = f"{cost_ms:8.4f} CPU-ms per sample, {over:.4f} times the computing threads' own"
        print(f"repeat {repeat}  {name:<8} {what}", flush=True)
    words = [told(ratio_of(rows)), told(ratio_of(rows, "cpu_over_computing"), _STEADY)]
    record = {"format": FORMAT, "machine": describe(cpus), "rows": rows, "ratio": words}
    asked.json.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(words))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150, help="steps of each run")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps left out")
    asked = parser.parse_args(arguments)
    if asked.repeats < 1 or not 1 <= asked.warm_up < asked.steps:
        parser.error("--repeats must be positive, and --warm-up at least 1 and below --steps")
    return asked


if __name__ == "__main__":
    sys.exit(main())
