"""What a run has shown of its steps, in place of what was tried before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.events import StepsCommitted
    from raycloud.planner.cost import Profile
    from raycloud.planner.speed import Speed

STEPS = 20  # of each member: until then a run is predicted by what was tried
_SKIPPED = 5  # the first ones of a generation: they measure its start


@dataclass(slots=True)
class _Sums:
    """Of one member, over steps of one generation with one share."""

    generation: int
    skipped: int = 0
    steps: int = 0
    micro_batches: int = 0
    wall_s: float = 0.0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    overlap_s: float = 0.0
    bytes_sent: int = 0


class SeenSteps:
    """Sums of what members report, of the newest generation; see `profile`."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}
        self._told = -1  # the generation whose profile was taken
        self._speeds: dict[int, Speed] = {}
        self._link_bytes_per_s: float | None = None
        self._overhead_s: float | None = None
        self._waited_s: float | None = None

    def begin(self, generation: int) -> None:
        """Shares are others from here on: what was seen under the old ones is forgotten."""
        self._sums.clear()
        self._told = min(self._told, generation - 1)

    def observe(self, report: StepsCommitted) -> None:
        """Take in a member's report."""
        sums = self._sums.get(report.member)
        if sums is None or sums.generation < report.generation:
            sums = self._sums[report.member] = _Sums(generation=report.generation)
        steps = report.last_step - report.first_step
        if sums.skipped < _SKIPPED:
            sums.skipped += steps
            return
        sums.steps += steps
        sums.micro_batches += report.micro_batches
        sums.wall_s += report.wall_s
        sums.compute_s += report.compute_s
        sums.exchange_s += report.exchange_s
        sums.overlap_s += report.overlap_s
        sums.bytes_sent += report.bytes_sent

    def of(self, members: Sequence[int], tried: Profile) -> Profile:
        """What was tried, with what has been seen of these members in generations before."""
        speeds = [
            self._speeds.get(member, speed)
            for member, speed in zip(members, tried.speeds, strict=True)
        ]
        return replace(
            tried,
            speeds=tuple(speeds),
            link_bytes_per_s=self._link_bytes_per_s,
            overhead_s=self._overhead_s,
            waited_s=self._waited_s,
        )

    def profile(self, members: Sequence[int], tried: Profile) -> Profile | None:
        """What was tried, with what all `members` have shown since; None: too little, or no news.

        Of each speed the ratio of fixed and other seconds is kept. The link's rate is that at which
        bytes have travelled while anybody waited for them or computed: where all of the exchange is
        hidden it may be higher. What is left of a step's time beside both is its overhead.
        """
        every = [self._sums.get(member) for member in members]
        known = [one for one in every if one is not None and one.steps >= STEPS]
        generations = {one.generation for one in known}
        if len(known) < len(members) or len(generations) > 1 or self._told in generations:
            return None
        [self._told] = generations
        for member, sums, speed in zip(members, known, tried.speeds, strict=True):
            expected_s = sums.steps * speed.seconds(sums.micro_batches / sums.steps)
            if expected_s and (by := sums.compute_s / expected_s):
                self._speeds[member] = replace(
                    speed, fixed_s=by * speed.fixed_s, micro_batch_s=by * speed.micro_batch_s
                )
        last = min(known, key=lambda one: one.exchange_s / one.steps)
        self._waited_s = last.exchange_s / last.steps
        if (travelled_s := last.exchange_s + last.overlap_s) and last.bytes_sent:
            self._link_bytes_per_s = last.bytes_sent / travelled_s
        besides_s = (last.wall_s - last.compute_s - last.exchange_s) / last.steps
        self._overhead_s = max(0.0, besides_s)
        return self.of(members, tried)
