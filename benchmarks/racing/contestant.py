"""What a contestant is: it starts processes on a testbed and trains until the testbed ends them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from benchmarks.machine import ROOT
from benchmarks.peers.course import Course

if TYPE_CHECKING:
    from benchmarks.testbed import Process, Testbed

# Of the caller's shell only this is passed on; nothing that tunes torch, Ray or the allocator.
_KEPT = ("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TZ", "USER")
RESTARTS = 1000  # of a worker, where its supervisor wants a number: more than an attempt can need


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One run of one contestant.

    Attributes:
        directory: All that it writes goes below it; the same path on every node.
        nodes: Names of the nodes at the start.
        most_nodes: How many there may be at most.
        global_batch: Samples of a step of all nodes at the start.
        per_worker: Samples of a step of one node: `global_batch / len(nodes)`.
        learning_rate: Of AdamW.
        elastic: Faults are to come: run with the contestant's own fault tolerance on.
        ray_address: Of the Ray cluster on the testbed; None where there is none.
        small: Train the tiny model, to see whether all works.
    """

    directory: Path
    nodes: tuple[str, ...]
    most_nodes: int
    global_batch: int
    per_worker: int
    learning_rate: float
    elastic: bool
    ray_address: str | None = None
    small: bool = False

    def __post_init__(self) -> None:
        """Check that the shares add up.

        Raises:
            ValueError: They do not, or there are more nodes than there may be.
        """
        if self.per_worker * len(self.nodes) != self.global_batch:
            raise ValueError(
                f"per_worker={self.per_worker} of {len(self.nodes)} nodes is not"
                f" global_batch={self.global_batch}; choose one that the nodes divide"
            )
        if len(self.nodes) > self.most_nodes:
            raise ValueError(
                f"most_nodes={self.most_nodes} is less than the {len(self.nodes)} at the start;"
                " raise it"
            )

    @property
    def journals(self) -> Path:
        """Where workers note their updates."""
        return self.directory / "journals"

    @property
    def snapshots(self) -> Path:
        """Where parameters are kept."""
        return self.directory / "snapshots"

    @property
    def logs(self) -> Path:
        """Where the output of processes goes."""
        return self.directory / "logs"

    @property
    def checkpoints(self) -> Path:
        """Where a contestant that restarts keeps what it restarts from."""
        return self.directory / "checkpoints"

    def place_of(self, node: str) -> int:
        """Which of the `most_nodes` places a node has, also when it comes back.

        Those of the start are first, in their order; one that joins has the place of its number.

        Raises:
            ValueError: There is no place for it.
        """
        if node in self.nodes:
            return self.nodes.index(node)
        digits = "".join(one for one in node if one.isdigit())
        place = int(digits or 0) - 1
        if not len(self.nodes) <= place < self.most_nodes:
            raise ValueError(
                f"node={node!r} has no place among most_nodes={self.most_nodes}; name those that"
                f" join n{len(self.nodes) + 1} to n{self.most_nodes}"
            )
        return place

    def course(self) -> Course:
        """What each of a peer's workers is to train; with checkpoints where faults are to come."""
        return Course(
            journals=self.journals,
            snapshots=self.snapshots,
            checkpoints=self.checkpoints if self.elastic else None,
            per_worker=self.per_worker,
            learning_rate=self.learning_rate,
            small=self.small,
        )


class Contestant(Protocol):
    """One way to train the workload on a testbed.

    A contestant is over once all processes that it returned, from `start` and from every `joined`,
    have ended; what it needs besides them (a store, a lighthouse) ends with the testbed.

    Attributes:
        name: Under which it races.
        on_ray: Whether the nodes are to have joined a Ray cluster before `start`.
    """

    name: str
    on_ray: bool

    def prepare(self) -> Mapping[str, str]:
        """Install what it needs, once; names and versions of what is measured.

        Raises:
            NotInstalledError: It cannot be installed here.
        """
        ...

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """Start training on the nodes of `attempt`; returns without waiting for a step."""
        ...

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:
        """A node came, or came back: start there what its supervisor would."""
        ...


def environment(attempt: Attempt) -> dict[str, str]:
    """All of the environment of a contestant's processes; also of the raylets they may run on."""
    temporary = attempt.directory / "t"  # short: the path of a socket has at most 107 bytes
    temporary.mkdir(parents=True, exist_ok=True)
    attempt.logs.mkdir(parents=True, exist_ok=True)
    return {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        "MKL_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(temporary),
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TMPDIR": str(temporary),
    }
