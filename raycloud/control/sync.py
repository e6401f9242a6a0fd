"""Sync: by which point updates travel, what is asked for in its place, and tours of several.

A change of the point is a planned meeting of the same members: connections of the other point are
made while steps go on, and it is in force from the same step everywhere. In a tour one point after
the other is in force for some steps; then the fastest is gone on with, where that is worth it. What
an exchange takes is watched from then on: where links have changed, and all that a step waits for
them in the steps left is more than another tour costs, there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from raycloud.control.replanning import decide
from raycloud.events import Noticed, SyncChanged, SyncMeasured, SyncPoint
from raycloud.planner.seen import weighted_median

if TYPE_CHECKING:
    from raycloud.commands import Command
    from raycloud.control.settings import ControlSettings
    from raycloud.events import MemberReady, RoundsRefused, StepsCommitted, SyncAsked

WARM_STEPS, STEPS = 5, 20  # of each point: not looked at, and looked at
_ROUNDS = 3  # that are looked at at least, where steps are made in rounds
_MOST_FAILED = 3  # changes to one point that broke
_MOST_BEGINS = 4  # of a tour, as members come and go
_CHANGE_S = 0.5  # costs a change, where none was measured
_CHANGED = 1.5  # times as long, or as short, an exchange takes where links have changed
_LOOKS = 2  # in a row must have seen it: no odd moment has


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

    def without_rounds(self) -> list[SyncPoint]:
        """Leave out points in rounds, for good: which these are, where there were any."""
        rounds = [point for point in self._points if point.period > 1]
        if rounds:
            self._points = tuple(point for point in self._points if point.period == 1)
            self.left = [point for point in self.left if point.period == 1]
            self.look_anew()
        return rounds

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


@dataclass(slots=True)
class _Exchanged:
    """One member's sums over steps of a generation: seconds, of these what nothing hid, and all."""

    generation: int
    warm: int = 0
    looked: int = 0  # at so many
    took_s: float = 0.0
    exposed_s: float = 0.0
    whole_s: float = 0.0


