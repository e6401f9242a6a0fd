"""What `sync: auto` chooses, against every point that a tour of the same run can measure.

    python -m benchmarks.choosing [--scenarios S1,S2,S3,S9] [--json FILE] [--quick]

As root, on the testbed. One run of the race's model goes by `sync: auto` until the period that it
chose has not changed for a while; another one tours the points that `auto` may choose from, and the
exact exchange. A step is timed from commit to commit, by what members report; of rounds their last
steps are as long as the exchange makes them, and count with the others. Exit status 1: in some
scenario the choice takes longer than `1 / 0.95` of the best point's step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT, describe, load
from benchmarks.racing.contestant import Attempt
from benchmarks.racing.raycloud_contestants import Raycloud
from benchmarks.racing.registry import AUTO
from benchmarks.racing.scenarios import GLOBAL_BATCH, SCENARIOS, Scenario
from benchmarks.testbed import Testbed
from benchmarks.testbed.cluster import Cluster
from benchmarks.workload import LEARNING_RATE
from raycloud.events import Noticed, StepsCommitted, SyncMeasured
from raycloud.report.log import read_events

RAYCLOUD = Path(sys.executable).with_name("raycloud")
FLOOR = 0.95
POINTS = (
    "topology=ring",
    "topology=tree codec=int8",
    "topology=tree codec=int4",
    *(f"topology=tree codec=int4 period={steps}" for steps in (8, 16, 32)),
)
_LIMIT_S = 900.0
Row = dict[str, Any]


def step_seconds(run: Path, last_steps: int) -> float:
    """Of the last steps of a run, from commit to commit: the mean, of the member in the middle."""
    reports: dict[int, list[StepsCommitted]] = {}
    for _, event in read_events(run / "events.jsonl"):
        if isinstance(event, StepsCommitted):
            reports.setdefault(event.member, []).append(event)
    newest = max(one[-1].last_step for one in reports.values())
    means = []
    for every in reports.values():
        late = [one for one in every if one.first_step >= newest - last_steps]
        means.append(sum(o.wall_s for o in late) / sum(o.last_step - o.first_step for o in late))
    return statistics.median(means)


def measured(run: Path) -> Row:
    """Seconds of a step by each point of a tour."""
    return {
        " ".join(f"{name}={value}" for name, value in event.point.items()): event.step_s
        for _, event in read_events(run / "events.jsonl")
        if isinstance(event, SyncMeasured)
    }


def told(run: Path) -> list[str]:
    """What the log says of the choice."""
    events = [event for _, event in read_events(run / "events.jsonl")]
    some = [one for one in events if isinstance(one, Noticed)]
    return [f"{one.what}: {dict(one.detail)}"[:300] for one in some if _of_sync(one.what)]


def _of_sync(what: str) -> bool:
    return any(word in what for word in ("exchange", "round", "updates"))


def compared(scenario: Scenario, *, steps: int, points: Sequence[str]) -> Row:
    """Both runs of one scenario."""
    with (
        tempfile.TemporaryDirectory(prefix="ch", dir="/tmp", ignore_cleanup_errors=True) as place,
        Testbed(scenario.spec) as bed,
        Cluster(bed, directory=Path(place) / "ray", environment=dict(os.environ)) as cluster,
    ):
        cluster.join(*bed.nodes)
        bed.limit()

        def train(name: str, count: int, sync: Mapping[str, Any]) -> Path:
            folder = Path(place) / name
            attempt = Attempt(
                directory=folder,
                nodes=tuple(bed.nodes),
                most_nodes=len(bed.nodes),
                global_batch=GLOBAL_BATCH,
                per_worker=GLOBAL_BATCH // len(bed.nodes),
                learning_rate=LEARNING_RATE,
                elastic=False,
                ray_address=cluster.address,
            )
            for part in (attempt.journals, attempt.snapshots, attempt.logs):
                part.mkdir(parents=True)
            job = Raycloud(name, sync=sync).job(attempt) | {"steps": count}
            (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
            command = [str(RAYCLOUD), "train", str(folder / "job.yaml"), "--plain"]
            command += ["--run-dir", str(folder / "run"), "--address", cluster.address]
            environment = {**cluster.environment, "PYTHONPATH": str(ROOT)}
            log = attempt.logs / "driver.log"
            process = bed.head.start(command, environment=environment, log=log)
            if (code := process.wait(_LIMIT_S)) != 0:
                raise SystemExit(f"{name} ended with {code}: {log.read_text()[-2000:]}")
            return folder / "run"

        auto = train("auto", steps, AUTO)
        sync = {"tour": list(points), "codec": "int4", "warm_steps": 0}
        tour = train("tour", _toured_steps(points), sync)
        by = measured(tour)
        auto_s, best = step_seconds(auto, steps // 3), min(by, key=lambda point: by[point])
        return {
            "scenario": scenario.name,
            "auto_s": auto_s,
            "toured": by,
            "best": best,
            "part_of_best": by[best] / auto_s,
            "auto_said": told(auto),
            "kept": by[best] / auto_s >= FLOOR,
        }


def _toured_steps(points: Sequence[str]) -> int:
    """Enough for the looks at each point, and some steps between them."""
    periods = [int(point.rpartition("period=")[2]) if "period" in point else 1 for point in points]
    return 40 + sum(max(5, 2 * h) + max(20, 3 * h) + 2 * h + 5 for h in periods)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where the floor is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--scenarios", default="S1,S2,S3,S9")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=150, help="of the run by auto")
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    asked = parser.parse_args(arguments)
    for name in asked.scenarios.split(","):
        if name not in SCENARIOS:
            parser.error(f"--scenarios {name!r}: give some of {', '.join(SCENARIOS)}")
    rows = []
    before = load()
    for name in asked.scenarios.split(","):
        scenario = SCENARIOS[name]
        if asked.quick:
            scenario = replace(scenario.squeezed(), name=name)
        points = POINTS[:3] if asked.quick else POINTS
        rows.append(compared(scenario, steps=30 if asked.quick else asked.steps, points=points))
        print(json.dumps(rows[-1], indent=1), flush=True)
        if asked.json is not None:
            found = {
                "format": 1,
                "floor": FLOOR,
                "quick": asked.quick,
                "machine": describe(os.sched_getaffinity(0)),
                "load_before": before,
                "rows": rows,
            }
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row["kept"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
