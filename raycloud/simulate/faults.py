"""Faults and preemption notices: what each does to the machines, the members and the driver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never

from raycloud.control import Phase
from raycloud.events import CapacityChanged, RangeChanged, StopRequested
from raycloud.simulate.fleet import SimulatedMember
from raycloud.simulate.machines import Notice
from raycloud.simulate.scenario import Fault, Kind

if TYPE_CHECKING:
    from raycloud.simulate.cluster import Start
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
    """Lets faults befall a run."""

    def __init__(
        self, scenario: Scenario, world: World, machines: Machines, story: History
    ) -> None:
        self._scenario, self._world, self._machines = scenario, world, machines
        self._story = story
        self.start: Start | None = None  # the present one
        self.counts: Counter[str] = Counter()  # by kind
        self.calm = False  # nothing befalls it any more, and all is well again
        self.full = False  # there is no room on the disk of the checkpoints
        self.turns = 0  # how often something has befallen it or was mended
        self._mends: list[Callable[[], None]] = []
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
                self._deafen(fault.lasts_s)
            case Kind.FULL:
                self._fill(full=True)
                self.mend_after(fault.lasts_s, lambda: self._fill(full=False))
            case Kind.STOP:
                self._tell(StopRequested(reason="asked"))
            case Kind.RANGE:
                self._tell_range(min(fault.many, self._scenario.members))
            case Kind.GROW:  # files are added; they are found and read after a while
                self._story.samples += 1 + self._world.below(self._scenario.samples)
                self._world.after(self._world.between(0.0, _READ_S), self._read)
            case _:
                assert_never(fault.kind)

    def _deafen(self, seconds: float) -> None:
        if self.start is not None:
            self.start.words.deaf_until_s = self._world.now_s + seconds

    def _wake(self) -> None:
        if self.start is not None:
            self.start.wake()

    def _tell(self, event: StopRequested | RangeChanged | CapacityChanged) -> None:
        if self.start is not None:
            self.start.words.tell(event, self._world.now_s)

    def _tell_range(self, most: int) -> None:
        least = self._scenario.least
        self._tell(RangeChanged(min_workers=least, max_workers=max(least, most)))

    def mend_after(self, seconds: float, mend: Callable[[], None]) -> None:
        """Do this then, or when all becomes well."""
        self._mends.append(mend)
        self._world.after(seconds, lambda: self._mend(mend))

    def _mend(self, mend: Callable[[], None]) -> None:
        if mend in self._mends:
            self._mends.remove(mend)
            self._wake()
            mend()
            self.turns += 1

    def _calm(self) -> None:
        self._wake()
        self._world.log.add(f"{self._world.now_s:.6f} ! calm")
        for mend in list(self._mends):
            self._mend(mend)
        for node in self._machines.away:
            self._machines.come(node)
        self.calm = True
        self.look_soon()
        self._tell_range(self._scenario.members)
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
            if fault.node >= 0:
                dying = [body for body in fleet.on_node(fault.node) if body in alive]
            else:
                dying = [alive[i] for i in self._world.some(fault.many, len(alive))]
            for body in dying:
                ending.die(body)
                fleet.lose(body, "its process died", self._world.between(*_DIES_S))

    def _fill(self, *, full: bool) -> None:
        self.full = full
        if self.start is not None:
            self.start.computing.full = full

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
            self.leave(self._drawn(fault), fault)
        self.look_soon()

    def _drawn(self, fault: Fault) -> list[int]:
        """The nodes that it concerns, of those that are there."""
        there = self._machines.there
        if fault.node >= 0:
            return [fault.node] if fault.node in there else []
        return [there[i] for i in self._world.some(fault.many, len(there))]

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
        nodes = self._drawn(fault)
        if fault.kind is Kind.SLOW:
            factor = fault.factor or self._world.between(1.5, 6.0)
            self._turn(nodes, factor)
            self.mend_after(fault.lasts_s, lambda: self._turn(nodes, 1 / factor))
        elif fault.kind is Kind.FREEZE:
            for node in nodes:
                self._hold(node, fault.lasts_s, driver_only=False)
        else:
            if fault.node >= 0:
                self._cut_all(nodes, fault.lasts_s)
                return
            begins_s = sorted(self._world.between(0.0, fault.lasts_s / 2) for _ in nodes)
            for node, begin_s in zip(nodes, begins_s, strict=True):
                last_s = fault.lasts_s * self._world.between(0.5, 1.0) - begin_s
                only = self._world.likely(_DRIVER_ONLY)
                self._world.after(begin_s, partial(self._cut, node, last_s, driver_only=only))

    def _cut_all(self, nodes: list[int], lasts_s: float) -> None:
        """From everybody, at once, for exactly so long."""
        for node in nodes:
            self._cut(node, lasts_s, driver_only=False)

    def _cut(self, node: int, lasts_s: float, *, driver_only: bool) -> None:
        if not self.calm:
            self._wake()
            self.turns += 1
            self._hold(node, lasts_s, driver_only=driver_only, resets=True)

    def _hold(self, node: int, lasts_s: float, *, driver_only: bool, resets: bool = False) -> None:
        """Members of a node stand still, or cannot be reached, until it is mended."""
        start = self.start
        self._machines.cut[node] += 1
        self._machines.unreached[node] += resets  # else its processes are frozen, not its kernel
        bodies = list[SimulatedMember]()
        if start is not None:
            bodies = start.fleet.on_node(node)
            for body in bodies:
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

    def _turn(self, nodes: list[int], factor: float) -> None:
        for node in nodes:
            self._machines.slow[node] *= factor
        if self.start is not None:
            self.start.computing.retime()


_AHEAD_S = ((0.5, 5.0), (5.0, 30.0), (30.0, 150.0))  # from the notice to the end
_PROCESS = 0.3  # the chance that it is processes that are ended, and not nodes
_DRAINED = 0.5  # the chance that it is Ray that drains a node, and not a cloud
_TOLD = 0.8  # the chance that the deadline is told
_CHANGES = 4  # that may have to be in force one after the other before they have left
_CHANGE_S = 3.0  # of each, beside words and steps
_KNOWN_S = (0.05, 1.0)


class Notices:
    """Gives notice, and keeps to it."""

    def __init__(self, befalling: Faults, world: World, machines: Machines) -> None:
        self._befalling, self._world, self._machines = befalling, world, machines

    def give(self, fault: Fault) -> None:
        """Of so many nodes, or processes."""
        world, machines = self._world, self._machines
        if fault.node >= 0:
            notice = Notice(gone_s=world.now_s + fault.lasts_s, drained=True)
            self._of_nodes(fault, notice, [fault.node])
            return
        gone_s = world.now_s + world.between(*_AHEAD_S[world.below(len(_AHEAD_S))])
        told = world.likely(_TOLD)
        if world.likely(_PROCESS):
            self._of_processes(fault, Notice(gone_s=gone_s, told=told))
            return
        notice = Notice(gone_s=gone_s, told=told, drained=world.likely(_DRAINED))
        there = [node for node in machines.there if node not in machines.notices]
        nodes = [there[i] for i in world.some(fault.many, len(there))]
        self._of_nodes(fault, notice, nodes)

    def _of_nodes(self, fault: Fault, notice: Notice, nodes: list[int]) -> None:
        world, machines, gone_s = self._world, self._machines, notice.gone_s
        start = self._befalling.start
        bodies = [b for n in nodes for b in start.fleet.on_node(n)] if start is not None else []
        machines.notices.update(dict.fromkeys(nodes, notice))
        for body in bodies:
            if start is not None and body.built:
                start.fleet.warn(body, notice, f"node-{machines.node_of(body.place or 0)}")
        look = self._watch(bodies, gone_s)

        def go() -> None:
            look()
            leaving = [node for node in nodes if machines.notices.get(node) is notice]
            back_s = math.inf if fault.node >= 0 else fault.lasts_s
            self._befalling.leave(leaving, replace(fault, lasts_s=back_s))

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
        look = self._watch(bodies, notice.gone_s)

        def go() -> None:
            look()
            for body in bodies if start is self._befalling.start else ():
                if body.alive:
                    start.ending.die(body)
                    start.fleet.lose(body, "its process died", world.between(*_KNOWN_S))

        self._befalling.mend_after(notice.gone_s - world.now_s, go)

    # ---- the promise

    def _watch(self, bodies: list[SimulatedMember], gone_s: float) -> Callable[[], None]:
        """What looks that they compute no more then, if there is time and nothing else happens."""
        befalling, world = self._befalling, self._world
        start, turns = befalling.start, befalling.turns
        if start is None or not self._well(start, gone_s - world.now_s, len(bodies)):
            return lambda: None

        def look() -> None:
            undisturbed = start is befalling.start and turns == befalling.turns
            if not undisturbed or befalling.calm or world.now_s < gone_s:
                return
            group = start.computing.group
            for body in bodies:
                if group is not None and body.number in group.members:
                    what = f"member {body.number} still computes when it is gone"
                    start.computing.wrong = f"{what}, as was said in time"

        return look

    def _well(self, start: Start, left_s: float, leaving: int) -> bool:
        """All compute, enough of them stay, and there is time for so many to leave."""
        control, seats = start.driver.control, start.fleet.seats
        group = start.computing.group
        if group is None or control.phase is not Phase.TRAINING:
            return False
        step_s = group.step_s * (1 + leaving)  # of those that are left, too
        delay_s = start.computing.scenario.delay_s
        due_s = _CHANGES * (2 * delay_s + 4 * step_s + _CHANGE_S)
        deaf = start.words.deaf_until_s > self._world.now_s
        stay = sum(not (n in seats and seats[n].warned) for n in group.members)
        enough = stay >= max(1, control.workers[0]) and left_s >= due_s
        return enough and not deaf and all(body.well for body in seats.values())
