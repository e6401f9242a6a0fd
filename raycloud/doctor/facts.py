"""Facts that are found out before anything is judged: settings, machines, links, a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What an environment says about Ray, in its variables; the token itself is never kept.

    `auth_mode` is in small letters, None where it is not set; `token_path` is read where there is
    no token in a variable.
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
    """A folder, and the file system below it: sizes are 0 where it cannot be asked.

    `writable`: this user can make files there, or make the folder.
    """

    path: str
    total_bytes: int
    free_bytes: int
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """How many GPUs the driver shows, torch sees and Ray hands out; None: not asked, or no Ray.

    `names` is what torch calls them.
    """

    driver: int = 0
    torch: int | None = None
    ray: float | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine, `name` as findings call it; `versions` are None where a library is not installed.

    `temp` is where Ray keeps its sessions; memory is 0 where Linux does not say.
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
    """A living node of a cluster; `silence` says why it did not tell of its `machine`.

    Its clock is `ahead_s` of this machine's, give or take `unsure_s`, half of the quickest round
    trip.
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

    `failure` says why they did not meet; the rate is None where it was not asked for.
    """

    source: str
    target: str
    failure: str = ""
    round_trip_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """A cluster as seen from this machine; `failure` says why it was not reached.

    It may have answered, and `refused` our token. `auth_mode` is that of its nodes, None where
    unknown; the head stands first among its living `nodes`; `links` lead from each to the next.
    """

    address: str
    failure: str = ""
    refused: bool = False
    auth_mode: str | None = None
    nodes: tuple[Node, ...] = ()
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything the checks look at.

    `required` is what raycloud asks of each library, e.g. `{"ray": ">=2.60,<2.61"}`; `token`:
    whether there is one, in the environment or in its file.
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
