"""The limit: all nodes computing at once without exchange."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from benchmarks.racing.contestant import Attempt, environment

if TYPE_CHECKING:
    from benchmarks.testbed import Process, Testbed


class Limit:
    """A process per node; the samples that each notes are its own, to be summed over the nodes."""

    name = "limit"
    on_ray = False

    def prepare(self) -> Mapping[str, str]:
        """It is torch alone."""
        return {"torch": version("torch")}

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """Start it on each node."""
        return [process for node in attempt.nodes for process in self.joined(bed, attempt, node)]

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:
        """Start it there."""
        command = [sys.executable, "-m", "benchmarks.peers.alone", *attempt.course().arguments()]
        log = attempt.logs / f"{node}.log"
        return [bed[node].start(command, environment=environment(attempt), log=log)]
