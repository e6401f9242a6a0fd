"""Ray Train V2: a driver in the head, workers on the nodes' raylets; fixed, elastic, by torchft."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from benchmarks.peers.environments import TORCHFT, interpreter, packages, versions
from benchmarks.racing.contestant import Attempt, environment

if TYPE_CHECKING:
    from benchmarks.testbed import Process, Testbed


class RayTrain:
    """Ray Train's TorchTrainer.

    Args:
        name: Under which it races.
        elastic: Whether its group takes from one worker to as many as there may be. A fixed one
            restarts too where faults are to come, once it has all of its workers again.
    """

    on_ray = True

    def __init__(self, name: str, *, elastic: bool) -> None:
        self.name = name
        self._elastic = elastic

    def prepare(self) -> Mapping[str, str]:
        """It is installed with the benchmark."""
        return {name: version(name) for name in ("ray", "torch")}

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """Start the driver."""
        log = attempt.logs / "driver.log"
        return [
            bed.head.start(self.command(attempt), environment=environment(attempt), log=log),
        ]

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:  # noqa: ARG002
        """Nothing: the driver sees to it."""
        return []

    def command(self, attempt: Attempt) -> list[str]:
        """The driver's command line.

        Raises:
            ValueError: The attempt has no Ray cluster.
        """
        command = self.driver("ray_train_elastic", attempt)
        if self._elastic:
            command += ["--most", str(attempt.most_nodes)]
        return [*command, *attempt.course().arguments()]

    def driver(self, script: str, attempt: Attempt) -> list[str]:
        """The command line of this driver, but for the course."""
        if attempt.ray_address is None:
            raise ValueError(f"ray_address is None, but {self.name} runs on Ray; start a cluster")
        command = [sys.executable, "-m", f"benchmarks.peers.{script}"]
        command += ["--address", attempt.ray_address]
        command += ["--storage", str(attempt.directory / "storage")]
        return [*command, "--workers", str(len(attempt.nodes))]


class RayTrainTorchft(RayTrain):
    """The same with Ray's own `TorchftConfig`: who dies is replaced, and the others go on."""

    def __init__(self, name: str) -> None:
        super().__init__(name, elastic=False)

    def prepare(self) -> Mapping[str, str]:
        """Install torchft where Ray's workers find it."""
        interpreter(TORCHFT)
        return {**super().prepare(), **versions(TORCHFT)}

    def command(self, attempt: Attempt) -> list[str]:
        """The driver's command line; see `RayTrain.command`."""
        command = self.driver("ray_train_torchft", attempt)
        command += ["--packages", str(packages(TORCHFT))]
        return [*command, *attempt.course().arguments()]
