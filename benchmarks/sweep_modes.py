"""What a sweep finds, and what it costs beside training: the other modes of `benchmarks.sweep`.

    python -m benchmarks.sweep asha        # early stops against none: same space, same points
    python -m benchmarks.sweep pareto      # the same of several objectives: what is left of a front
    python -m benchmarks.sweep occupancy   # long trials: wall seconds against those of training
    python -m benchmarks.sweep noise --data FILES...  # the noise scale against many gradients

Each writes `benchmarks/results/sweep/MODE.json`, but with `--quick`, which is to see that it works.
`--data` are Parquet files of images with labels, as CIFAR-10's (`image`: encoded, `label`); without
them images are made up, and the file says so.
"""

from __future__ import annotations

import io
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import ray
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import raycloud
from benchmarks.machine import ROOT, describe, load
from raycloud import Splits, Task
from raycloud.spec.sweep import Sweep

if TYPE_CHECKING:
    from raycloud.tuning.results import Trial

RESULTS = Path(__file__).parent / "results" / "sweep"
GPT = ROOT / "jobs" / "gpt.yaml"
AT_ONCE = 2
LESS_COMPUTE = 2.0  # floors: early stops take so many times less
OF_THE_FRONT = 0.98  # and leave so much of the hypervolume
OVERHEAD = 1.15  # wall over training by how many at once
OFF = 0.2  # of the noise scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """How a mode is to be measured.

    Attributes:
        quick: Small: to see that it works.
        seeds: Of sweeps.
        data: Files of images; none: they are made up.
    """

    quick: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)
    data: tuple[Path, ...] = ()


Row = dict[str, Any]


def measured(mode: str, asked: Asked) -> dict[str, Any]:
    """One mode, with what it was measured on; `kept` says whether its floor is."""
    before = load()
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp", ignore_cleanup_errors=True) as place:
        os.environ["RAY_TMPDIR"] = place  # Ray's sockets need short names
        ray.init(
            log_to_driver=False, logging_level="ERROR", include_dashboard=False, num_cpus=AT_ONCE
        )
        try:
            told = MODES[mode](asked, Path(place))
        finally:
            ray.shutdown()
    return {
        "format": 1,
        "mode": mode,
        "quick": asked.quick,
        "machine": describe(os.sched_getaffinity(0)),
        "load_before": before,
        **told,
    }


def gpt(asked: Asked, *more: str) -> raycloud.Job:
    """The job of the examples, small; without `quick` it takes half a minute alone."""
    shape = {"width": 48, "depth": 2, "length": 64}
    sets = [f"settings.{name}={value}" for name, value in shape.items()]
    steps, every = (40, 10) if asked.quick else (320, 20)
    sets += [f"steps={steps}", "global_batch=16", "elastic.min_workers=1", "elastic.max_workers=1"]
    sets += [f"evaluate.every_steps={every}", "evaluate.max_samples=128", *more]
    return raycloud.load_job(GPT, sets)


def swept(job: raycloud.Job, sweep: Sweep, place: Path) -> tuple[list[Trial], Row]:
    """Its trials, and what they cost."""
    began_s = time.monotonic()
    found = raycloud.sweep(job, sweep, directory=place)
    ends = [trial.last for trial in found.trials if trial.last is not None]
    return [*found.trials], {
        "seed": sweep.seed,
        "scheduler": sweep.scheduler,
        "trials": len(found.trials),
        "stopped": sum(trial.status == "stopped" for trial in found.trials),
        "samples": sum(end.samples for end in ends),
        "seconds": sum(end.seconds for end in ends),
        "wall_s": time.monotonic() - began_s,
    }


def both(
    job: raycloud.Job, asked: Asked, place: Path, **fields: Any
) -> Iterator[tuple[list[Trial], Row]]:
    """Sweeps with and without early stops, of the same points; the first turn goes round."""
    fields |= {"trials": 6 if asked.quick else 16, "parallel": fields.get("parallel", AT_ONCE)}
    fields.setdefault("grace_steps", 20)
    fields |= {"grace_steps": 10} if asked.quick else {}
    for turn, seed in enumerate(asked.seeds[:1] if asked.quick else asked.seeds):
        for scheduler in ("none", "asha")[:: 1 if turn % 2 else -1]:
            told = {**fields, "scheduler": scheduler, "seed": seed}
            yield swept(job, Sweep(**told), place / f"{scheduler}-{seed}")


def saved(rows: Sequence[Row]) -> float:
    """How many times less samples early stops take; the median over seeds."""
    by = {(row["seed"], row["scheduler"]): row["samples"] for row in rows}
    return statistics.median(by[s, "none"] / by[s, "asha"] for s, how in by if how == "asha")


def asha(asked: Asked, place: Path) -> dict[str, Any]:
    """The best loss with early stops and without, and what else chance makes of the best."""
    job = gpt(asked)
    space = {
        "settings.lr": {"log": [3e-4, 6e-2]},
        "settings.warm_up": {"choice": [5, 20, 80]},
        "clip_norm": {"choice": [0.3, 1.0, 3.0]},
    }
    rows, points = [], {}
    # As long as the longest warm-up: before, a trial that warms up slowly looks worse than it is.
    for trials, row in both(job, asked, place, space=space, grace_steps=80):
        whole = [t for t in trials if t.status == "finished" and t.last is not None]
        best = min(whole, key=lambda t: t.last.measure if t.last else math.inf)
        points[row["seed"], row["scheduler"]] = best.point
        row |= {"best": best.last.measure if best.last else None, "point": dict(best.point)}
        rows.append(row)
    again = {path: {"choice": [value]} for path, value in points[asked.seeds[0], "none"].items()}
    more = {"seed": {"choice": [11, 12] if asked.quick else [11, 12, 13, 14, 15]}}
    told: Any = {"space": {**more, **again}, "searcher": "grid", "parallel": AT_ONCE}
    trials, _ = swept(job, Sweep(**told), place / "again")
    losses = [trial.last.measure for trial in trials if trial.last is not None]
    chance = statistics.stdev(losses)
    by = {(row["seed"], row["scheduler"]): row["best"] for row in rows}
    worse = [by[seed, "asha"] - by[seed, "none"] for seed, how in by if how == "asha"]
    ratio = saved(rows)
    summary = {
        "compute_ratio": ratio,
        "best_worse_by": worse,
        "best_of_other_seeds": losses,
        "standard_deviation": chance,
        "same_point": sum(points[s, "asha"] == points[s, "none"] for s, how in by if how == "asha"),
    }
    kept = ratio >= LESS_COMPUTE and statistics.median(worse) <= 2 * chance
    return {"rows": rows, "summary": summary, "kept": kept}


def pareto(asked: Asked, place: Path) -> dict[str, Any]:
    """The front of loss and bytes with early stops and without, by its hypervolume."""
    job = gpt(asked, "elastic.min_workers=2", "elastic.max_workers=2", "elastic.shares=equal")
    space = {
        "settings.lr": {"log": [1e-3, 3e-2]},
        "sync.codec": {"choice": ["none", "int8", "int4"]},
        "sync.period": {"choice": [1, 4, 8], "when": {"sync.codec": "int4"}},
    }
    fields: dict[str, Any] = {"space": space, "minimize": ["measure", "bytes"], "parallel": 1}
    rows: list[Row] = []
    for trials, row in both(job, asked, place, **fields):
        ends = [t.last for t in trials if t.status == "finished" and t.last is not None]
        row["ends"] = [[end.measure, math.log10(max(end.bytes, 1))] for end in ends]
        rows.append(row)
    parts = []
    for seed in {row["seed"] for row in rows}:
        ends = {row["scheduler"]: row["ends"] for row in rows if row["seed"] == seed}
        worst = [max(end[at] for some in ends.values() for end in some) + 0.1 for at in (0, 1)]
        volume = {how: hypervolume(some, worst) for how, some in ends.items()}
        parts.append(volume["asha"] / volume["none"])
    summary = {"hypervolume_ratio": parts, "compute_ratio": saved(rows)}
    kept = statistics.median(parts) >= OF_THE_FRONT and saved(rows) >= LESS_COMPUTE
    return {"rows": rows, "summary": summary, "kept": kept}


def hypervolume(points: Sequence[Sequence[float]], worst: Sequence[float]) -> float:
    """The area between a front of two objectives, less is better, and a place worse than all.

    >>> hypervolume([(1.0, 2.0), (2.0, 1.0), (2.5, 2.5)], (3.0, 3.0))
    3.0
    """
    area, height = 0.0, worst[1]
    for x, y in sorted(map(tuple, points)):
        if y < height:
            area += (worst[0] - x) * (height - y)
            height = y
    return area


def occupancy(asked: Asked, place: Path) -> dict[str, Any]:
    """Wall seconds of trials that are long enough, against what they train."""
    trials, least_s = (4, 3.0) if asked.quick else (16, 22.0)
    space: dict[str, Any] = {"seed": {"range": [0, 10**6]}}
    [first], _ = swept(gpt(asked), Sweep(space=space, trials=1), place / "first")  # type: ignore[arg-type]
    one, *_, last = first.measured
    step_s = (last.seconds - one.seconds) / (last.step - one.step)
    job = gpt(asked, f"steps={max(20, math.ceil(least_s / step_s))}")
    began_s: list[float] = []
    sweep: Any = {"space": space, "trials": trials, "parallel": AT_ONCE, "seed": 1}
    called_s = time.monotonic()
    found = raycloud.sweep(
        job,
        Sweep(**sweep),
        directory=place / "long",
        listener=lambda *_: began_s.append(time.monotonic()),
    )
    ended_s = time.monotonic()
    each_s = [trial.last.seconds for trial in found.trials if trial.last is not None]
    ideal_s = sum(each_s) / AT_ONCE
    summary = {
        "parallel": AT_ONCE,
        "steps": job.steps,
        "shortest_s": min(each_s),
        "training_s": sum(each_s),
        "wall_s": began_s[-1] - began_s[0],
        "called_s": ended_s - called_s,
        "ratio": (began_s[-1] - began_s[0]) / ideal_s,
        "ratio_of_the_call": (ended_s - called_s) / ideal_s,
    }
    rows = [
        {"trial": t.number, "status": t.status, "seconds": s}
        for t, s in zip(found.trials, each_s, strict=True)
    ]
    kept = summary["ratio_of_the_call"] <= OVERHEAD and len(each_s) == trials
    return {"rows": rows, "summary": summary, "kept": kept}


class Images(Task):
    """Classification of small images, from weights that are given, which do not move.

    Args:
        weights: A file of them; None: they are drawn.
        samples: How many images, of those that there are.
        files: Where they are; none: they are made up.
    """

    def __init__(
        self, *, weights: str | None = None, samples: int = 1000, files: Sequence[str] = ()
    ) -> None:
        self.weights, self.samples, self.files = weights, samples, [*files]

    def data(self, path: str | None) -> Splits:  # noqa: ARG002 - the files are settings
        """Pairs of an image, as bytes, and its label."""
        return Splits(train=[*images(self.samples, self.files)])

    def model(self) -> nn.Module:
        """Three convolutions; without statistics of batches, which would tie samples together."""
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after)]
            layers += [nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        if self.weights:
            net.load_state_dict(load_file(self.weights))
        return net

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:  # noqa: ARG002 - it does not draw
        """Images from -1 to 1, and labels."""
        pixels = torch.from_numpy(np.stack([image for image, _ in samples]))
        return pixels.float() / 127.5 - 1.0, torch.tensor([label for _, label in samples])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """It moves nothing."""
        return torch.optim.SGD(model.parameters(), lr=0.0)


def images(count: int, files: Sequence[str]) -> Iterator[tuple[np.ndarray, int]]:
    """Images of 3 x 32 x 32 bytes, and their labels."""
    if not files:
        rng = np.random.default_rng(0)
        kinds = rng.integers(60, 200, size=(10, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
        for label in rng.integers(0, 10, size=count).tolist():
            noisy = kinds[label] + rng.normal(0, 60, size=(3, 32, 32))
            yield noisy.clip(0, 255).astype(np.uint8), label
        return
    left = count
    for file in files:
        for row in pq.read_table(file).slice(0, left).to_pylist():
            with Image.open(io.BytesIO(row["image"])) as image:
                yield np.asarray(image.convert("RGB")).transpose(2, 0, 1).copy(), int(row["label"])
            left -= 1


def noise(asked: Asked, place: Path) -> dict[str, Any]:
    """The noise scale that a run reports, and that of many gradients of the same weights."""
    samples, steps = (1024, 64) if asked.quick else (10_000, 1600)
    files = [str(path.resolve()) for path in asked.data]
    rows = []
    for trained in (0, 30) if asked.quick else (50, 300):
        weights = place / f"{trained}.safetensors"
        task = Images(samples=samples, files=files)
        everything = task.batch([*images(samples, files)], None)
        model = trained_for(task, everything, trained)
        save_file(model.state_dict(), weights)
        variance, signal = of_many(task, model, everything, size=32)
        job = raycloud.Job(
            task=Images,
            settings={"weights": str(weights), "samples": samples, "files": files},
            steps=steps,
            global_batch=256,
            micro_batch=32,
            elastic={"min_workers": 2, "max_workers": 2, "shares": "equal"},  # type: ignore[arg-type]
        )
        run = raycloud.train(job, run_dir=place / f"noise-{trained}")
        found, wanted = run.summary["noise_scale"], variance / signal
        rows.append(
            {
                "trained_steps": trained,
                "noise_scale": found,
                "of_many_gradients": wanted,
                "off": None if found is None else found / wanted - 1.0,
                "looks": steps // 8,
            }
        )
    kept = all(row["off"] is not None and abs(row["off"]) <= OFF for row in rows)
    data = [path.name for path in asked.data] or "made up"
    return {"rows": rows, "summary": {"data": data, "samples": samples}, "kept": kept}


def trained_for(task: Images, everything: tuple[Tensor, Tensor], steps: int) -> nn.Module:
    """A model that has made so many steps."""
    torch.manual_seed(0)
    model, draws = task.model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        some = torch.randint(len(everything[1]), (128,), generator=draws)
        optimizer.zero_grad()
        task.loss(model, tuple(part[some] for part in everything)).backward()
        optimizer.step()
    return model


def of_many(
    task: Images, model: nn.Module, everything: tuple[Tensor, Tensor], *, size: int
) -> tuple[float, float]:
    """Tr C, of single samples' gradients, and |G|^2, from the mean gradients of parts of so many.

    Of M parts, tr C = size * sum |g_m - g|^2 / (M - 1), and |G|^2 = |g|^2 - tr C / (M * size).
    """
    found = []
    for at in range(0, len(everything[1]) // size * size, size):
        model.zero_grad()
        task.loss(model, tuple(part[at : at + size] for part in everything)).backward()
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(grads).double())
    each = torch.stack(found)
    mean = each.mean(dim=0)
    variance = size * float((each - mean).square().sum()) / (len(each) - 1)
    return variance, float(mean.square().sum()) - variance / (len(each) * size)


MODES = {"asha": asha, "pareto": pareto, "occupancy": occupancy, "noise": noise}
