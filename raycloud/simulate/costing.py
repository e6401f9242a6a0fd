"""What workers and steps take on a cluster: what the simulation asks the planner's cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from raycloud.order import whole_shares
from raycloud.planner.cost import sent_bytes, transport_seconds
from raycloud.planner.plan import costs_of, zone_sizes
from raycloud.planner.shares import fit_shares
from raycloud.simulate.backups import backed_up
from raycloud.step.speculation import ring

if TYPE_CHECKING:
    from raycloud.planner.cost import Profile
    from raycloud.planner.described import Described
    from raycloud.planner.speed import Speed
    from raycloud.spec import Job


class Costing(Protocol):
    """Nodes by number: how many workers each holds, and what these take."""

    @property
    def places(self) -> tuple[int, ...]:
        """How many workers each node holds."""

    def speed(self, node: int) -> Speed:
        """Of a worker on it, while nothing slows it down."""

    def step_s(
        self, nodes: Sequence[int], speeds: Sequence[Speed], shares: Sequence[float]
    ) -> tuple[float, float]:
        """Seconds of a step of workers on these nodes, and of that what is not computing."""


@dataclass(frozen=True, eq=False)
class ClusterCosts:
    """A `Costing` of a job on a described cluster, by `planner.cost`.

    Attributes:
        job: What is asked.
        measured: What one worker has measured, where the task was tried.
        described: The cluster.
        names: Of the nodes, by number.
        places: How many workers each of them holds.
    """

    job: Job
    measured: Profile
    described: Described
    names: tuple[str, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        """Measure each node once."""
        placed = [name for name, n in zip(self.names, self.places, strict=True) for _ in range(n)]
        profile = self.described.profile(self.measured, placed)
        zones = zone_sizes(self.described.inventory, placed) if len(placed) > 1 else [1, 1]
        sent = sent_bytes(self.job.sync_point, profile.gradient_bytes, zones)
        loaded = transport_seconds(profile.speeds, sent, profile.cores)
        by_name = dict(zip(placed, loaded, strict=True))
        object.__setattr__(self, "_speeds", [by_name[name] for name in self.names])

    def speed(self, node: int) -> Speed:
        """See `Costing.speed`; what messages take of its cores is in it."""
        speeds: list[Speed] = self._speeds  # type: ignore[attr-defined]
        return speeds[node]

    def step_s(
        self, nodes: Sequence[int], speeds: Sequence[Speed], shares: Sequence[float]
    ) -> tuple[float, float]:
        """See `Costing.step_s`."""
        on = [self.names[node] for node in nodes]
        rate, round_trip_s = self.described.link(on)
        profile = replace(
            self.measured,
            speeds=tuple(speeds),
            link_bytes_per_s=rate,
            round_trip_s=round_trip_s,
        )
        costs = costs_of(
            self.job, self.described.inventory, profile, speeds, on, shares=tuple(shares)
        )
        predicted = costs.predict_as_is(self.job.sync_point)
        besides_s = predicted.step_s - predicted.compute_s
        compute_s, most = predicted.compute_s, self.job.elastic.backup_micro_batches
        if most and len(on) > 1:
            whole = whole_shares(shares, step=0)
            compute_s = backed_up(speeds, whole, ring(on, len(on)), most=most).seconds
        return compute_s + besides_s, besides_s

    def alone_s(self, nodes: int) -> float:
        """Seconds of a step of the workers of so many nodes, the first ones, with fitted shares."""
        at = [node for node in range(nodes) for _ in range(self.places[node])]
        speeds = [self.speed(node) for node in at]
        return self.step_s(at, speeds, fit_shares(speeds, self.job.micro_batches))[0]
