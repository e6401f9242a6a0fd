"""A sweep on nodes behind thin links: is what it calls best the soonest, and by how much?

    python -m benchmarks.thin_sweep [--scenario S3] [--json FILE] [--keep DIRECTORY] [--quick]

`jobs/gpt_sweep.yaml` is swept on the testbed with a worker on each node. Then the job as it is
trains until the target with `sync: auto` and with the exact exchange; and the same space is swept
once more without early stops: each point trains until the target. Where points were sooner there
than the best, up to three of them, the best and `sync: auto` train twice more, in turn: medians of
three decide, and points that were sooner once are named. Seconds are those of training, as sweeps
count them. `--quick`: two trials and few steps, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import ROOT, describe, load
from benchmarks.racing.scenarios import SCENARIOS
from benchmarks.testbed import Testbed
from benchmarks.testbed.cluster import Cluster
from raycloud.spec.sweep import load_sweep, trial_job
from raycloud.tuning.results import LOG, Results, Trial

JOB = ROOT / "jobs" / "gpt_sweep.yaml"
SOONER_THAN_AUTO, SOONER_THAN_EXACT = 1.1, 4.0  # floors
_CONTENDERS, _TURNS = 3, 2
_VARIED = ("global_batch", "base_batch", "rate_scaling", "settings", "sync")  # by the space
_RUN_S = 1200.0
Row = dict[str, Any]


class Runs:
    """Sweeps by the command line on the head of a testbed.

    Args:
        bed: It, with its quotas.
        cluster: Ray on it.
        place: For jobs, logs and results.
        quick: Few steps.
    """

    def __init__(self, bed: Testbed, cluster: Cluster, place: Path, *, quick: bool) -> None:
        self._bed, self._cluster, self._place, self._quick = bed, cluster, place, quick

    def sweep(self, name: str, **fields: Any) -> list[Trial]:
        """Its trials; `fields` of the section `sweep`, and by `job` those of the job, are other."""
        told = yaml.safe_load(JOB.read_text())
        nodes = len(self._bed.nodes)
        told |= {"task": f"{JOB.with_name('gpt.py')}:Gpt", **fields.pop("job", {})}
        told["elastic"] = {"min_workers": nodes, "max_workers": nodes}
        told["micro_batch"] = 1  # the smallest batch of the space is for all nodes, too
        told["sweep"] |= {"parallel": 1, **fields}
        if self._quick:
            told |= {"steps": 40}
            told["sweep"] |= {"grace_steps": 20, "trials": min(2, told["sweep"]["trials"])}
            told["sweep"]["target"] = 3.3
        path, where = self._place / f"{name}.yaml", self._place / name
        path.write_text(yaml.safe_dump(told, sort_keys=False))
        command = [str(Path(sys.executable).with_name("raycloud")), "sweep", "run", str(path)]
        command += ["--dir", str(where), "--address", self._cluster.address]
        environment = {**self._cluster.environment, "PYTHONPATH": str(ROOT)}
        log = self._place / f"{name}.log"
        process = self._bed.head.start(command, environment=environment, log=log)
        if (code := process.wait(3 * _RUN_S)) != 0:
            raise SystemExit(f"{name} ended with {code}: {log.read_text()[-2000:]}")
        trials = Results.open(where / LOG).trials
        return [trials[number] for number in sorted(trials)]

    def alone(self, name: str, **job: Any) -> Row:
        """One trial of the job, with other fields, until the target."""
        space = {"seed": {"choice": [0]}}
        more = {"space": space, "trials": 1, "scheduler": "none", "seconds": _RUN_S, "finalists": 0}
        [trial] = self.sweep(name, job=job, **more)
        return {"name": name, **row(trial)}


def row(trial: Trial) -> Row:
    """A trial as it is kept."""
    last = trial.last
    told: Row = {"point": dict(trial.point), "status": trial.status}
    if last is not None:
        told |= {"step": last.step, "measure": last.measure, "bytes": last.bytes}
        told |= {"seconds": last.seconds, "samples": last.samples}
    return told


def seconds(one: Row) -> float | None:
    """To the target; None: it was not reached, in the seconds that it had."""
    return float(one["seconds"]) if one["status"] == "reached" else None


def measure(runs: Runs) -> Row:
    """The sweep, the job as it is, each point of the sweep whole, and who was sooner once more."""
    swept = runs.sweep("swept")
    told: Row = {"swept": [{"trial": t.number, "again": t.again, **row(t)} for t in swept]}
    reached = [t for t in swept if t.status == "reached" and t.last is not None]
    if not reached:
        return {**told, "summary": {"kept": False, "why": "no trial came to the target"}}
    again = [t for t in reached if t.again is not None]
    best = min(again or reached, key=lambda t: t.last.seconds if t.last else 0.0)
    number = best.number if best.again is None else best.again
    alone = [runs.alone(way, sync=way) for way in ("auto", "exact")]
    whole = runs.sweep("whole", scheduler="none", finalists=0)
    took = {t.number: [seconds(row(t)) or math.inf] for t in whole}
    auto = [seconds(alone[0]) or math.nan]
    sooner = sorted((n for n in took if took[n] < took[number]), key=took.__getitem__)
    job, section = load_sweep(JOB, check_files=False)
    for turn in range(_TURNS if sooner else 0):
        for other in (number, *sooner[:_CONTENDERS]):
            filled = trial_job(job, section, whole[other].point).resolved()
            fields = {name: filled.model_dump(mode="json")[name] for name in _VARIED}
            took[other].append(again(runs, f"{other}-{turn}", **fields))
        auto.append(again(runs, f"auto-{turn}", sync="auto"))
    exact_s = seconds(alone[1]) or math.nan
    found = summary(number, took, auto, exact_s) | {"best": dict(best.point)}
    every = [
        {
            "trial": t.number,
            "took_s": [s if s < math.inf else None for s in took[t.number]],
            **row(t),
        }
        for t in whole
    ]
    return {**told, "alone": alone, "auto_s": auto, "whole": every, "summary": found}


def again(runs: Runs, name: str, **job: Any) -> float:
    """Seconds to the target, once more."""
    if (took_s := seconds(runs.alone(name, **job))) is None:
        raise SystemExit(f"{name} did not come to the target this time")
    return took_s


def summary(best: int, took: dict[int, list[float]], auto: list[float], exact_s: float) -> Row:
    """Whether the floors are kept, by medians of those that trained as often as the best."""
    best_s, auto_s = statistics.median(took[best]), statistics.median(auto)
    as_often = [number for number, values in took.items() if len(values) == len(took[best])]
    sooner = [number for number in as_often if statistics.median(took[number]) < best_s]
    once = [number for number, values in took.items() if values[0] < took[best][0]]
    told = {"than_auto": auto_s / best_s, "than_exact": exact_s / best_s}
    kept = told["than_auto"] >= SOONER_THAN_AUTO and told["than_exact"] >= SOONER_THAN_EXACT
    by = {"best": best_s, "auto": auto_s, "exact": exact_s}
    return {
        "seconds": by,
        "sooner_than_the_best": sooner,
        "sooner_once": once,
        **told,
        "kept": kept and not sooner,
    }


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", default="S3", choices=sorted(SCENARIOS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="jobs, logs and results of each run stay there")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    before = load()
    with tempfile.TemporaryDirectory(prefix="ts", dir="/tmp", ignore_cleanup_errors=True) as folder:
        place = (asked.keep or Path(folder)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        with Testbed(SCENARIOS[asked.scenario].spec) as bed:
            ray = Cluster(bed, directory=Path(folder) / "ray", environment=dict(os.environ))
            with ray:
                ray.join(*bed.nodes)
                bed.limit()
                told = measure(Runs(bed, ray, place, quick=asked.quick))
    told = {
        "format": 1,
        "scenario": asked.scenario,
        "quick": asked.quick,
        "machine": describe(os.sched_getaffinity(0)),
        "load_before": before,
        **told,
    }
    text = json.dumps(told, indent=1) + "\n"
    if asked.json:
        asked.json.write_text(text)
    print(json.dumps(told.get("summary", told), indent=1))


if __name__ == "__main__":
    main()
