"""Nodes and processes that say that they are going to be gone, and then are.

What is said in time costs nothing: by then the others have gone on without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.control import Phase
from raycloud.simulate.machines import Notice

if TYPE_CHECKING:
    from raycloud.simulate.befalling import Befalling
    from raycloud.simulate.machines import Machines
    from raycloud.simulate.scenario import Fault
    from raycloud.simulate.start import Start
    from raycloud.simulate.words import Body
    from raycloud.simulate.world import World

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
    bodies: tuple[Body, ...]
    turns: int
    gone_s: float


class Notices:
    """Gives notice, and keeps to it.

    Args:
        befalling: Whatever else befalls the run.
        world: Whose time and chance.
        machines: The machines.
    """

    def __init__(self, befalling: Befalling, world: World, machines: Machines) -> None:
        """None was given."""
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

    def _watch(self, bodies: list[Body], gone_s: float) -> _Watched | None:
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
