"""Faults and preemption notices: what each does to the machines, the members and the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, assert_never

from raycloud.control import Phase
from raycloud.events import CapacityChanged, RangeChanged, StopRequested
from raycloud.simulate.machines import Notice
from raycloud.simulate.scenario import Fault, Kind

if TYPE_CHECKING:
    from raycloud.simulate.cluster import Start
    from raycloud.simulate.fleet import SimulatedMember
    from raycloud.simulate.history import History
    from raycloud.simulate.machines import Machines
    from raycloud.simulate.scenario import Scenario
    from raycloud.simulate.world import World

_LOOK_S = 2.0  # the driver looks at the machines so often
_READ_S = 2.0  # at most so long after files were added they have been read
_DIES_S = (0.05, 2.0)  # from a process's end to the driver's knowing
_VANISHES_S = (1.0, 40.0)  # and from a node's end
_DECLARED_S = (30.0, 60.0)  # a node that is silent for so long is taken for dead
_RESETS = 0.5  # the chance that connections do not survive a cut
_DRIVER_ONLY = 0.3  # the chance that a cut is one from the driver, and not from peers


class Faults:
    """Lets faults befall a run.

    Args:
        scenario: Which faults.
        world: Whose time and chance.
        machines: The machines.
        story: What is known of the run.

    Attributes:
        start: The present start of the run; None between two.
        counts: How many faults of each kind befell it.
        calm: Nothing befalls it any more, and all is well again.
        full: There is no room on the disk of the checkpoints.
        turns: How often something has befallen it or was mended.
    """

    def __init__(
        self, scenario: Scenario, world: World, machines: Machines, story: History
    ) -> None:
        self._scenario, self._world, self._machines = scenario, world, machines
        self._story = story
        self.start: Start | None = None
        self.counts: Counter[str] = Counter()
        self.calm = False
        self.full = False
        self.turns = 0
        self._mends: dict[int, Callable[[], None]] = {}
        self._mended = 0
        self._notices = Notices(self, world, machines)
        for fault in sorted(scenario.faults):
            world.at(fault.at_s, partial(self._befall, fault))
        world.at(scenario.lasts_s, self._calm)

    def _befall(self, fault: Fault) -> None:
        if self.calm:
            return
        self._wake()
        self.turns += 1
        self.counts[str(fault.kind)] += 1
        told = f"{fault.kind} {fault.many} for {fault.lasts_s:.3f} s"
        self._world.log.add(f"{self._world.now_s:.6f} ! {told}")
        match fault.kind:
            case Kind.LEAVE | Kind.ZONE | Kind.HOLD:
                self._come_and_go(fault)
            case Kind.FREEZE | Kind.CUT | Kind.SLOW:
                self._of_nodes(fault)
            case Kind.NOTICE:
                self._notices.give(fault)
            case Kind.DIE | Kind.BREAK | Kind.FAIL:
                self._of_members(fault)
            case Kind.JUMP:
                self._world.ahead_s += fault.lasts_s
            case Kind.DEAF:
                if self.start is not None:
                    self.start.words.deaf_until_s = self._world.now_s + fault.lasts_s
            case Kind.FULL:
                self._full(fault)
            case Kind.STOP | Kind.RANGE | Kind.GROW:
                self._from_outside(fault)
            case _:
                assert_never(fault.kind)

    def _wake(self) -> None:
        if self.start is not None:
            self.start.wake()

    def _tell(self, event: StopRequested | RangeChanged | CapacityChanged) -> None:
        if self.start is not None:
            self.start.words.tell(event, self._world.now_s)

    def mend_after(self, seconds: float, mend: Callable[[], None]) -> None:
        """Do this then, or when all becomes well."""
        self._mended += 1
        number = self._mended
        self._mends[number] = mend
        self._world.after(seconds, lambda: self._mend(number))

    def _mend(self, number: int) -> None:
        mend = self._mends.pop(number, None)
        if mend is not None:
            self._wake()
            mend()
            self.turns += 1

    def _calm(self) -> None:
        self._wake()
        self._world.log.add(f"{self._world.now_s:.6f} ! calm")
        for number in list(self._mends):
            self._mend(number)
        for node in self._machines.away:
            self._machines.come(node)
        self.calm = True
        self.look_soon()
        self._tell(
            RangeChanged(min_workers=self._scenario.least, max_workers=self._scenario.members)
        )
        if self._scenario.steps is None:
            self._tell(StopRequested(reason="the time is over"))

    # ---- members

    def _of_members(self, fault: Fault) -> None:
        if self.start is None:
            return
        ending, fleet = self.start.ending, self.start.fleet
        alive = fleet.alive
        if fault.kind is Kind.BREAK:
            ending.breaks()
        elif fault.kind is Kind.FAIL:
            for i in self._world.some(1, len(alive)):
                ending.fail(alive[i])
        else:
            for i in self._world.some(fault.many, len(alive)):
                ending.die(alive[i])
                fleet.lose(alive[i], "its process died", self._world.between(*_DIES_S))

    def _full(self, fault: Fault) -> None:
        self._fill(full=True)
        self.mend_after(fault.lasts_s, lambda: self._fill(full=False))

    def _fill(self, *, full: bool) -> None:
        self.full = full
        if self.start is not None:
            self.start.computing.full = full

    # ---- people, and data

    def _from_outside(self, fault: Fault) -> None:
        if fault.kind is Kind.STOP:
            self._tell(StopRequested(reason="asked"))
        elif fault.kind is Kind.RANGE:
            most = max(self._scenario.least, min(fault.many, self._scenario.members))
            self._tell(RangeChanged(min_workers=self._scenario.least, max_workers=most))
        else:
            self._grow()

    def _grow(self) -> None:
        """Files are added; they are found and read after a while."""
        self._story.samples += 1 + self._world.below(self._scenario.samples)
        self._world.after(self._world.between(0.0, _READ_S), self._read)

    def _read(self) -> None:
        if self.start is not None:
            self.start.grow(self._story.samples)

    # ---- nodes

    def _come_and_go(self, fault: Fault) -> None:
        there, away = self._machines.there, self._machines.away
        chance = self._world
        if fault.kind is Kind.HOLD:
            more = fault.many - len(there)
            for i in chance.some(max(0, more), len(away)):
                self._machines.come(away[i])
            self._vanish(there[i] for i in chance.some(max(0, -more), len(there)))
        elif fault.kind is Kind.ZONE:
            self.leave(self._machines.in_zone(chance.below(self._scenario.zones)), fault)
        else:
            self.leave([there[i] for i in chance.some(fault.many, len(there))], fault)
        self.look_soon()

    def leave(self, nodes: list[int], fault: Fault) -> None:
        """These nodes vanish, and come back after a while."""
        self._vanish(nodes)
        self.mend_after(fault.lasts_s, lambda: self._come(nodes))

    def _vanish(self, nodes: Iterable[int]) -> None:
        gone = list(nodes)
        for node in gone:
            self._machines.vanish(node)
        known_s = self._world.between(*_VANISHES_S)
        for node in gone:
            self._die(node, "its node is gone", known_s)

    def _die(self, node: int, why: str, known_s: float) -> None:
        start = self.start
        if start is None:
            return
        for body in start.fleet.on_node(node):
            start.ending.die(body)
            start.fleet.lose(body, why, known_s + self._world.between(0.0, 1.0))

    def _come(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self._machines.come(node)
        self.look_soon()

    def look_soon(self) -> None:
        """The driver looks at the machines now and then."""
        self._world.after(self._world.between(0.0, _LOOK_S), self._look)

    def _look(self) -> None:
        start = self.start
        if start is None:
            return
        start.fleet.place()
        if start.room != self._machines.room:
            start.room = self._machines.room
            self._tell(CapacityChanged(workers=start.room))

    def _of_nodes(self, fault: Fault) -> None:
        there = self._machines.there
        nodes = [there[i] for i in self._world.some(fault.many, len(there))]
        if fault.kind is Kind.SLOW:
            self._slow(nodes, fault)
        elif fault.kind is Kind.FREEZE:
            for node in nodes:
                self._hold(node, fault.lasts_s, driver_only=False)
        else:
            begins_s = sorted(self._world.between(0.0, fault.lasts_s / 2) for _ in nodes)
            for node, begin_s in zip(nodes, begins_s, strict=True):
                last_s = fault.lasts_s * self._world.between(0.5, 1.0) - begin_s
                only = self._world.likely(_DRIVER_ONLY)
                self._world.after(begin_s, self._cutting(node, last_s, driver_only=only))

    def _cutting(self, node: int, lasts_s: float, *, driver_only: bool) -> Callable[[], None]:
        def cut() -> None:
            if not self.calm:
                self._wake()
                self.turns += 1
                self._hold(node, lasts_s, driver_only=driver_only, resets=True)

        return cut

    def _hold(self, node: int, lasts_s: float, *, driver_only: bool, resets: bool = False) -> None:
        """Members of a node stand still, or cannot be reached, until it is mended."""
        start = self.start
        self._machines.cut[node] += 1
        self._machines.unreached[node] += resets  # else its processes are frozen, not its kernel
        bodies = start.fleet.on_node(node) if start is not None else []
        for body in bodies:
            if start is not None:
                (start.ending.lose_sight if driver_only else start.ending.freeze)(body)

        def mend() -> None:
            self._machines.cut[node] -= 1
            self._machines.unreached[node] -= resets
            if start is None or start is not self.start:
                return
            for body in bodies:
                if body.alive:
                    (start.ending.see_again if driver_only else start.ending.thaw)(body)
            if resets and not driver_only and self._world.likely(_RESETS):
                start.ending.breaks()
            self.look_soon()

        self.mend_after(lasts_s, mend)
        dead_s = self._world.between(*_DECLARED_S)
        if lasts_s > dead_s:
            self._world.after(dead_s, lambda: self._declare_dead(node, start))

    def _declare_dead(self, node: int, start: Start | None) -> None:
        if start is self.start and self._machines.cut[node]:
            self._wake()
            self._die(node, "its node was declared dead", 0.0)

    def _slow(self, nodes: list[int], fault: Fault) -> None:
        factor = self._world.between(1.5, 6.0)
        self._turn(nodes, factor)
        self.mend_after(fault.lasts_s, lambda: self._turn(nodes, 1 / factor))

    def _turn(self, nodes: list[int], factor: float) -> None:
        for node in nodes:
            self._machines.speeds[node] *= factor
        if self.start is not None:
            self.start.computing.retime()


_AHEAD_S = ((0.5, 5.0), (5.0, 30.0), (30.0, 150.0))  # from the notice to the end
_PROCESS = 0.3  # the chance that it is processes that are ended, and not nodes
_DRAINED = 0.5  # the chance that it is Ray that drains a node, and not a cloud
_TOLD = 0.8  # the chance that the deadline is told
_CHANGES = 4  # that may have to be in force one after the other before they have left
_CHANGE_S = 3.0  # of each, beside words and steps
_KNOWN_S = (0.05, 1.0)


@dataclass(frozen=True, slots=True)
class _Watched:
    """How things stood when a notice was given, where nothing else was the matter."""

    start: Start
    bodies: tuple[SimulatedMember, ...]
    turns: int
    gone_s: float


class Notices:
    """Gives notice, and keeps to it.

    Args:
        befalling: Whatever else befalls the run.
        world: Whose time and chance.
        machines: The machines.
    """

    def __init__(self, befalling: Faults, world: World, machines: Machines) -> None:
        self._befalling, self._world, self._machines = befalling, world, machines

    def give(self, fault: Fault) -> None:
        """Of so many nodes, or processes."""
        world, machines = self._world, self._machines
        gone_s = world.now_s + world.between(*_AHEAD_S[world.below(len(_AHEAD_S))])
        told = world.likely(_TOLD)
        if world.likely(_PROCESS):
            self._of_processes(fault, Notice(gone_s=gone_s, told=told))
            return
        notice = Notice(gone_s=gone_s, told=told, drained=world.likely(_DRAINED))
        there = [node for node in machines.there if node not in machines.notices]
        nodes = [there[i] for i in world.some(fault.many, len(there))]
        start = self._befalling.start
        bodies = [b for n in nodes for b in start.fleet.on_node(n)] if start is not None else []
        machines.notices.update(dict.fromkeys(nodes, notice))
        for body in bodies:
            if start is not None and body.built:
                start.fleet.warn(body, notice, f"node-{machines.node_of(body.place or 0)}")
        watched = self._watch(bodies, gone_s)

        def go() -> None:
            self._look(watched)
            leaving = [node for node in nodes if machines.notices.get(node) is notice]
            self._befalling.leave(leaving, fault)

        self._befalling.look_soon()
        self._befalling.mend_after(gone_s - world.now_s, go)

    def _of_processes(self, fault: Fault, notice: Notice) -> None:
        start, world = self._befalling.start, self._world
        if start is None:
            return
        alive = [body for body in start.fleet.alive if body.built]
        bodies = [alive[i] for i in world.some(fault.many, len(alive))]
        for body in bodies:
            start.fleet.warn(body, notice)
        watched = self._watch(bodies, notice.gone_s)

        def go() -> None:
            self._look(watched)
            for body in bodies if start is self._befalling.start else ():
                if body.alive:
                    start.ending.die(body)
                    start.fleet.lose(body, "its process died", world.between(*_KNOWN_S))

        self._befalling.mend_after(notice.gone_s - world.now_s, go)

    # ---- the promise

    def _watch(self, bodies: list[SimulatedMember], gone_s: float) -> _Watched | None:
        """Remember it where there is time enough, and nothing else is the matter."""
        start, world = self._befalling.start, self._world
        if start is None or not self._well(start):
            return None
        group, delay_s = start.computing.group, start.computing.scenario.delay_s
        if group is None:
            return None
        step_s = group.step_s * (1 + len(bodies))  # of those that are left, too
        due_s = _CHANGES * (2 * delay_s + 4 * step_s + _CHANGE_S)
        if gone_s - world.now_s < due_s:
            return None
        return _Watched(start, tuple(bodies), self._befalling.turns, gone_s)

    def _well(self, start: Start) -> bool:
        """All compute, and enough of them stay."""
        control, seats = start.driver.control, start.fleet.seats
        group = start.computing.group
        if group is None or control.phase is not Phase.TRAINING:
            return False
        deaf = start.words.deaf_until_s > self._world.now_s
        stay = sum(not (n in seats and seats[n].warned) for n in group.members)
        enough = stay >= max(1, control.workers[0])
        return enough and not deaf and all(body.well for body in seats.values())

    def _look(self, watched: _Watched | None) -> None:
        """Those of which notice was given do not compute any more."""
        start = self._befalling.start
        if watched is None or watched.start is not start or self._befalling.calm:
            return
        if self._world.now_s < watched.gone_s or watched.turns != self._befalling.turns:
            return
        group = start.computing.group
        for body in watched.bodies:
            if group is not None and body.number in group.members:
                start.computing.wrong = (
                    f"member {body.number} still computes when it is gone, as was said in time"
                )