class Watch:
    """What an exchange takes since a tour is over.

    Of all members the one that waits least tells: the others wait for it, too, and not only for
    links. So a worker that is slow changes nothing.

    Attributes:
        first_s: Of an exchange, hidden or not, as it was after the tour; 0: it is not known yet.
        whole_s: The same, as it was seen last.
        exposed_s: Of it, what nothing hid, for each step.
        step_s: A step's.
    """

    def __init__(self) -> None:
        self.first_s = self.whole_s = self.exposed_s = self.step_s = 0.0
        self._members: dict[int, _Exchanged] = {}
        self._ready: set[int] = set()
        self._changed = 0  # looks in a row

    def observe(self, report: StepsCommitted, group: Sequence[int], period: int) -> bool:
        """Take in a report; whether links have changed, by enough of them."""
        seen = self._members.get(report.member)
        if seen is None or seen.generation != report.generation:
            seen = self._members[report.member] = _Exchanged(report.generation)
            self._ready.discard(report.member)
        steps = report.last_step - report.first_step
        if seen.warm < max(WARM_STEPS, 2 * period):
            seen.warm += steps
            return False
        seen.looked += steps
        seen.took_s += report.wall_s
        seen.exposed_s += report.exchange_s
        seen.whole_s += report.exchange_s + report.overlap_s
        if seen.looked >= max(STEPS, _ROUNDS * period):
            self._ready.add(report.member)
        if len(self._ready) < len(group) or not self._ready.issuperset(group):
            return False
        last = min((self._members[m] for m in group), key=lambda one: one.exposed_s / one.looked)
        self.whole_s, self.exposed_s = last.whole_s / last.looked, last.exposed_s / last.looked
        self.step_s = last.took_s / last.looked
        known = [(m, self._members[m]) for m in group]
        self._members = {m: _Exchanged(one.generation, one.warm) for m, one in known}
        self._ready.clear()
        if not self.first_s:
            self.first_s = self.whole_s
            return False
        changed = not self.first_s / _CHANGED < self.whole_s < self.first_s * _CHANGED
        self._changed = self._changed + 1 if changed else 0
        return self._changed >= _LOOKS


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
        self._since = (0, settings.step)  # the generation and step from which on it is in force
        self._failed = 0
        self._no_rounds = ""  # why there cannot be any
        self._points = settings.tour
        self._tour = Tour(settings.tour) if settings.tour and not settings.toured else None
        self._watch = Watch() if settings.toured else None
        self._tour_s, self._tours = len(settings.tour) * _CHANGE_S, 0  # what one costs; how many
        self._closing = False

    @property
    def now(self) -> SyncPoint:
        """In force, whoever has said so."""
        return self.point or self._given

    def learn(self, ready: MemberReady) -> None:
        """What a member says of its task."""
        self._no_rounds = self._no_rounds or ready.no_rounds

    def refuse_rounds(self, event: RoundsRefused) -> Iterator[Command]:
        """Members exchange each step all the same: as they have found, there cannot be rounds.

        Without rounds it is another point, by its name, too.
        """
        if self._no_rounds:  # others have said so
            return
        self._no_rounds = event.why
        what = "steps are not made in rounds, as was asked: they would be refused"
        yield Noticed(what=what, detail={"why": event.why})
        if self.now.period > 1:
            self.point, self._why = self._possible(self.now), self._told(self._why)
            yield self._changed(*self._since)
        yield from self._leave_rounds_out()

    def _possible(self, point: SyncPoint) -> SyncPoint:
        """What members make of it."""
        return replace(point, period=1, stream=1) if self._no_rounds else point

    def _told(self, why: str) -> str:
        return f"{why}, but for rounds: {self._no_rounds}"

    def _leave_rounds_out(self) -> Iterator[Command]:
        """Of a tour: its points in rounds cannot be measured."""
        tour = self._tour
        rounds = [] if tour is None or not self._no_rounds else tour.without_rounds()
        if rounds:
            what = "points of the tour are left out: steps cannot be made in rounds"
            detail = {"points": tuple(map(str, rounds)), "why": self._no_rounds}
            yield Noticed(what=what, detail=detail)

    def ask(self, event: SyncAsked) -> Iterator[Command]:
        """Someone wants another point; a tour is over then."""
        point, self._tour, self._points = SyncPoint(**event.point), None, ()
        if point.period > 1 and self._no_rounds:
            what = "a wish for other updates was passed over: steps cannot be made in rounds"
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
        if point == self.wanted:
            self.wanted = None
        if point != (possible := self._possible(point)):
            point, self._why = possible, self._told(self._why)
        changed, self.point, self._since = point != self.point, point, (generation, step)
        if self._tour is not None:
            self._tour.look_anew()
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
        if self.wanted is not None or report.generation < generation:
            return
        if report.last_step < self._start or len(group) == 1 or following:
            return
        if (tour := self._tour) is None:
            yield from self._look(report, group, left)
            return
        tour.meet(group)
        yield from self._leave_rounds_out()
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
            why = self._no_rounds and f": steps cannot be made in rounds: {self._no_rounds}"
            yield from self._give_up(f"nothing could be measured{why}")

    def _close(self, tour: Tour, generation: int, step: int, left: int | None) -> Iterator[Command]:
        """All is measured: go on with the fastest."""
        now = self.now if self.now in tour.step_s else min(tour.step_s, key=tour.step_s.__getitem__)
        least_s, self._watch = min(tour.step_s.values()), Watch()
        self._tour_s = len(tour.step_s) * tour.change_s + sum(
            max(WARM_STEPS + STEPS, (2 + _ROUNDS) * point.period) * (step_s - least_s)
            for point, step_s in tour.step_s.items()
        )
        found = decide(now, tour.step_s, left=left, cost_s=tour.change_s)
        self._tour, self._closing = None, True
        self._want(found.plan, f"after a tour: {found.why}")
        if self.wanted is None:
            yield self._changed(generation, step)

    def _look(
        self, report: StepsCommitted, group: tuple[int, ...], left: Callable[[], int | None]
    ) -> Iterator[Command]:
        """After a tour: go on another one where links have changed, and that could be worth it.

        No point can save more than all that a step waits for an exchange. Where links change again
        and again, each tour has to promise twice as much as the one before.
        """
        watch = self._watch
        if watch is None or not self._points or not watch.observe(report, group, self.now.period):
            return
        steps_s = {"now": watch.step_s, "another": watch.step_s - watch.exposed_s}
        cost_s = self._tour_s * 2**self._tours
        found = decide("now", steps_s, left=left(), cost_s=cost_s)
        if not found.changes:
            return
        self._tour, self._tours, self._watch = Tour(self._points), self._tours + 1, None
        what = "ways for updates are measured anew: links have changed since they were"
        exchange = {
            "exchange_s": watch.whole_s,
            "then_s": watch.first_s,
            "waited_s": watch.exposed_s,
        }
        told = {name: float(f"{seconds:.3g}") for name, seconds in exchange.items()}
        yield Noticed(what=what, detail={**told, "why": f"at best {found.why}"})

    def _give_up(self, why: str) -> Iterator[Command]:
        self._tour = None
        yield Noticed(what="a tour of ways for updates was given up", detail={"why": why})
        self._want(self._given, "a tour was given up")
