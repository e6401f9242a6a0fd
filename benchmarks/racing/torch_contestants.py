"""torchrun: an agent per node, DistributedDataParallel, with a hook that compresses or without."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal

from benchmarks.racing.contestant import RESTARTS, Attempt, environment

if TYPE_CHECKING:
    from benchmarks.testbed import Process, Testbed

STORE_PORT = 29400
# Once there are enough workers: how long the agents wait for more. The default of 30 s would be
# added to each restart of a group that is not complete.
LAST_CALL_S = 5
# One store for all restarts keeps addresses of workers that are gone, at which restarted ones then
# fail or hang (pytorch/pytorch#135712, which names this way out): each restart makes its own.
_OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Torchrun:
    """torchrun with one worker per node.

    Args:
        name: Under which it races.
        hook: What its gradients pass through.
    """

    on_ray = False

    def __init__(self, name: str, *, hook: Literal["none", "fp16", "powersgd"]) -> None:
        self.name = name
        self._hook = hook

    def prepare(self) -> Mapping[str, str]:
        """It comes with torch."""
        return {"torch": version("torch")}

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """Start the store in the head, then an agent on each node."""
        command = [sys.executable, "-m", "benchmarks.peers.rendezvous_store"]
        command += ["--host", bed.head.address, "--port", str(STORE_PORT)]
        log = attempt.logs / "store.log"
        bed.head.start(command, environment=environment(attempt), log=log)
        return [process for node in attempt.nodes for process in self.joined(bed, attempt, node)]

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:
        """Start an agent there: it asks to be let in."""
        address = bed[node].address
        command = [sys.executable, *agent(attempt, store=bed.head.address, address=address)]
        command += ["-m", "benchmarks.peers.torchrun_elastic", "--hook", self._hook]
        command += attempt.course().arguments()
        variables = {**environment(attempt), **_OWN_STORES}
        log = attempt.logs / f"{node}.log"
        return [bed[node].start(command, environment=variables, log=log)]


def agent(attempt: Attempt, *, store: str, address: str) -> list[str]:
    """Torchrun and its options, without the script.

    Args:
        attempt: The attempt; elastic ones take from one node to as many as there may be.
        store: Address of the machine that holds the store.
        address: Of the agent's own node.
    """
    fixed = len(attempt.nodes)
    nodes = f"1:{attempt.most_nodes}" if attempt.elastic else f"{fixed}:{fixed}"
    return [
        *("-m", "torch.distributed.run"),
        *("--nnodes", nodes, "--nproc-per-node", "1"),
        *("--max-restarts", str(RESTARTS if attempt.elastic else 0)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{store}:{STORE_PORT}"),
        *("--rdzv-id", "race"),
        *("--rdzv-conf", f"is_host=0,last_call_timeout={LAST_CALL_S}"),
        *("--local-addr", address),
    ]
