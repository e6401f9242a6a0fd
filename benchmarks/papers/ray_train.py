"""Ray Train on the same images: DDP over gloo, equal shares, each image fetched when it is needed.

As its documentation has it: `prepare_model`, and a data set of torch behind `prepare_data_loader`.
The first worker notes each step, and every few ones how well the held-out images are told apart.
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
    """What each worker runs, until the limit of steps."""
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
        )
    )
    held_out = task.data(None).held_out
    whole = task.batch([held_out[i] for i in range(len(held_out))], None)
    step = 0
    with Path(told["log"]).open("a") as log:
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
                if rank == 0:
                    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
                    line = {"step": step, "at_s": time.time(), "waited_s": waited_s, "bytes": most}
                    if step % told["look"] == 0:
                        plain.eval()
                        with torch.no_grad():
                            found = task.metrics(plain, whole, len(held_out))
                        plain.train()
                        line |= {name: one.value() for name, one in found.items()}
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                if step == told["steps"]:
                    return
                asked_s = time.monotonic()


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
