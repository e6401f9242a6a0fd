"""Two local workers: raycloud against torchrun's DDP and Ray Train, same model, data and updates.

    python -m benchmarks.throughput --json FILE

Every run is a fresh process tree on the same CPUs, one compute thread per worker. Contestants take
turns within a repeat, and the first turn goes round from repeat to repeat.

Each has its own defaults: raycloud's embedded Ray runs its workers at niceness 0, imports torch
while the cluster starts, and collects no metrics or task events; the Ray Train contestant's Ray
does none of these (its workers run at Ray's default niceness, 15).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import workload
from benchmarks.contestants import CONTESTANTS, Attempt, Contestant
from benchmarks.machine import ROOT, describe, load
from benchmarks.marks import measure, read_marks
from benchmarks.processes import CommandFailedError, run
from benchmarks.statistics import paired_ratio

FORMAT = 1
WARM_UP = 20
LIMIT_S = 900.0

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantity of raycloud over that of a peer, and the floor it is held to."""

    quantity: str
    peer: str
    at_least: float | None = None
    at_most: float | None = None

    def held(self, ratio: float) -> bool:
        """Whether a ratio keeps to the floor."""
        return (self.at_least is None or ratio >= self.at_least) and (
            self.at_most is None or ratio <= self.at_most
        )


COMPARISONS = (
    Comparison(quantity="cpu_s_per_sample", peer="torchrun", at_most=1.02),
    Comparison(quantity="samples_per_s", peer="torchrun", at_least=0.96),
    Comparison(quantity="samples_per_s", peer="ray-train", at_least=1.0),
    Comparison(quantity="first_step_s", peer="ray-train", at_most=0.6),
)


def turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(repeat, contestant) in the order of running; each repeat begins one contestant later.

    >>> list(turns(("a", "b"), 2))
    [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    for repeat in range(repeats):
        at = repeat % len(names)
        for name in (*names[at:], *names[:at]):
            yield repeat, name


def measure_one(
    name: str,
    repeat: int,
    *,
    steps: int,
    warm_up: int,
    limit_s: float,
    among: Mapping[str, Contestant] = CONTESTANTS,
) -> Row:
    """Run one contestant once.

    Raises:
        CommandFailedError: It failed, or not all of its workers finished.
    """
    contestant = among[name]
    with tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as place:
        attempt = Attempt(directory=Path(place), steps=steps)
        attempt.marks.mkdir()
        log = attempt.directory / "log"
        load_before = load()
        command = contestant.command(attempt)
        environment = contestant.environment(attempt)
        began_s = run(command, environment=environment, log=log, limit_s=limit_s)
        workers = read_marks(attempt.marks)
        if len(workers) != workload.WORKERS:
            said = log.read_text(errors="replace")
            raise CommandFailedError(f"{name}: marks of {len(workers)} workers; it said:\n{said}")
        found = measure(
            workers, began_s=began_s, warm_up=warm_up, global_batch=workload.GLOBAL_BATCH
        )
        return {
            "contestant": name,
            "repeat": repeat,
            **asdict(found),
            "load_before": load_before,
            "reported": contestant.reported(attempt),
        }


def compare(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """All ratios that the rows allow, paired by repeat."""
    found: list[Row] = []
    for comparison in COMPARISONS:
        ours, theirs = (
            {row["repeat"]: row[comparison.quantity] for row in rows if row["contestant"] == name}
            for name in ("raycloud", comparison.peer)
        )
        if not (both := sorted(ours.keys() & theirs.keys())):
            continue
        ratio = paired_ratio([ours[r] for r in both], [theirs[r] for r in both])
        interval = [end for end in (ratio.low, ratio.high) if end is not None]
        found.append(
            {
                **asdict(comparison),
                **asdict(ratio),
                "held": comparison.held(ratio.mean),
                "held_by_interval": bool(interval) and all(map(comparison.held, interval)),
            }
        )
    return found


def table(rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Rows and comparisons for people."""
    lines = [
        f"{'contestant':<12}{'repeat':>7}{'samples/s':>11}{'typical':>9}{'cpu ms/sample':>15}"
        f"{'first step s':>14}{'final loss':>12}"
    ]
    lines += [
        f"{row['contestant']:<12}{row['repeat']:>7}{row['samples_per_s']:>11.1f}"
        f"{row['typical_samples_per_s']:>9.1f}{row['cpu_s_per_sample'] * 1e3:>15.3f}"
        f"{row['first_step_s']:>14.2f}{row['final_loss']:>12.4f}"
        for row in sorted(rows, key=lambda row: (row["contestant"], row["repeat"]))
    ]
    if comparisons:
        lines += ["", "raycloud over its peers, paired by repeat: geometric mean [95% interval]"]
    for one in comparisons:
        interval = "" if one["low"] is None else f"[{one['low']:.3f}, {one['high']:.3f}]"
        floor = f">= {one['at_least']}" if one["at_least"] is not None else f"<= {one['at_most']}"
        lines.append(
            f"{one['quantity']:<18}/ {one['peer']:<10}{one['mean']:>7.3f} {interval:<16}"
            f"median {one['median']:.3f}  floor {floor}: {'held' if one['held'] else 'not held'}"
        )
    return "\n".join(lines)


def warm_caches() -> None:
    """Read the libraries once, so that the first contestant does not pay for the disk."""
    subprocess.run(
        [sys.executable, "-c", "import torch, ray.train.torch, yaml, typer, rich"],
        check=True,
        cwd=ROOT,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, compare, write and print; 1 where a contestant failed."""
    asked = _parse(arguments)
    cpus = set(sorted(os.sched_getaffinity(0))[: workload.WORKERS])
    os.sched_setaffinity(0, cpus)  # inherited by all that is started
    warm_caches()
    rows: list[Row] = []
    failure: CommandFailedError | None = None
    for repeat, name in turns(asked.contestants, asked.repeats):
        try:
            row = measure_one(
                name, repeat, steps=asked.steps, warm_up=asked.warm_up, limit_s=LIMIT_S
            )
        except CommandFailedError as error:
            failure = error
            break
        rows.append(row)
        print(f"repeat {repeat}  {name:<10} {row['samples_per_s']:8.1f} samples/s", flush=True)
    comparisons = compare(rows)
    record = {
        "format": FORMAT,
        "machine": describe(cpus),
        "workload": _workload(asked.steps, asked.warm_up),
        "complete": failure is None,
        "rows": rows,
        "comparisons": comparisons,
    }
    asked.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{table(rows, comparisons)}")
    if failure is not None:
        print(f"\n{failure}", file=sys.stderr)
    return 0 if failure is None else 1


def _workload(steps: int, warm_up: int) -> dict[str, Any]:
    names = ("SEED", "WORKERS", "GLOBAL_BATCH", "LENGTH", "WIDTH", "DEPTH", "HEADS", "CLIP_NORM")
    return {
        **{name.lower(): getattr(workload, name) for name in names},
        "parameters": sum(p.numel() for p in workload.build_model().parameters()),
        "steps": steps,
        "warm_up": warm_up,
    }


def _contestants(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(CONTESTANTS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}; known: {', '.join(CONTESTANTS)}")
    return names


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, required=True, help="file for the results")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="steps of each run")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps left out of speed")
    parser.add_argument("--contestants", type=_contestants, default=tuple(CONTESTANTS))
    parser.add_argument("--quick", action="store_true", help="one short repeat: does it work?")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.repeats, asked.steps, asked.warm_up = 1, 6, 2
    if asked.repeats < 1 or not 1 <= asked.warm_up < asked.steps:
        parser.error("--repeats must be positive, and --warm-up at least 1 and below --steps")
    return asked


if __name__ == "__main__":
    sys.exit(main())
