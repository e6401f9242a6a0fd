"""The jobs of this repository without raycloud around them: their tasks, and a plain loop."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from raycloud import Task, load_job
from raycloud.on_ray.tasks import resolve

JOBS = Path(__file__).parents[1] / "jobs"


def task_of(name: str) -> Task:
    """The task of `jobs/<name>.yaml`, made from the job's settings."""
    job = load_job(JOBS / f"{name}.yaml")
    return resolve(job)(**job.settings)


def module_of(task: Task) -> ModuleType:
    return sys.modules[type(task).__module__]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def updates(task: Task, batch: Any, steps: int) -> list[float]:
    """Losses of a plain loop on one batch."""
    torch.default_generator.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    schedule = task.scheduler(optimizer, steps)
    losses = []
    for _ in range(steps):
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def measured(task: Task, batch: Any, samples: int) -> dict[str, float]:
    """What a fresh model's metrics come to."""
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        metrics = task.metrics(task.model().eval(), batch, samples)
    return {name: metric.value() for name, metric in metrics.items()}


def weights_file(folder: Path, *, old: bool = False, **shape: int) -> Path:
    """Random weights of a small BERT in a file as `transformers` writes it; or as it once did."""
    bert = module_of(task_of("bert"))
    sizes = {"words": 300, "length": 64, "width": 32, "inner": 64, "depth": 2, "heads": 2}
    torch.default_generator.manual_seed(1)
    model = bert.Bert(**(sizes | shape), dropout=0.1, outputs=7)
    tensors = {}
    for name, value in model.state_dict().items():
        stem, _, kind = bert.name_in_file(name).rpartition(".")
        if old and "LayerNorm" in stem:
            kind = {"weight": "gamma", "bias": "beta"}[kind]
        prefix = "" if stem == "classifier" else "bert."
        tensors[f"{prefix}{stem}.{kind}"] = value
    file = folder / "model.safetensors"
    save_file(tensors, file)
    return file
