"""Trials that are over at once: what a sweep costs beside what it trains.

    python -m benchmarks.sweep --json FILE
    python -m benchmarks.sweep MODE [--quick]   # what else is measured: see `sweep_modes`

The same ten updates of a line through points, so many times, one after the other, by: raycloud's
sweep; Ray Train's TorchTrainer inside a trial of Ray Tune's; a plain function in Ray Tune, which
does nothing but train (the bound); and `raycloud.train` in a loop. Each in a process tree of its
own on the same CPUs; they take turns within a repeat, and the first turn goes round.

`each_s` is the seconds from the end of the first trial to that of the last, for each of the others;
what the updates themselves take is the same for all, and next to nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import train, tune
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from torch import Tensor, nn

import raycloud
from benchmarks import sweep_modes
from benchmarks.machine import ROOT, describe
from benchmarks.sweep_modes import MODES, Asked
from benchmarks.throughput import turns
from raycloud import Splits, Task

FORMAT = 1
STEPS, BATCH = 10, 16
PEER = "torch-trainer"
AT_MOST_S, AT_LEAST = 1.0, 6.0  # a trial; and its overhead over that of the peer, beside the bound
_LOOK_S = 0.25
_LIMIT_S = 900.0


class Line(Task):
    """A line through noisy points."""

    def data(self, path: str | None) -> Splits:  # noqa: ARG002 - there is none
        """The points, and some more."""
        x = np.random.default_rng(0).normal(size=(320, 4)).astype(np.float32)
        points = [(row, np.float32(row.sum())) for row in x]
        return Splits(train=points[:256], held_out=points[256:])

    def model(self) -> nn.Module:
        """The line."""
        return nn.Linear(4, 1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Squared error."""
        x, y = batch
        return nn.functional.mse_loss(model(x).squeeze(1), y)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Plain."""
        return torch.optim.SGD(model.parameters(), lr=0.1)


def updates(report: Callable[[float], None]) -> None:
    """The same, without raycloud."""
    torch.manual_seed(0)
    task = Line()
    model, data = task.model(), task.data(None).train
    optimizer, loss = task.optimizer(model), torch.zeros(())
    for step in range(STEPS):
        some = [data[i] for i in range(step * BATCH, (step + 1) * BATCH)]
        batch = (
            torch.stack([torch.from_numpy(x) for x, _ in some]),
            torch.tensor([y for _, y in some]),
        )
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
    report(float(loss))


def job(seed: int = 0) -> raycloud.Job:
    """As the sweep and the loop train it."""
    elastic = {"max_workers": 1}
    return raycloud.Job(task=Line, steps=STEPS, global_batch=BATCH, seed=seed, elastic=elastic)


def by_sweep(trials: int, place: Path, note: Callable[[], None]) -> None:
    """The sweep of raycloud."""

    def over(_: object, trial: Any) -> None:
        if trial.status == "finished":
            note()

    space = {"seed": {"range": [0, 10**6]}}
    raycloud.sweep(
        job(), space=space, trials=trials, parallel=1, directory=place / "swept", listener=over
    )


def by_loop(trials: int, place: Path, note: Callable[[], None]) -> None:
    """One run after the other, each on a Ray that is there."""
    ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    for seed in range(trials):
        raycloud.train(job(seed), run_dir=place / str(seed))
        note()


def _tuned(
    function: Callable[[Mapping[str, Any]], None],
    trials: int,
    place: Path,
    note: Callable[[], None],
    cpus: float,
) -> None:
    class Ended(tune.Callback):
        def on_trial_complete(self, *_: Any, **__: Any) -> None:
            note()

    ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    tune.Tuner(
        tune.with_resources(function, {"cpu": cpus}),
        param_space={"seed": tune.randint(0, 10**6)},
        tune_config=tune.TuneConfig(num_samples=trials, max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=str(place), verbose=0, callbacks=[Ended()]),
    ).fit()


def by_function(trials: int, place: Path, note: Callable[[], None]) -> None:
    """A plain function in Tune."""

    def trial(_: Mapping[str, Any]) -> None:
        updates(lambda loss: tune.report({"loss": loss}))

    _tuned(trial, trials, place, note, 1.0)


def by_torch_trainer(trials: int, place: Path, note: Callable[[], None]) -> None:
    """Ray Train in a trial of Tune's, as its guide has it."""

    def loop(_: Mapping[str, Any]) -> None:
        updates(lambda loss: train.report({"loss": loss}))

    def trial(_: Mapping[str, Any]) -> None:
        TorchTrainer(
            loop,
            scaling_config=train.ScalingConfig(num_workers=1),
            run_config=train.RunConfig(
                storage_path=str(place / "train"), callbacks=[TuneReportCallback()]
            ),
        ).fit()

    _tuned(trial, trials, place, note, 0.1)


