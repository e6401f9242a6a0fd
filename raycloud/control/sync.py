"""Sync: by which point updates travel, what is asked for in its place, and tours of several.

A change of the point is a planned meeting of the same members: connections of the other point are
made while steps go on, and it is in force from the same step everywhere. In a tour one point after
the other is in force for some steps; then the fastest is gone on with, where that is worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from raycloud.control.replanning import decide
from raycloud.events import Noticed, SyncChanged, SyncMeasured, SyncPoint
from raycloud.planner.seen import weighted_median

if TYPE_CHECKING:
    from raycloud.commands import Command
    from raycloud.control.settings import ControlSettings
    from raycloud.events import MemberReady, StepsCommitted, SyncAsked

WARM_STEPS, STEPS = 5, 20  # of each point: not looked at, and looked at
_ROUNDS = 3  # that are looked at at least, where steps are made in rounds
_MOST_FAILED = 3  # changes to one point that broke
_MOST_BEGINS = 4  # of a tour, as members come and go
_CHANGE_S = 0.5  # costs a change, where none was measured


@dataclass(slots=True)
class _Seen:
    """One member's steps by a point: seconds of the median of each report, and of how many."""

    warm: int = 0
    began_s: float = 0.0  # seconds of the first report
    began_steps: int = 0
    reports: list[tuple[float, int]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.reports)


class Tour:
    """Measures points one after the other.

    Attributes:
        left: Those that are to come, the present one first.
        step_s: What was measured of the others.
        begins: How often it has begun.
    """

    def __init__(self, points: Sequence[SyncPoint]) -> None:
        self._points = tuple(points)
        self._group: frozenset[int] | None = None
        self.begins = 0
        self.left = list(points)
        self.step_s: dict[SyncPoint, float] = {}
        self._changes_s: list[float] = []
        self.look_anew()

    def meet(self, group: tuple[int, ...]) -> None:
        """These are measured: what was measured of others is forgotten."""
        if self._group != frozenset(group):
            self._group = frozenset(group)
            self.begins += 1
            self.left, self.step_s, self._changes_s = list(self._points), {}, []
            self.look_anew()

    @property
    def change_s(self) -> float:
        """What a change has cost: the median."""
        return weighted_median([(one, 1) for one in self._changes_s]) or _CHANGE_S

    def look_anew(self) -> None:
        """Another point is in force, or the same with other members' connections."""
        self._seen: dict[int, _Seen] = {}

    def leave_out(self) -> None:
        """The present point cannot be measured."""
        self.left.pop(0)
        self.look_anew()

    def observe(self, report: StepsCommitted, group: tuple[int, ...]) -> bool:
        """Take in a report under the present point; whether that is measured now."""
        point, seen = self.left[0], self._seen.setdefault(report.member, _Seen())
        steps = report.last_step - report.first_step
        if seen.warm < max(WARM_STEPS, 2 * point.period):
            if not seen.warm:
                seen.began_s, seen.began_steps = report.wall_s, steps
            seen.warm += steps
        elif report.typical_s > 0.0:
            seen.reports.append((report.typical_s, steps))
        wanted = max(STEPS, _ROUNDS * point.period)
        every = [self._seen.get(member) for member in group]
        known = [one for one in every if one is not None and one.steps >= wanted]
        if len(known) < len(group):
            return False
        found = weighted_median(pair for one in known for pair in one.reports)
        self.step_s[point] = found
        self._changes_s.append(
            max(0.0, min(one.began_s - one.began_steps * found for one in known))
        )
        self.left.pop(0)
        self.look_anew()
        return True


