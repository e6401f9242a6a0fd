"""The driver of Ray Train V2 with torchft: each worker is a replica group, replaced where it dies.

As Ray's own example of its `TorchftConfig`, with the loop of the contestant `torchft`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Any

import ray
from ray import train as ray_train
from ray.train import FailureConfig, RunConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch import torchft_config
from ray.train.v2.torch.torchft_config import TorchftConfig

from benchmarks.peers.course import Course, parse
from benchmarks.peers.ray_train_elastic import options_of_a_driver, scaling


class Lighthouse:
    """As Ray's, but with the address of its node: all nodes here have one host name."""

    def __init__(self, lighthouse_kwargs: dict[str, Any]) -> None:
        from torchft.coordination import LighthouseServer  # noqa: PLC0415 - only actors have it

        self._server = LighthouseServer(**lighthouse_kwargs)

    def address(self) -> str:
        """Where it listens."""
        port = str(self._server.address()).rpartition(":")[2]
        return f"http://{ray.util.get_node_ip_address()}:{port}"


class Backend(torchft_config._TorchftBackend):  # noqa: SLF001 - Ray offers no public name
    """Ray's, but that its lighthouse asks for no CPU: a head that computes nothing has none."""

    def _maybe_create_lighthouse_actor(self, backend_config: TorchftConfig) -> str:
        made: Any = ray.remote(num_cpus=0)(Lighthouse)
        torchft_config.LighthouseServerActor = made
        return str(super()._maybe_create_lighthouse_actor(backend_config))


class Config(TorchftConfig):
    """Ray's, with that."""

    @property
    def backend_cls(self) -> type[Backend]:
        """What starts the groups."""
        return Backend


def train_worker(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    from benchmarks.peers.torchft_ddp import train  # noqa: PLC0415 - only workers have it

    context = ray_train.get_context()
    train(Course(**settings), replica=context.get_world_rank(), replicas=context.get_world_size())


def main() -> None:
    """Join the cluster as its driver and train until ended."""
    parser = options_of_a_driver(__doc__)
    parser.add_argument("--packages", required=True, help="where torchft is installed")
    asked = parser.parse_args()
    course = parse(asked)
    found = os.pathsep.join((os.environ["PYTHONPATH"], asked.packages))
    ray.init(
        address=asked.address,
        log_to_driver=False,  # torchft tells of each step
        logging_level=logging.WARNING,
        runtime_env={"env_vars": {"PYTHONPATH": found}},
    )
    elastic = course.checkpoints is not None
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=asdict(course),
        scaling_config=scaling(workers=asked.workers, most=None),
        torch_config=Config(
            lighthouse_kwargs={
                "min_replicas": 1 if elastic else asked.workers,
                "quorum_tick_ms": 100,
                "join_timeout_ms": 10_000,
            },
            backend="gloo",
        ),
        run_config=RunConfig(
            name="race",
            storage_path=str(asked.storage),
            failure_config=FailureConfig(max_failures=-1 if elastic else 0),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
