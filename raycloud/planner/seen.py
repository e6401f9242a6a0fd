"""What a run has shown of its steps, in place of what was tried before them.

A step is taken to last as long as the median one did, from commit to commit: other work on the
machines makes some steps longer, which says little of those to come. Where steps that follow leave
the interval that was predicted, they are looked at anew, twice as many each time. Where rounds
begin, or have another length, what is known of computing and of links says what is to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.events import Noticed, StepsCommitted
    from raycloud.planner.cost import Profile
    from raycloud.planner.speed import Speed
    from raycloud.spec import Job

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
    typical: list[tuple[float, int]] = field(default_factory=list)

    def begin(self) -> None:
        """The same, of steps that are to come."""
        self.steps = self.micro_batches = self.bytes_sent = 0
        self.wall_s = self.compute_s = self.exchange_s = self.overlap_s = 0.0
        self.typical.clear()

    @property
    def step_s(self) -> float:
        """Seconds of the median step; the mean where reports do not tell."""
        return weighted_median(self.typical) or self.wall_s / self.steps


def weighted_median(values: Iterable[tuple[float, int]]) -> float:
    """The value below which half of the weight lies, of pairs of both; 0 without any.

    >>> weighted_median([(1.0, 3), (9.0, 1), (2.0, 1)]), weighted_median([(1.0, 1), (2.0, 1)])
    (1.0, 1.5)
    """
    ranked = sorted((value, weight) for value, weight in values if weight > 0)
    half, so_far = sum(weight for _, weight in ranked) / 2, 0.0
    for at, (value, weight) in enumerate(ranked):
        so_far += weight
        if so_far > half:
            return value
        if so_far == half:
            return (value + ranked[at + 1][0]) / 2
    return 0.0


class SeenSteps:
    """Sums of what members report, of the newest generation; see `profile`."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}
        self._likely_s = (0.0, math.inf)
        self._wanted = STEPS
        self._told = -1  # the generation whose profile was taken
        self._speeds: dict[int, Speed] = {}
        self._link_bytes_per_s: float | None = None
        self._overhead_s: float | None = None
        self._waited_s: float | None = None
        self._newest = (-1, 0)  # the generation and step that were reported last
        self._period: int | None = None  # by that report; None: there was none
        self._period_changed = False  # and nothing is told since
        self._chosen = (-1, 0)  # the generation and step in which members chose the period
        self._computing_s: float | None = None  # of a step without its exchange, as told there

    def begin(self, generation: int) -> None:
        """Shares are others from here on: what was seen under the old ones is forgotten."""
        self._sums.clear()
        self._told = min(self._told, generation - 1)
        self._wanted = STEPS

    def travel(self) -> None:
        """Updates travel in another way: what was waited for is not what will be."""
        self._waited_s = self._period = None

    def take_choice(self, found: Noticed) -> bool:
        """Members have chosen another length for their rounds: whether that is what is told.

        They have seen what a step takes apart from the exchange, which shares their processors. A
        report of the new rounds may be here before it.
        """
        told = [found.detail.get(name) for name in ("generation", "step", "period")]
        if None in told:
            return False
        generation, step, period = (int(value) for value in told if value is not None)
        stepwise = period == 1 and self._period in {None, 1}
        if stepwise or generation < self._newest[0] or (generation, step) <= self._chosen:
            return False
        self._chosen = generation, step
        self._newest = max(self._newest, self._chosen)
        self._change(period)
        self._computing_s = found.detail.get("computing_s") if period > 1 else None
        return True

    def _change(self, period: int) -> None:
        self.begin(self._newest[0])
        self._period, self._waited_s, self._period_changed = period, None, True

    def in_newest_rounds(self, asked: Job) -> Job:
        """The same job, in rounds as long as the newest may be: where it leaves the period open."""
        point = asked.sync_point
        if self._period is None or point.stream > 1 or asked.asynchronous:
            return asked  # reports tell of periods of another kind
        return asked.at(replace(point, period=self._period))

    def expect(self, low_s: float, high_s: float) -> None:
        """Steps are predicted to take so long, by what has been seen: see whether they do."""
        self._likely_s = low_s, high_s
        for sums in self._sums.values():
            sums.begin()

    def observe(self, report: StepsCommitted) -> None:
        """Take in a member's report."""
        generation, step = self._chosen
        if report.generation <= generation and report.first_step < step:
            return  # late, or in part of rounds of another length
        if (newest := (report.generation, report.last_step)) > self._newest:
            before, self._newest, self._period = self._period, newest, report.period
            if before not in {None, report.period}:
                self._change(report.period)
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
        if report.typical_s:
            sums.typical.append((report.typical_s, steps))

    def of(self, members: Sequence[int], tried: Profile) -> Profile:
        """What was tried, with what has been seen of these members in generations before."""
        speeds = [
            self._speeds.get(member, speed)
            for member, speed in zip(members, tried.speeds, strict=True)
        ]
        return replace(
            tried,
            speeds=tuple(speeds),
            link_bytes_per_s=self._link_bytes_per_s or tried.link_bytes_per_s,
            overhead_s=self._overhead_s,
            waited_s=self._waited_s,
        )

    def profile(
        self, members: Sequence[int], tried: Profile, shares: Sequence[float] = ()
    ) -> Profile | None:
        """What was tried, with what all `members` have shown since; None: too little, or no news.

        All seconds are those of the median step: each of its parts is taken to be the same part of
        it as of the mean. Of each speed the ratio of fixed and other seconds is kept. The link's
        rate is that at which bytes have travelled while anybody waited for them or computed: where
        all of the exchange is hidden it may be higher. What is left of a step's time beside both
        is its overhead. Where rounds are longer or shorter than before, that is news: what
        computing takes then is known where members have told it, and they have these `shares`.
        """
        if self._period_changed:
            self._period_changed = False
            if len(shares) == len(members) and self._newest[0] == self._chosen[0]:
                self._take_computing(members, self.of(members, tried).speeds, shares)
            if self._speeds.keys() >= set(members):
                self._told = self._newest[0]
                return self.of(members, tried)
        every = [self._sums.get(member) for member in members]
        known = [one for one in every if one is not None and one.steps >= self._wanted]
        generations = {one.generation for one in known}
        if len(known) < len(members) or len(generations) > 1:
            return None
        if self._told in generations:
            self._wanted *= 2
            low_s, high_s = self._likely_s
            if low_s <= weighted_median((one.step_s, one.steps) for one in known) <= high_s:
                for one in known:
                    one.begin()
                return None
        [self._told] = generations
        typical = [min(1.0, one.step_s * one.steps / (one.wall_s or math.inf)) for one in known]
        for member, sums, part, speed in zip(members, known, typical, tried.speeds, strict=True):
            expected_s = sums.steps * speed.seconds(sums.micro_batches / sums.steps)
            if expected_s and (by := part * sums.compute_s / expected_s):
                self._speeds[member] = replace(
                    speed, fixed_s=by * speed.fixed_s, micro_batch_s=by * speed.micro_batch_s
                )
        last, part = min(zip(known, typical, strict=True), key=_waited_s)
        self._waited_s = part * last.exchange_s / last.steps
        if (travelled_s := part * (last.exchange_s + last.overlap_s)) and last.bytes_sent:
            self._link_bytes_per_s = last.bytes_sent / travelled_s
        besides_s = part * (last.wall_s - last.compute_s - last.exchange_s) / last.steps
        self._overhead_s = max(0.0, besides_s)
        return self.of(members, tried)

    def _take_computing(
        self, members: Sequence[int], speeds: Sequence[Speed], shares: Sequence[float]
    ) -> None:
        """Speeds by which the slowest takes as long as members have told, all but its exchange."""
        slowest_s = max(speed.seconds(share) for speed, share in zip(speeds, shares, strict=True))
        if self._computing_s is None or slowest_s <= 0.0:
            return
        by, self._overhead_s = self._computing_s / slowest_s, 0.0
        for member, one in zip(members, speeds, strict=True):
            self._speeds[member] = replace(
                one, fixed_s=by * one.fixed_s, micro_batch_s=by * one.micro_batch_s
            )


def _waited_s(one: tuple[_Sums, float]) -> float:
    sums, part = one
    return part * sums.exchange_s / sums.steps