class Sync:
    """By which point updates travel; each change of it is asked for, or a tour's.

    Attributes:
        point: In force; None: as the job says, since none was ever sent.
        wanted: To be in force next; None: nothing is.
    """

    def __init__(self, settings: ControlSettings) -> None:
        self._given = settings.sync
        self._start = settings.warm_steps + WARM_STEPS
        self.point: SyncPoint | None = settings.in_force
        self.wanted: SyncPoint | None = None
        self._why = ""
        self._failed = 0
        self._no_rounds = ""
        self._tour = Tour(settings.tour) if settings.tour else None
        self._closing = False

    @property
    def now(self) -> SyncPoint:
        """In force, whoever has said so."""
        return self.point or self._given

    def learn(self, ready: MemberReady) -> None:
        """What a member says of its task."""
        self._no_rounds = self._no_rounds or ready.no_rounds

    def ask(self, event: SyncAsked) -> Iterator[Command]:
        """Someone wants another point; a tour is over then."""
        point, self._tour = SyncPoint(**event.point), None
        if point.period > 1 and self._no_rounds:
            what = "a wish for other updates was passed over"
            yield Noticed(what=what, detail={"why": self._no_rounds})
        else:
            self._want(point, "as asked")

    def _want(self, point: SyncPoint, why: str) -> None:
        self._failed = 0
        self.wanted, self._why = (None if point == self.now and self.point else point), why

    def send(self) -> SyncPoint | None:
        """The point that members are to be told of; from then on there is always one."""
        self.point = self.now
        return self.wanted

    def take_effect(self, point: SyncPoint, generation: int, step: int) -> Iterator[Command]:
        """It is in force from `step` on."""
        changed, self.point = point != self.point, point
        if self._tour is not None:
            self._tour.look_anew()
        if point == self.wanted:
            self.wanted = None
        if changed or self._closing:
            yield self._changed(generation, step)

    def _changed(self, generation: int, step: int) -> SyncChanged:
        closing, self._closing = self._closing, False
        return SyncChanged(
            generation=generation,
            step=step,
            point=asdict(self.now),
            given=asdict(self._given),
            why=self._why,
            toured=closing,
        )

    def fail(self) -> Iterator[Command]:
        """What was sent broke before it was in force, and is sent again, but not for ever."""
        self._failed += 1
        if self._failed < _MOST_FAILED or self.wanted is None:
            return
        detail = {"point": str(self.wanted), "times": self._failed}
        yield Noticed(what="a change of how updates travel broke each time", detail=detail)
        self.wanted, self._failed = None, 0
        if self._tour is not None and self._tour.left:
            self._tour.leave_out()

    def progress(
        self,
        report: StepsCommitted,
        group: tuple[int, ...],
        generation: int,
        left: Callable[[], int | None],
        following: Collection[int] = (),
    ) -> Iterator[Command]:
        """A member has reported; where that ends the look at a point of a tour, what follows.

        Args:
            report: Of the present generation, or an older one.
            group: Who computes.
            generation: As which.
            left: Says how many steps are to come; None: it is not known.
            following: Who of them has no state yet.
        """
        tour = self._tour
        if tour is None or self.wanted is not None or report.generation < generation:
            return
        if report.last_step < self._start or len(group) == 1 or following:
            return
        tour.meet(group)
        if self._no_rounds:
            tour.left = [one for one in tour.left if one.period == 1]
        if tour.begins > _MOST_BEGINS:
            yield from self._give_up("members came and went in each tour of it")
        elif tour.left and tour.left[0] == self.now:
            if not tour.observe(report, group):
                return
            told, step_s = asdict(self.now), tour.step_s[self.now]
            yield SyncMeasured(generation=generation, point=told, step_s=step_s, steps=STEPS)
        if self._tour is None:
            return
        if tour.left:
            self._want(tour.left[0], "a tour of it")
        elif tour.step_s:
            yield from self._close(tour, generation, report.last_step, left())
        else:
            yield from self._give_up("nothing could be measured")

    def _close(self, tour: Tour, generation: int, step: int, left: int | None) -> Iterator[Command]:
        """All is measured: go on with the fastest."""
        now = self.now if self.now in tour.step_s else min(tour.step_s, key=tour.step_s.__getitem__)
        found = decide(now, tour.step_s, left=left, cost_s=tour.change_s)
        self._tour, self._closing = None, True
        self._want(found.plan, f"after a tour: {found.why}")
        if self.wanted is None:
            yield self._changed(generation, step)

    def _give_up(self, why: str) -> Iterator[Command]:
        self._tour = None
        yield Noticed(what="a tour of ways for updates was given up", detail={"why": why})
        self._want(self._given, "a tour was given up")
