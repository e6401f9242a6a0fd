"""Quality of the jobs in `jobs/` on real data: by raycloud with two workers, and in plain PyTorch.

    python -m benchmarks.jobs --data DIRECTORY [--json FILE] [--only NAME ...] [--gpu]

DIRECTORY holds CIFAR-10 (`images/cifar10-*.parquet`), sessions of a shop
(`clicks/online_shoppers_intention.csv`) and English texts (`text/tinyshakespeare.txt` and
`text/wikitext-2-valid.txt`). Models are small and steps are few, so that two cores do it in
minutes: far from what these networks come to, and enough to tell a loop that trains worse. `--gpu`
takes larger ones, with one worker on one GPU, and in bf16 on both sides.

Both take as many samples with the same model, optimizer, schedule and clipping, from three seeds.
The plain loop shuffles by itself, so that its batches are others; it computes each as one pass,
where raycloud has micro-batches: BatchNorm sees more at once, but for the ResNets of a GPU, whose
micro-batch is the batch. What is read from a file of results is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean, variance
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.feeding.contestants import attempt
from benchmarks.feeding.training import train
from benchmarks.machine import ROOT, describe
from benchmarks.statistics import student_quantile
from raycloud.clock import SystemClock
from raycloud.data.cache import BlockCache
from raycloud.metrics import Metric, merge_all
from raycloud.on_ray.tasks import resolve
from raycloud.spec import load_job
from raycloud.step.device import choose, move
from tests.one_process import prepare_here

SEEDS = (0, 1, 2)
WORKERS = 2
CORES = 8  # of the worker that has a GPU: for its data
PASSAGE = 32  # characters
MEASURED_AT_ONCE = 250
VEHICLES = (0, 1, 8, 9)  # classes of CIFAR-10

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job on real data.

    Attributes:
        job: The name of its file.
        model: What is trained, for people.
        data: On what.
        path: Writes the data below the second path, from those of the first; or finds it.
        metric: What is compared.
        settings: Fields of the job that are others here.
        gpu: It is for a GPU.
    """

    job: str
    model: str
    data: str
    path: Callable[[Path, Path], Path]
    metric: str
    settings: Mapping[str, Any]
    gpu: bool = False


def passages(source: Path) -> dict[str, list[tuple[str, int]]]:
    """Passages with the number of their text, shuffled; the last tenth of each text is held out."""
    names = ("tinyshakespeare.txt", "wikitext-2-valid.txt")
    texts = [*((source / "text" / name).read_text("utf-8") for name in names)]
    texts.append("\n".join(topics.values()))  # Python's reference manual
    found: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for number, text in enumerate(texts):
        flat = " ".join(text.split())
        cut = [flat[at : at + PASSAGE] for at in range(0, len(flat) - PASSAGE, PASSAGE)]
        apart = len(cut) * 9 // 10
        found["train"] += [(one, number) for one in cut[:apart]]
        found["test"] += [(one, number) for one in cut[apart:]]
    for split in found.values():
        np.random.default_rng(0).shuffle(split)
    return found


def _written(folder: Path, split: str, table: pa.Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / f"{split}.parquet")


def images(source: Path, folder: Path, files: int = 2, held_out: int = 2_000) -> Path:
    """Images of CIFAR-10: 10,000 of each file to train on, and some held out."""
    names = tuple(f"train-{number}" for number in range(files))
    asked = {"train": (names, 10_000 * files), "test": (("test-0",), held_out)}
    for split, (some, rows) in asked.items():
        tables = [pq.read_table(source / "images" / f"cifar10-{name}.parquet") for name in some]
        _written(folder, split, pa.concat_tables(tables).slice(0, rows))
    return folder


def texts(source: Path, folder: Path) -> Path:
    """20,000 passages to train on, and 2,000 held out, of columns `text` and `label`."""
    for split, found in passages(source).items():
        some = found[: 20_000 if split == "train" else 2_000]
        told, numbers = zip(*some, strict=True)
        _written(folder, split, pa.table({"text": told, "label": numbers}))
    return folder


def pairs(source: Path, folder: Path) -> Path:
    """Images of CIFAR-10, each beside a passage. The pairing is ours; the label is of both."""
    found = passages(source)
    for split, rows in (("train", 9_000), ("test", 1_500)):
        table = pq.read_table(source / "images" / f"cifar10-{split}-0.parquet").slice(0, rows)
        told, numbers = zip(*found[split][:rows], strict=True)
        drives = np.isin(table["label"].to_numpy(), VEHICLES)
        label = 3 * drives.astype(np.int64) + np.array(numbers)
        _written(folder, split, pa.table({"image": table["image"], "text": told, "label": label}))
    return folder


