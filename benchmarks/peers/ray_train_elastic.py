"""The driver of Ray Train V2's TorchTrainer on the testbed's cluster, of fixed size or elastic."""

from __future__ import annotations

import argparse
import logging
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import train as ray_train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from benchmarks.peers import checkpoints
from benchmarks.peers.checkpoints import Progress
from benchmarks.peers.course import CHECKPOINT_EVERY, Course, add_course, parse
from benchmarks.peers.dense import DDP_SETTINGS, Dense, impatient_group, train

if TYPE_CHECKING:
    import torch
    from torch import nn

# How often the controller looks whether the group could be larger. The default of 60 s is meant
# for clusters whose nodes come by the hour.
RESIZE_S = 10.0
_FILE = "state.safetensors"


def train_worker(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    course = Course(**settings)
    context = ray_train.get_context()
    elastic = course.checkpoints is not None
    train(
        Dense(
            course=course,
            rank=context.get_world_rank(),
            world=context.get_world_size(),
            wrap=partial(_wrap, elastic=elastic),
            after=partial(_report, elastic=elastic),
            restore=_restore,
        )
    )


def _wrap(model: nn.Module, *, elastic: bool) -> nn.Module:
    group = {"process_group": impatient_group()} if elastic else {}
    wrapped: nn.Module = prepare_model(model, parallel_strategy_kwargs={**DDP_SETTINGS, **group})
    return wrapped


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    found = ray_train.get_checkpoint()
    if found is None:
        return Progress()
    with found.as_directory() as directory:
        return checkpoints.read(Path(directory) / _FILE, model, {"optimizer": optimizer})


def _report(
    model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, *, elastic: bool
) -> None:
    """Every worker reports at the same updates; the first one with a checkpoint."""
    if not elastic or progress.update % CHECKPOINT_EVERY:
        return
    metrics = asdict(progress)
    if ray_train.get_context().get_world_rank():
        ray_train.report(metrics)
        return
    with tempfile.TemporaryDirectory(prefix="checkpoint") as place:
        checkpoints.write(Path(place) / _FILE, model, {"optimizer": optimizer}, progress)
        ray_train.report(metrics, checkpoint=Checkpoint.from_directory(place))


def main() -> None:
    """Join the cluster as its driver and train until ended."""
    parser = options_of_a_driver(__doc__)
    parser.add_argument("--most", type=int, help="elastic: from 1 worker to this many")
    asked = parser.parse_args()
    course = parse(asked)
    ray.init(address=asked.address, log_to_driver=True, logging_level=logging.WARNING)
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=asdict(course),
        scaling_config=scaling(workers=asked.workers, most=asked.most),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(
            name="race",
            storage_path=str(asked.storage),
            failure_config=FailureConfig(max_failures=0 if course.checkpoints is None else -1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def options_of_a_driver(description: str | None) -> argparse.ArgumentParser:
    """What each driver of Ray Train is told."""
    parser = argparse.ArgumentParser(description=description)
    add_course(parser)
    parser.add_argument("--address", required=True)
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    return parser


def scaling(*, workers: int, most: int | None) -> ScalingConfig:
    """How many workers: fixed, or from one to `most`."""
    if most is None:
        return ScalingConfig(num_workers=workers, use_gpu=False)
    return ScalingConfig(
        num_workers=(1, most), use_gpu=False, elastic_resize_monitor_interval_s=RESIZE_S
    )


if __name__ == "__main__":
    main()
