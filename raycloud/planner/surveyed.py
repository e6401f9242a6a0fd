"""Measures of a task that are kept: what was found out of a node need not be found out again.

A file holds those of one task and job. A node is told by its type (what it has, and its labels) and
its address. Its own measures count first; those of others of its type where they agree, since
machines that look alike may be unlike. After a day nothing counts any more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raycloud.bounded import json_value
from raycloud.events import MemberReady
from raycloud.planner.speed import Speed

if TYPE_CHECKING:
    from raycloud.spec import Job

FORMAT = 1
KEPT_S = 86_400.0
_AGREE = 1.1  # times as fast one of a type may be as another
_MOST = 1000  # nodes in a file, the newest ones
# Of a job: what changes nothing of what a worker measures.
_ASIDE = {"name", "steps", "epochs", "checkpoint", "tracking"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeMeasures:
    """What the workers on a node said of themselves, all of them at the same time.

    Attributes:
        kind: The node's type.
        address: The node's.
        unix_s: When they did.
        readies: Their words.
    """

    kind: str
    address: str
    unix_s: float
    readies: tuple[MemberReady, ...]

    def agrees(self, other: NodeMeasures) -> bool:
        """Whether micro-batches take as long there, but for a tenth."""
        mine, theirs = (_seconds(one.readies) for one in (self, other))
        return max(mine, theirs) <= _AGREE * min(mine, theirs)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMeasure:
    """The slowest link, and the longest round trip, between nodes in a ring.

    `bytes_per_s` is None where it could not be measured.
    """

    addresses: tuple[str, ...]
    unix_s: float
    bytes_per_s: float | None
    round_trip_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """All that is kept of a task and job."""

    nodes: tuple[NodeMeasures, ...] = ()
    links: tuple[LinkMeasure, ...] = ()

    def fresh(self, now_s: float) -> Measures:
        """What still counts at this unix second."""
        nodes = [one for one in self.nodes if 0.0 <= now_s - one.unix_s < KEPT_S]
        links = [one for one in self.links if 0.0 <= now_s - one.unix_s < KEPT_S]
        return Measures(nodes=tuple(nodes), links=tuple(links))

    def of(self, kind: str, address: str, workers: int) -> NodeMeasures | None:
        """Those that count for so many workers on a node; None: it has to be measured.

        Its own, or else the newest of its type, where there are two at least and all agree.
        """
        alike = [one for one in self.nodes if one.kind == kind and len(one.readies) == workers]
        own = [one for one in alike if one.address == address]
        if own:
            return max(own, key=lambda one: one.unix_s)
        if len(alike) > 1 and all(one.agrees(alike[0]) for one in alike[1:]):
            return max(alike, key=lambda one: one.unix_s)
        return None

    def link(self, addresses: Sequence[str]) -> LinkMeasure | None:
        """That of a ring of exactly these nodes, in whatever order; None: it is not known."""
        asked = sorted(addresses)
        found = [one for one in self.links if sorted(one.addresses) == asked]
        return max(found, key=lambda one: one.unix_s, default=None)

    def learn(self, nodes: Sequence[NodeMeasures], link: LinkMeasure | None) -> Measures:
        """With these, in place of older ones of the same nodes."""
        told = {(one.kind, one.address, len(one.readies)) for one in nodes}
        old = [one for one in self.nodes if (one.kind, one.address, len(one.readies)) not in told]
        links = list(self.links)
        if link is not None:
            asked = sorted(link.addresses)
            links = [one for one in links if sorted(one.addresses) != asked] + [link]
        newest = sorted((*old, *nodes), key=lambda one: one.unix_s)[-_MOST:]
        return Measures(nodes=tuple(newest), links=tuple(links[-_MOST:]))

    def to_json(self) -> str:
        """The text of the file; `from_json` is the inverse."""
        return json.dumps({"format": FORMAT, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Measures:
        """What a file holds.

        Raises:
            ValueError: It holds no measures, or those of another version.
        """
        record = json_value(text)
        try:
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {FORMAT}")
            nodes = tuple(_node(one) for one in record["nodes"])
            links = tuple(
                LinkMeasure(**{**one, "addresses": tuple(one["addresses"])})
                for one in record["links"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it holds no measures: {error!r}") from error
        return cls(nodes=nodes, links=links)


def _node(record: dict[str, Any]) -> NodeMeasures:
    readies = tuple(MemberReady(**one) for one in record["readies"])
    found = replace(NodeMeasures(**{**record, "readies": ()}), readies=readies)
    if not readies or not math.isfinite(found.unix_s) or not _seconds(readies) > 0.0:
        raise ValueError(f"these say nothing of a node: {record!r:.200}")
    return found


def _seconds(readies: Sequence[MemberReady]) -> float:
    """Of one micro-batch, the mean over workers."""
    speeds = [Speed(fixed_s=one.fixed_s, micro_batch_s=one.micro_batch_s) for one in readies]
    return math.fsum(one.seconds(1) for one in speeds) / len(speeds)


def digest(*told: Any) -> str:
    """A short name of plain values; what is no plain value counts by its text."""
    text = json.dumps(told, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def name_of(job: Job, code: str, versions: Sequence[str]) -> str:
    """The name of what is measured: of a task's `code`, by its digest, and what of a job matters.

    Args:
        job: The job, whose length, name, checkpoints and trackers do not.
        code: The digest of all files that decide what the task does.
        versions: Of the libraries that compute.
    """
    told = job.model_dump(mode="json", exclude=_ASIDE)
    told["data"].pop("prices")
    return digest(code, *versions, told)