def gpt_case(width: int, steps: int, *, depth: int = 2, gpu: bool = False) -> Case:
    """`jobs/gpt.yaml` at a width and depth."""
    layers = f" and depth {depth}" if gpu else ""
    settings = {"steps": steps, "settings.width": width, "settings.depth": depth}
    return Case(
        job="gpt", model=f"GPT of width {width}{layers}", metric="loss",
        data="Shakespeare, 1.1 MB; nats per byte",
        path=lambda source, _: source / "text/tinyshakespeare.txt",
        settings={**settings, "evaluate.max_samples": "null"}, gpu=gpu,
    )  # fmt: skip


def resnet_case(depth: int, steps: int) -> Case:
    """`jobs/resnet.yaml` with the networks of the paper, for a GPU."""
    sizes = {"settings.depth": depth, "settings.width": 64}
    batches = {"global_batch": 128, "micro_batch": 128}
    return Case(
        job="resnet", model=f"ResNet-{depth} of width 64", metric="accuracy",
        data="CIFAR-10, 50,000 images", path=partial(images, files=5, held_out=10_000),
        settings={"epochs": "null", "steps": steps, **batches, **sizes}, gpu=True,
    )  # fmt: skip


CASES = {
    "resnet": Case(
        job="resnet", model="ResNet-18 of width 8", metric="accuracy",
        data="CIFAR-10, 20,000 images", path=images,
        settings={"epochs": "null", "steps": 300, "micro_batch": 32, "settings.width": 8},
    ),
    "bert": Case(
        job="bert", model="BERT of width 64, 2 layers", metric="accuracy",
        data="passages of 32 characters: Shakespeare, WikiText or Python's manual", path=texts,
        settings={"epochs": "null", "steps": 400, "settings.classes": 3, "settings.length": 40},
    ),
    "multimodal": Case(
        job="multimodal", model="ResNet-18 of width 8 and BERT of width 64", metric="accuracy",
        data="CIFAR-10 beside such passages: vehicle or animal, and which text", path=pairs,
        settings={"epochs": "null", "steps": 400, "settings.classes": 6, "settings.length": 40,
                  "settings.size": 16},
    ),
    "clicks": Case(
        job="clicks", model="perceptron with embeddings", metric="auc",
        data="purchases: 12,330 sessions of a shop",
        path=lambda source, _: source / "clicks/online_shoppers_intention.csv",
        settings={"epochs": "null", "steps": 900},
    ),
    "gpt-96": gpt_case(96, 300),
    "gpt-192": gpt_case(192, 200),
    "gpt-384": gpt_case(384, 400, depth=6, gpu=True),
    "gpt-768": gpt_case(768, 300, depth=12, gpu=True),
    "resnet-50": resnet_case(50, 780),
    "resnet-18": resnet_case(18, 1560),
}  # fmt: skip


def by_raycloud(case: Case, overrides: Sequence[str]) -> Record:
    """The summary of a run."""
    with attempt() as place:
        count = 1 if case.gpu else WORKERS
        workers = [f"elastic.{end}_workers={count}" for end in ("min", "max")]
        workers += ["resources.worker.gpus=1", f"resources.worker.cpus={CORES}"] * case.gpu
        return train(place, f"{case.job}.yaml", [*overrides, *workers]).summary


def in_pytorch(case: Case, overrides: Sequence[str], cache: Path) -> tuple[float, int]:
    """The same of a plain loop, which has only the task and its prepared rows of raycloud."""
    job = load_job(ROOT / "jobs" / f"{case.job}.yaml", overrides=overrides)
    task = resolve(job)(**job.settings)
    provided = prepare_here(job, task, task.data(job.data.path), BlockCache(cache), SystemClock())
    samples, held_out, steps = provided.train, provided.held_out, job.steps
    torch.manual_seed(job.seed)
    rng = np.random.default_rng(job.seed)
    device = choose(int(case.gpu))
    cast = partial(torch.autocast, device.type, torch.bfloat16, job.precision == "bf16")
    model = task.model().to(device)
    optimizer = task.optimizer(model)
    schedule = task.scheduler(optimizer, steps)
    order, taken = np.zeros(0, np.int64), 0
    for _ in range(steps):
        if not len(order):
            order = rng.permutation(len(samples))
        ids, order = order[: job.global_batch], order[job.global_batch :]
        batch = move(task.batch(samples.gather(ids), rng), device)
        with cast():
            loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        taken += len(ids)
    model.eval()
    parts: list[Mapping[str, Metric]] = []
    with torch.no_grad(), cast():
        for at in range(0, len(held_out), MEASURED_AT_ONCE):
            ids = np.arange(at, min(at + MEASURED_AT_ONCE, len(held_out)))
            batch = move(task.batch(held_out.gather(ids), None), device)
            parts.append(task.metrics(model, batch, len(ids)))
    return merge_all(parts)[case.metric].value(), taken


