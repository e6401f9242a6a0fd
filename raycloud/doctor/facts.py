"""What was found out, before anything is judged: settings, machines, links, a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.doctor.settings import Settings, TokenFile


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A folder, and the file system below it.

    Attributes:
        path: The folder.
        total_bytes: Size of the file system; 0 where it cannot be asked.
        free_bytes: What this user may still write there.
        writable: Whether this user can make files there, or make the folder.
    """

    path: str
    total_bytes: int
    free_bytes: int
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """A machine's GPUs by the word of three.

    Attributes:
        driver: How many the NVIDIA driver shows as devices.
        torch: How many torch sees; None where torch was not asked, since nobody speaks of GPUs.
        ray: How many Ray hands out there; None without Ray.
        names: What torch calls them.
    """

    driver: int = 0
    torch: int | None = None
    ray: float | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A socket that listens.

    Attributes:
        program: Which part of Ray; empty where it is another program or somebody else's.
        address: The local address; `0.0.0.0` and `::` are all interfaces.
        port: TCP port.
    """

    program: str
    address: str
    port: int

    @property
    def wide(self) -> bool:
        """Whether other machines reach it."""
        return not (self.address.startswith(("127.", "::ffff:127.")) or self.address == "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """The object store of a node's raylet.

    Attributes:
        size_bytes: What it may hold.
        folder: Where its memory is; /dev/shm unless Ray found that too small.
    """

    size_bytes: int
    folder: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine.

    Attributes:
        name: What findings call it, e.g. `this machine` or `node 10.0.0.2`.
        host: Its host name.
        versions: Python, raycloud, Ray and torch, by name; None where it is not installed.
        temp: Where Ray keeps its sessions.
        shm: Shared memory.
        memory_bytes: Memory in all.
        memory_free_bytes: What programs could still get.
        open_files: How many files Ray's processes, or else this one, may have open.
        interfaces: Names of the network interfaces.
        gpus: Its GPUs.
        listeners: Sockets that listen, all programs'.
        token: The token's file there; None where there is none.
        store: The object store; None where Ray does not run.
    """

    name: str
    host: str
    versions: Mapping[str, str | None]
    temp: Disk
    shm: Disk
    memory_bytes: int
    memory_free_bytes: int
    open_files: int
    interfaces: tuple[str, ...]
    gpus: Gpus
    listeners: tuple[Listener, ...]
    token: TokenFile | None = None
    store: Store | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """How the head of a cluster looks after its nodes: Ray's `RAY_health_check_*`.

    Attributes:
        period_ms: Between the answer to one question and the next question.
        timeout_ms: How long an answer may take.
        threshold: After how many failures in a row a node counts as dead.
    """

    period_ms: int = 3000
    timeout_ms: int = 10_000
    threshold: int = 5

    @property
    def frozen_s(self) -> float:
        """Seconds until a node that says nothing any more counts as dead.

        Each question runs into its time-out (gcs_health_check_manager.cc in Ray's source).

        >>> Health().frozen_s
        65.0
        """
        return self.threshold * (self.period_ms + self.timeout_ms) / 1000

    @property
    def killed_s(self) -> float:
        """Seconds until a node whose machine still refuses connections counts as dead.

        >>> Health().killed_s
        15.0
        """
        return self.threshold * self.period_ms / 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A living node of a cluster.

    Attributes:
        name: What findings call it.
        machine: What it said of itself; None where it could not.
        versions: What is installed there; known also where `machine` is not.
        silence: Why it could not; empty where it did.
        ahead_s: By how much its clock is ahead of this machine's.
        unsure_s: How wrong `ahead_s` may be: half of the quickest round trip.
    """

    name: str
    machine: Machine | None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    silence: str = ""
    ahead_s: float = 0.0
    unsure_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """From one node to another, over a socket of raycloud's own on a free port.

    Attributes:
        source: The node that connects.
        target: The node that listens.
        failure: Why they did not meet; empty where they did.
        round_trip_s: The quickest of a few.
        bytes_per_s: What went through in a second; None where it was not asked for.
    """

    source: str
    target: str
    failure: str = ""
    round_trip_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """A cluster as seen from this machine.

    Attributes:
        address: Where it was looked for.
        failure: Why it was not reached; empty where it was.
        refused: Whether it answered, and did not take our token.
        auth_mode: `token` or `disabled`, by the settings of its head; None where unknown.
        tls: Whether its head encrypts.
        health: How its head looks after its nodes; None where its settings cannot be read.
        nodes: The living nodes, the head first.
        dead: Addresses of nodes that died since the cluster started.
        links: Each node to the next.
    """

    address: str
    failure: str = ""
    refused: bool = False
    auth_mode: str | None = None
    tls: bool = False
    health: Health | None = None
    nodes: tuple[Node, ...] = ()
    dead: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything the checks look at.

    Attributes:
        settings: What the environment of the command says.
        machine: The machine the command runs on.
        required: What raycloud asks of each library, e.g. `{"ray": ">=2.60,<2.61"}`.
        missing_files: Variables of `settings.tls_files` whose file cannot be read.
        cluster: The cluster, where an address was given.
    """

    settings: Settings
    machine: Machine
    required: Mapping[str, str]
    missing_files: tuple[str, ...] = ()
    cluster: ClusterFacts | None = None

    @property
    def machines(self) -> tuple[Machine, ...]:
        """This machine, then those of the cluster."""
        nodes = self.cluster.nodes if self.cluster else ()
        return (self.machine, *(node.machine for node in nodes if node.machine))
