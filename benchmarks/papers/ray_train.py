"""Ray Train on the same images: DDP over gloo, equal shares, each image fetched when it is needed.

As its documentation has it: `prepare_model`, and a data set of torch behind `prepare_data_loader`.
Batches are made ahead by a process beside each worker. Each worker notes its steps, and every few
ones how well the held-out images are told apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import train as ray_train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn

from benchmarks.papers.serving import Remote
from benchmarks.papers.task import Fetched


class Shifted:
    """Batches as the task makes them, with its augmentation."""

    def __init__(self, task: Fetched) -> None:
        self._task = task

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Samples in, tensors out."""
        return self._task.batch(samples, np.random.default_rng())


def train_worker(told: dict[str, Any]) -> None:
    """What each worker runs, until the limit of steps; `told` is what the driver was."""
    torch.set_num_threads(1)
    context = ray_train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    task = Fetched(url=told["url"], held_out=told["held_out"], **told["shape"])
    plain = task.model()
    model = prepare_model(plain)
    optimizer = task.optimizer(plain)
    schedule = task.scheduler(optimizer, told["steps"])
    loader = prepare_data_loader(
        torch.utils.data.DataLoader(
            Remote(told["url"]),
            told["batch"] // world,
            shuffle=True,
            drop_last=True,
            collate_fn=Shifted(task),
            num_workers=1,
            prefetch_factor=2,
            persistent_workers=True,
        )
    )
    held_out = task.data(None).held_out
    own = task.batch([held_out[i] for i in range(rank, len(held_out), world)], None)
    step = 0
    with Path(f"{told['log']}-{rank}.jsonl").open("a") as log:
        for epoch in range(1_000_000):
            loader.sampler.set_epoch(epoch)
            asked_s = time.monotonic()
            for batch in loader:
                waited_s = time.monotonic() - asked_s
                optimizer.zero_grad()
                task.loss(model, batch).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), told["clip_norm"])
                optimizer.step()
                schedule.step()
                step += 1
                line = {"step": step, "waited_s": waited_s, "bytes": resident_bytes()}
                if step % told["look"] == 0:
                    line |= measured(task, plain, own)
                log.write(json.dumps(line) + "\n")
                log.flush()
                if step == told["steps"]:
                    return
                asked_s = time.monotonic()


def measured(task: Fetched, model: nn.Module, own: dict[str, torch.Tensor]) -> dict[str, float]:
    """Accuracy and loss on all held-out images, of which each worker has measured its own."""
    model.eval()
    with torch.no_grad():
        parts = task.metrics(model, own, len(own["label"]))
    model.train()
    right, loss = parts["accuracy"], parts["loss"]
    sums = torch.tensor([right.right, loss.total, loss.weight], dtype=torch.float64)
    torch.distributed.all_reduce(sums)
    return {"accuracy": float(sums[0] / sums[2]), "loss": float(sums[1] / sums[2])}


def resident_bytes() -> int:
    """What this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Join the cluster as its driver and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--told", type=json.loads, required=True)
    asked = parser.parse_args()
    ray.init(address=asked.address, log_to_driver=True, logging_level=logging.WARNING)
    TorchTrainer(
        train_worker,
        train_loop_config=asked.told,
        scaling_config=ScalingConfig(num_workers=asked.workers, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name="papers", storage_path=asked.storage),
    ).fit()


if __name__ == "__main__":
    main()
