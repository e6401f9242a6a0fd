"""Usage: what the members of a run have spent, and how much of each node that is.

    cpu = processor seconds of its members' steps / (seconds of these steps * cores they may use)

Cores are those of a worker's quota: as many as the job gives it, or fewer where its machine has
fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.report.figures import byte_count, percent

if TYPE_CHECKING:
    from raycloud.events import MemberReady, StepsCommitted

_LESS = 0.95  # of the whole: a node that is used as much is not named
_ID = 8  # characters of a node's id tell it from others


@dataclass(slots=True)
class Spent:
    """Sums over all members and all steps they computed.

    Of the energy `metered_j` is what meters have told; the rest is estimated, see `Tally.watts`.
    """

    wall_s: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0
    exchange_s: float = 0.0
    overlap_s: float = 0.0
    cpu_s: float = 0.0
    bytes_sent: int = 0
    bytes_dense: int = 0
    blocked_s: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    energy_j: float = 0.0
    metered_j: float = 0.0

    def add(
        self, event: StepsCommitted, core_watts: float | None = None, collators: float = 0.0
    ) -> None:
        """Add a member's report; a busy core of its node takes so many watts.

        `collators` are those of a core that makes batches elsewhere; 0: the member makes its own.
        """
        estimated_s = event.cpu_s if event.gpu_only or not event.energy_j else 0.0
        estimated_j = estimated_s * (core_watts or 0.0)
        estimated_j += collators * (event.read_s + event.collate_s)
        self.metered_j += event.energy_j
        self.energy_j += event.energy_j + estimated_j
        self.wall_s += event.wall_s
        self.compute_s += event.compute_s
        self.data_s += event.data_s
        self.exchange_s += event.exchange_s
        self.overlap_s += event.overlap_s
        self.cpu_s += event.cpu_s
        self.bytes_sent += event.bytes_sent
        self.bytes_dense += event.bytes_dense
        self.noise += event.noise
        self.signal += event.signal


@dataclass(slots=True)
class Used:
    """Sums over one member's steps.

    Attributes:
        node: Where it is.
        cores: That it may use; 0: it has not said so.
        gpu_s: Seconds in which its GPU was busy, of `gpu_seen_s` in which somebody looked.
        memory_bytes: The most that it was seen to take; `gpu_bytes`, on its GPU.
    """

    node: str = ""
    cores: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    gpu_s: float = 0.0
    gpu_seen_s: float = 0.0
    memory_bytes: int = 0
    gpu_bytes: int = 0
    bytes_sent: int = 0

    def add(self, event: StepsCommitted) -> None:
        """Add a report."""
        self.wall_s += event.wall_s
        self.cpu_s += event.cpu_s
        self.bytes_sent += event.bytes_sent
        self.memory_bytes = max(self.memory_bytes, event.memory_bytes)
        self.gpu_bytes = max(self.gpu_bytes, event.gpu_bytes)
        if event.gpu_busy is not None:
            self.gpu_s += event.gpu_busy * event.wall_s
            self.gpu_seen_s += event.wall_s


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUsage:
    """How much of a node the members of a run have used, while they made steps.

    Attributes:
        node: Its id; empty: of all nodes together.
        members: That were there.
        cpu: Part of the cores that they may use; None: not known.
        gpu: Part of the time in which their GPUs computed; None: there are none, or nobody knows.
        memory_bytes: The most that one of them took; 0: not known.
        gpu_bytes: Likewise, on its GPU; None: there are none.
        sent_bytes_per_s: Of updates, by all of them.
    """

    node: str
    members: int
    cpu: float | None
    gpu: float | None
    memory_bytes: int
    gpu_bytes: int | None
    sent_bytes_per_s: float

    def to_record(self) -> dict[str, Any]:
        """As plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def introduce(used: dict[int, Used], ready: MemberReady) -> None:
    """A member says where it is."""
    before = used.setdefault(ready.member, Used())
    before.node, before.cores = ready.node, ready.cores


def usage(used: Mapping[int, Used]) -> list[NodeUsage]:
    """Of all nodes together, and of each, in the order of their ids; none where nobody computed."""
    found = [one for one in used.values() if one.wall_s > 0.0]
    if not found:
        return []
    nodes = sorted({one.node for one in found if one.node})
    return [_of("", found), *(_of(n, [o for o in found if o.node == n]) for n in nodes)]


def _of(node: str, found: Iterable[Used]) -> NodeUsage:
    every = [*found]
    quota_s = sum(one.cores * one.wall_s for one in every)
    known_s = sum(one.cpu_s for one in every if one.cores)
    gpu_seen_s = sum(one.gpu_seen_s for one in every)
    nodes = len({one.node for one in every})
    rates = [one.bytes_sent / one.wall_s for one in every]
    return NodeUsage(
        node=node,
        members=len(every),
        cpu=known_s / quota_s if quota_s > 0.0 else None,
        gpu=sum(one.gpu_s for one in every) / gpu_seen_s if gpu_seen_s > 0.0 else None,
        memory_bytes=max(one.memory_bytes for one in every),
        gpu_bytes=max(one.gpu_bytes for one in every) or None,
        sent_bytes_per_s=sum(rates) if node or nodes == 1 else sum(rates) / nodes,
    )


def usage_text(records: Iterable[Mapping[str, Any]]) -> str:
    """In one line for people; empty where nothing is known.

    >>> one = {"members": 2, "memory_bytes": 3 << 20, "gpu": None, "sent_bytes_per_s": 2e6}
    >>> usage_text([{"node": "", "cpu": 0.8, **one}, {"node": "a", "cpu": 0.8, **one}])
    'processors 80% · memory at most 3.1 MB a worker · 2.0 MB/s sent a node'
    >>> usage_text([{"node": n, "cpu": c, **one} for n, c in (("", 0.8), ("a", 0.9), ("b", 0.7))])
    'processors 80% (node b least, 70%) · memory at most 3.1 MB a worker · 2.0 MB/s sent a node'
    """
    every = [*records]
    if not every:
        return ""
    whole, *nodes = every
    parts = []
    for name, label in (("cpu", "processors"), ("gpu", "GPUs")):
        if whole[name] is None:
            continue
        known = [one for one in nodes if one[name] is not None]
        text = f"{label} {percent(whole[name])}"
        least = min(known, key=lambda one: one[name], default=whole)
        if least[name] < _LESS * whole[name]:
            text += f" (node {least['node'][:_ID]} least, {percent(least[name])})"
        parts.append(text)
    if whole["memory_bytes"]:
        gpu = whole.get("gpu_bytes")  # older summaries have none
        more = f", {byte_count(gpu)} on its GPU" if gpu else ""
        parts.append(f"memory at most {byte_count(whole['memory_bytes'])} a worker{more}")
    if whole["sent_bytes_per_s"]:
        parts.append(f"{byte_count(round(whole['sent_bytes_per_s']))}/s sent a node")
    return " · ".join(parts)
