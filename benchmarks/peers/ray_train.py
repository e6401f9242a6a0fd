"""The driver of Ray Train V2's TorchTrainer on an embedded Ray, two CPU workers."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import ray
from ray import train as ray_train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from benchmarks.peers.loop import DDP_SETTINGS, train
from benchmarks.workload import WORKERS


def train_worker(settings: dict[str, Any]) -> None:
    """What each worker runs; metrics are reported once, so that reporting costs no step."""
    loss = train(
        lambda model: prepare_model(model, parallel_strategy_kwargs=DDP_SETTINGS),
        rank=ray_train.get_context().get_world_rank(),
        steps=settings["steps"],
        marks=Path(settings["marks"]),
    )
    ray_train.report({"loss": loss})


def main() -> None:
    """Start Ray, train, end Ray."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--storage", type=Path, required=True)
    asked = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"steps": asked.steps, "marks": str(asked.marks)},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=False),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name="throughput", storage_path=str(asked.storage)),
    )
    print(trainer.fit().metrics)
    ray.shutdown()


if __name__ == "__main__":
    main()
