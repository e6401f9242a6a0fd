"""Facts that are found out before anything is judged: settings, machines, links, a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What an environment says about Ray; the token itself is never kept.

    Attributes:
        auth_mode: `RAY_AUTH_MODE`, in small letters; None where it is not set.
        token_variable: Whether `RAY_AUTH_TOKEN` holds a token.
        token_path: The file that is read where it does not: `RAY_AUTH_TOKEN_PATH`, else
            `~/.ray/auth_token`.
        tls: Whether `RAY_USE_TLS` asks for encryption.
        temp: Where Ray keeps its sessions (`RAY_TMPDIR`, else `TMPDIR`, else /tmp).
    """

    auth_mode: str | None = None
    token_variable: bool = False
    token_path: Path = Path("~/.ray/auth_token")
    tls: bool = False
    temp: Path = Path("/tmp")

    @classmethod
    def from_mapping(cls, variables: Mapping[str, str]) -> Settings:
        """The settings that these variables describe.

        >>> found = Settings.from_mapping({"RAY_AUTH_MODE": "TOKEN", "HOME": "/h"})
        >>> found.auth_mode, str(found.token_path)
        ('token', '/h/.ray/auth_token')
        """
        default = Path(variables.get("HOME") or "~", ".ray", "auth_token")
        tls = variables.get("RAY_USE_TLS", "").strip().lower()
        return cls(
            auth_mode=variables.get("RAY_AUTH_MODE", "").strip().lower() or None,
            token_variable=bool(variables.get("RAY_AUTH_TOKEN", "").strip()),
            token_path=Path(variables.get("RAY_AUTH_TOKEN_PATH") or default),
            tls=tls in {"1", "true", "yes", "on"},
            temp=Path(variables.get("RAY_TMPDIR") or variables.get("TMPDIR") or "/tmp"),
        )


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
class Machine:
    """One machine.

    Attributes:
        name: What findings call it, e.g. `this machine` or `node 10.0.0.2`.
        versions: Python, raycloud, Ray and torch, by name; None where it is not installed.
        temp: Where Ray keeps its sessions.
        shm: Shared memory.
        memory_bytes: Memory in all; 0 where Linux does not say.
        memory_free_bytes: What programs could still get.
        gpus: Its GPUs.
    """

    name: str
    versions: Mapping[str, str | None]
    temp: Disk
    shm: Disk
    memory_bytes: int
    memory_free_bytes: int
    gpus: Gpus


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
        auth_mode: `token` or `disabled`, by the settings of its nodes; None where unknown.
        nodes: The living nodes, the head first.
        dead: Addresses of nodes that died since the cluster started.
        links: Each node to the next.
    """

    address: str
    failure: str = ""
    refused: bool = False
    auth_mode: str | None = None
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
        token: Whether there is a token, in the environment or in its file.
        cluster: The cluster, where an address was given.
    """

    settings: Settings
    machine: Machine
    required: Mapping[str, str]
    token: bool = True
    cluster: ClusterFacts | None = None

    @property
    def machines(self) -> tuple[Machine, ...]:
        """This machine, then those of the cluster."""
        nodes = self.cluster.nodes if self.cluster else ()
        return (self.machine, *(node.machine for node in nodes if node.machine))