CONTESTANTS = {
    "raycloud-sweep": by_sweep,
    PEER: by_torch_trainer,
    "function": by_function,
    "raycloud-train": by_loop,
}


def one(name: str, trials: int) -> None:
    """Run a contestant in this process, and print when its trials ended."""
    began_s, ends = time.monotonic(), list[float]()
    with tempfile.TemporaryDirectory(prefix="b", ignore_cleanup_errors=True) as place:
        CONTESTANTS[name](trials, Path(place), lambda: ends.append(time.monotonic() - began_s))
    print(json.dumps(ends))


def measured(name: str, trials: int) -> dict[str, Any]:
    """One run of a contestant: seconds, and the most memory and processes at once."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as place:
        mark = f"RAY_TMPDIR={place}"
        variables = {**os.environ, "RAY_TMPDIR": place, "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
        command = [sys.executable, "-m", "benchmarks.sweep", "--one", name, "--trials", str(trials)]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            most, over = [0, 0], threading.Event()
            watch = threading.Thread(target=_watch, args=(mark, most, over))
            watch.start()
            out, err = process.communicate(timeout=_LIMIT_S)
            over.set()
            watch.join()
        if process.returncode:
            raise SystemExit(f"{name} failed:\n{err[-2000:]}")
    ends = json.loads(out.splitlines()[-1])
    if len(ends) != trials:
        raise SystemExit(f"{name}: {len(ends)} of {trials} trials ended:\n{err[-2000:]}")
    each_s = (ends[-1] - ends[0]) / (trials - 1)
    return {
        "contestant": name,
        "first_s": ends[0],
        "each_s": each_s,
        "peak_bytes": most[0],
        "processes": most[1],
    }


def _watch(mark: str, most: list[int], over: threading.Event) -> None:
    """The largest sum of what processes with this mark have for themselves, and their number."""
    while not over.wait(_LOOK_S):
        size = count = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                rollup = (process / "smaps_rollup").read_text()
            except OSError:
                continue
            found = [line.split() for line in rollup.splitlines() if line.startswith("Pss:")]
            size, count = size + 1024 * int(found[0][1]), count + 1
        most[0], most[1] = max(most[0], size), max(most[1], count)


def mode(asked: argparse.Namespace) -> int:
    """Measure a mode, and say whether its floor is kept; what is quick is written only if asked."""
    how = Asked(quick=asked.quick, seeds=tuple(asked.seeds), data=tuple(asked.data))
    told = sweep_modes.measured(asked.mode, how)
    file = asked.json or (None if asked.quick else sweep_modes.RESULTS / f"{asked.mode}.json")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({"summary": told["summary"], "kept": told["kept"]}, indent=1))
    return 0 if told["kept"] else 1


def main() -> int:
    """Race them, print a table, and say whether the floors are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", nargs="?", choices=["overhead", *MODES], default="overhead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="of MODE: only to see that it works")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of MODE")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="of noise: Parquet files")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one(asked.one, asked.trials)
        return 0
    if asked.mode != "overhead":
        return mode(asked)
    rows = []
    for repeat, name in turns(tuple(CONTESTANTS), asked.repeats):
        rows.append({"repeat": repeat, **measured(name, asked.trials)})
        print(rows[-1], file=sys.stderr, flush=True)
    if asked.json:
        told = {"format": FORMAT, "machine": describe(os.sched_getaffinity(0)), "rows": rows}
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    medians = {
        name: {
            quantity: statistics.median(r[quantity] for r in rows if r["contestant"] == name)
            for quantity in ("first_s", "each_s", "peak_bytes", "processes")
        }
        for name in CONTESTANTS
    }
    print(f"{'':16} first s  each s   peak GB  processes")
    for name, m in medians.items():
        seconds = f"{m['first_s']:7.1f} {m['each_s']:7.2f}"
        print(f"{name:16} {seconds} {m['peak_bytes'] / 1e9:9.2f} {m['processes']:10.0f}")
    bound = medians["function"]["each_s"]
    ours, theirs = (medians[name]["each_s"] for name in ("raycloud-sweep", PEER))
    ratio = (theirs - bound) / max(ours - bound, 1e-9)
    print(f"a trial by {PEER} over one of ours: {theirs / ours:.0f}")
    if ours > bound:
        print(f"its overhead over a plain function's, over ours: {ratio:.1f}")
    return 0 if ours <= AT_MOST_S and (ours <= bound or ratio >= AT_LEAST) else 1


if __name__ == "__main__":
    sys.exit(main())
