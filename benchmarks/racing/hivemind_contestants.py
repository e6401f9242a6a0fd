"""Hivemind: a welcoming peer in the head, a training peer per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.peers.environments import HIVEMIND, interpreter, versions
from benchmarks.racing.contestant import RESTARTS, Attempt, environment

if TYPE_CHECKING:
    from benchmarks.testbed import Process, Testbed

WELCOME_PORT = 31337


class Hivemind:
    """Hivemind's Optimizer on each node; a peer that died is started anew by a plain supervisor."""

    name = "hivemind"
    on_ray = False

    def prepare(self) -> Mapping[str, str]:
        """Install it into its environment."""
        interpreter(HIVEMIND)
        return versions(HIVEMIND)

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """Start the peer that welcomes, then those that train."""
        command = [str(interpreter(HIVEMIND)), "-m", "benchmarks.peers.hivemind_welcome"]
        command += ["--port", str(WELCOME_PORT), *_welcome(attempt)]
        log = attempt.logs / "welcome.log"
        bed.head.start(command, environment=environment(attempt), log=log)
        return [process for node in attempt.nodes for process in self.joined(bed, attempt, node)]

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:
        """Start one there."""
        command = [str(interpreter(HIVEMIND)), "-m", "benchmarks.peers.supervised"]
        command += ["--restarts", str(RESTARTS if attempt.elastic else 0), "--"]
        command += [str(interpreter(HIVEMIND)), "-m", "benchmarks.peers.hivemind_peer"]
        command += ["--global-batch", str(attempt.global_batch), *_welcome(attempt)]
        command += ["--replica", str(attempt.place_of(node))]
        command += ["--replicas", str(attempt.most_nodes), *attempt.course().arguments()]
        log = attempt.logs / f"{node}.log"
        return [bed[node].start(command, environment=environment(attempt), log=log)]


def _welcome(attempt: Attempt) -> list[str]:
    return ["--welcome", str(attempt.directory / "welcome")]