def compared(ours: Sequence[float], theirs: Sequence[float]) -> Record:
    """Means, their difference, and the half of its 95% interval (Student, equal variances)."""
    runs = len(ours)
    noise = math.sqrt((variance(ours) + variance(theirs)) / runs)
    half = student_quantile(0.975, 2 * runs - 2) * noise
    difference = fmean(ours) - fmean(theirs)
    return {
        "raycloud_mean": fmean(ours),
        "pytorch_mean": fmean(theirs),
        "difference": difference,
        "interval95_half": half,
        "within_noise": abs(difference) <= half,
    }


def measure(case: Case, source: Path, folder: Path) -> Record:
    """All seeds of a case, the two in turns."""
    path = case.path(source, folder / "data")
    ours, theirs, seconds, used = [], [], [], []
    for seed in SEEDS:
        fields = {"data.path": path, "data.cache.path": folder / "cache", "seed": seed}
        fields |= {"precision": "bf16"} if case.gpu else {}
        overrides = [f"{name}={value}" for name, value in {**case.settings, **fields}.items()]
        began_s = time.monotonic()
        summary = by_raycloud(case, overrides)
        value, samples = summary["eval"][case.metric], summary["samples"]
        used.append(summary["usage"][0])
        middle_s = time.monotonic()
        other, taken = in_pytorch(case, overrides, folder / "cache")
        if samples != taken:
            raise RuntimeError(f"{case.job}: {samples} samples by raycloud, {taken} without")
        ours.append(value)
        theirs.append(other)
        seconds.append([middle_s - began_s, time.monotonic() - middle_s])
        print(f"{case.job} {case.model}, seed {seed}: {value:.4f} and {other:.4f}", flush=True)
    return {
        "job": case.job, "model": case.model, "data": case.data, "settings": dict(case.settings),
        "metric": case.metric, "samples": samples, "seeds": list(SEEDS), "raycloud": ours,
        "pytorch": theirs, "usage": used, "seconds": np.round(seconds, 1).tolist(),
        **compared(ours, theirs),
    }  # fmt: skip


def table(found: Mapping[str, Record]) -> list[str]:
    """The lines of a page's table."""
    lines = [
        "| job | model | data | samples | measure | raycloud | plain PyTorch | difference, 95% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found.values():
        means = [
            f"{one[f'{who}_mean']:.3f} ({min(one[who]):.3f} to {max(one[who]):.3f})"
            for who in ("raycloud", "pytorch")
        ]
        differs = f"{one['difference']:+.3f} ± {one['interval95_half']:.3f}"
        what = [one["job"], one["model"], one["data"], f"{one['samples']:,}", one["metric"]]
        lines.append(f"| {' | '.join([*what, *means, differs])} |")
    return lines


def main() -> None:
    """Measure what is not in the file yet, keep it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--gpu", action="store_true", help="the cases for a GPU, and no others")
    asked = parser.parse_args()
    names = asked.only or [name for name, case in CASES.items() if case.gpu == asked.gpu]
    if not asked.data.is_dir():
        parser.error(f"--data {asked.data}: there is no such directory")
    if any(CASES[name].gpu for name in names) and not torch.cuda.is_available():
        parser.error("--gpu: torch sees no GPU here; run it where one is, or leave the option out")
    found: dict[str, Record] = {}
    if asked.json and asked.json.exists():
        found = json.loads(asked.json.read_text())["cases"]
    torch.set_num_threads(WORKERS)
    for name in names:
        if name in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(CASES[name], asked.data.resolve(), Path(folder))
        found = {known: found[known] for known in CASES if known in found}
        if asked.json:
            machine = describe(os.sched_getaffinity(0))
            if torch.cuda.is_available():
                machine |= {"gpu": torch.cuda.get_device_name()}
            told = {"machine": machine, "cases": found}
            asked.json.write_text(json.dumps(told, indent=1) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
