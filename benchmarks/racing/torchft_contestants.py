"""torchft: a lighthouse in the head, a replica group of one worker per node under torchrun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from benchmarks.peers.environments import TORCHFT, interpreter, versions
from benchmarks.racing.contestant import RESTARTS, Attempt, environment

if TYPE_CHECKING:
    from benchmarks.testbed import Process, Testbed

LIGHTHOUSE_PORT = 29510
GROUP_PORT = 29600  # and on, one per group


class Torchft:
    """torchft with one group per node.

    Args:
        name: Under which it races.
        script: What a group runs.
    """

    on_ray = False

    def __init__(self, name: str, *, script: Literal["torchft_ddp", "torchft_diloco"]) -> None:
        self.name = name
        self._script = script

    def prepare(self) -> Mapping[str, str]:
        """Install it into its environment."""
        interpreter(TORCHFT)
        return versions(TORCHFT)

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """Start the lighthouse, then a group on each node."""
        variables = {**environment(attempt), "RUST_BACKTRACE": "1"}
        log = attempt.logs / "lighthouse.log"
        bed.head.start(lighthouse(attempt), environment=variables, log=log)
        return [process for node in attempt.nodes for process in self.joined(bed, attempt, node)]

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:
        """Start its group there; a node that comes back keeps its number."""
        replica = attempt.place_of(node)
        command = [str(interpreter(TORCHFT)), "-m", "torch.distributed.run"]
        command += ["--nnodes", "1", "--nproc-per-node", "1"]
        command += ["--master-addr", bed[node].address]
        command += ["--master-port", str(GROUP_PORT + replica)]
        command += ["--max-restarts", str(RESTARTS if attempt.elastic else 0)]
        command += ["-m", f"benchmarks.peers.{self._script}"]
        command += ["--replica", str(replica), "--replicas", str(attempt.most_nodes)]
        command += attempt.course().arguments()
        address = f"http://{bed.head.address}:{LIGHTHOUSE_PORT}"
        variables = {**environment(attempt), "TORCHFT_LIGHTHOUSE": address}
        log = attempt.logs / f"{node}.log"
        return [bed[node].start(command, environment=variables, log=log)]


def lighthouse(attempt: Attempt) -> list[str]:
    """The lighthouse with the options of torchft's README; without faults, all start together."""
    least = 1 if attempt.elastic else len(attempt.nodes)
    return [
        str(interpreter(TORCHFT).with_name("torchft_lighthouse")),
        *("--bind", f"[::]:{LIGHTHOUSE_PORT}"),
        *("--min_replicas", str(least)),
        *("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
    ]
