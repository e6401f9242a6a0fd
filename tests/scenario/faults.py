"""Fault scripts: what befalls a run, and at which point of whose work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from raycloud.events import CapacityChanged, MemberLeaving
from raycloud.order import stream_seed
from raycloud.simulate.scenario import Kind

if TYPE_CHECKING:
    from tests.scenario.cluster import Story, ThreadCluster
    from tests.scenario.fleet import Fleet, Seat
    from tests.scenario.stage import Process, Stage

# How often, and for how long at most.
KINDS = {
    Kind.DIE: (6, 0.0),
    Kind.BREAK: (3, 0.0),
    Kind.FREEZE: (3, 25.0),
    Kind.CUT: (3, 30.0),
    Kind.LEAVE: (3, 30.0),
    Kind.SLOW: (1, 20.0),
    Kind.JUMP: (1, 900.0),
    Kind.DEAF: (1, 20.0),
    Kind.FULL: (1, 8.0),
}
# Where a process may be when it is hit; "" is wherever it is then.
WORKING = ("compute", "lane", "gradients", "delivered", "commit", "save")
MEETING = ("meet", "met", "stand", "take")
POINTS = ("", *WORKING, *MEETING)
FOLLOWING = ("copy", "send", "receive", "load")
OF_ONE = frozenset({Kind.DIE, Kind.FREEZE, Kind.BREAK, Kind.CUT})
_TOGETHER = 0.4  # the chance that another fault follows at once
_SOON_S = 4.0
_ALL = 0.1  # the chance that all die
_NOTICE_S = 10.0
_PATIENCE_S = 4.0
_FOLLOWING_S = 25.0  # until a newcomer has come
# From whom a member is cut off: mostly from all.
_SIDES = (("peers", "driver"),) * 6 + (("driver",),) * 3 + (("peers",),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """One thing that befalls a run.

    Attributes:
        at_step: Once a member is to compute this step; -1: while they are building.
        after_s: So long after that.
        kind: What.
        point: Whoever passes this point of its work next is hit; empty, or where nobody does
            before long: whoever, and at once.
        many: How many are.
        lasts_s: For how long; of a jump, how far.
        notice_s: Who leaves says so before; None: without a word.
    """

    at_step: int
    after_s: float = 0.0
    kind: Kind
    point: str = ""
    many: int = 1
    lasts_s: float = 0.0
    notice_s: float | None = None

    def __str__(self) -> str:
        where = f" at {self.point!r}" if self.point else ""
        then = f" {self.after_s:.1f} s after" if self.after_s else ""
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind} of {self.many}{where},{then} step {self.at_step}{lasts}"


def script(seed: int, *, members: int, steps: int, count: int) -> tuple[Blow, ...]:
    """So many faults by chance; often one in the recovery from another."""
    chance = np.random.Generator(np.random.PCG64(stream_seed(seed, 7)))
    often = np.array([share for share, _ in KINDS.values()])
    found: list[Blow] = []
    while len(found) < count:
        kind = list(KINDS)[int(chance.choice(len(often), p=often / often.sum()))]
        at_step, after_s, points = int(chance.integers(-1, steps - 1)), 0.0, (*POINTS, *FOLLOWING)
        if found and chance.random() < _TOGETHER:
            at_step, after_s = found[-1].at_step, float(chance.uniform(0.0, _SOON_S))
            points = ("", "build", *MEETING, "compute", *FOLLOWING)
        most = members if chance.random() < _ALL else max(1, members - 1)
        notice_s = float(chance.uniform(0.0, _NOTICE_S)) if chance.random() < 0.7 else None
        found.append(
            Blow(
                at_step=at_step,
                after_s=after_s,
                kind=kind,
                point=points[int(chance.integers(len(points)))] if kind in OF_ONE else "",
                many=int(chance.integers(1, most + 1)),
                lasts_s=float(chance.uniform(0.05, 1.0)) * KINDS[kind][1],
                notice_s=notice_s,
            )
        )
    return tuple(found)


class Faults:
    """Lets a script befall a run.

    Args:
        blows: The script.
        stage: Where members pass the points of their work.
        story: What happens.

    Attributes:
        start: The present one; None between two.
        befallen: How many have befallen the run.
    """

    def __init__(self, blows: tuple[Blow, ...], stage: Stage, story: Story) -> None:
        self._stage, self._world, self._story = stage, stage.world, story
        self._to_come = sorted(blows, key=lambda blow: blow.at_step)
        self._armed: list[Blow] = []
        self.start: ThreadCluster | None = None
        self.fleet: Fleet | None = None
        self.befallen = 0

    def reached(self, step: int) -> None:
        """Members are so far."""
        while self._to_come and self._to_come[0].at_step <= step:
            blow = self._to_come.pop(0)
            seconds = blow.after_s + (self._world.between(0.0, 5.0) if blow.at_step < 0 else 0.0)
            self._world.after(seconds, partial(self._due, blow))

    def passes(self, process: Process, point: str) -> None:
        """A process passes this point: maybe one was waited for."""
        fleet = self.fleet
        for blow in self._armed:
            if blow.point == point and fleet is not None and process in fleet.alive:
                self._armed.remove(blow)
                self._befall(blow, process)
                return

    def _due(self, blow: Blow) -> None:
        if blow.point:
            self._story.tell(f"! armed: {blow}")
            self._armed.append(blow)
            patience_s = _FOLLOWING_S if blow.point in FOLLOWING else _PATIENCE_S
            self._world.after(patience_s, partial(self._give_up, blow))
        else:
            self._befall(blow, None)

    def _give_up(self, blow: Blow) -> None:
        if blow in self._armed:
            self._armed.remove(blow)
            self._story.tell(f"! nobody passes {blow.point!r}")
            self._befall(blow, None)

    def _befall(self, blow: Blow, first: Process | None) -> None:
        fleet, start, world = self.fleet, self.start, self._world
        if fleet is None or start is None:  # between two starts: it hits the next one
            world.after(1.0, partial(self._befall, blow, None))
            return
        self.befallen += 1
        hit = self._victims(blow, first)
        self._story.tell(f"! {blow}: {', '.join(map(str, hit)) or 'nobody'}")
        {
            Kind.DIE: self._die,
            Kind.BREAK: self._break,
            Kind.FREEZE: self._freeze,
            Kind.CUT: self._cut,
            Kind.LEAVE: self._leave,
            Kind.SLOW: self._slow,
            Kind.JUMP: self._jump,
            Kind.DEAF: self._deafen,
            Kind.FULL: self._fill,
        }[blow.kind](hit, blow)

    def _victims(self, blow: Blow, first: Process | None) -> list[Seat]:
        alive = self.fleet.alive if self.fleet is not None else []
        some = [alive[i] for i in self._world.some(blow.many, len(alive))]
        if first is not None:
            some = [seat for seat in some if seat is not first][: blow.many - 1]
            some[:0] = [seat for seat in alive if seat is first]
        return some

    # ---- what befalls members

    def _die(self, hit: list[Seat], blow: Blow) -> None:
        for seat in hit:
            seat.fleet.die(seat, "its process died")

    def _break(self, hit: list[Seat], blow: Blow) -> None:
        seat = hit[0] if hit and self._world.likely(0.5) else None
        if self.fleet is not None and blow.point in FOLLOWING:
            self.fleet.wires.streams.cut(seat)
        elif self.fleet is not None:
            self.fleet.wires.reset(seat)

    def _freeze(self, hit: list[Seat], blow: Blow) -> None:
        for seat in hit:
            seat.freeze()
            self._world.after(blow.lasts_s, partial(self._mend, seat, seat.thaw))

    def _cut(self, hit: list[Seat], blow: Blow) -> None:
        """One by one, and healed in another order."""
        world = self._world
        for seat in hit:
            begin_s = world.between(0.0, blow.lasts_s / 2) if seat is not hit[0] else 0.0
            sides = _SIDES[world.below(len(_SIDES))]
            world.after(begin_s, partial(self._part, seat, sides))
            back_s = begin_s + blow.lasts_s * world.between(0.1, 1.0)
            world.after(back_s, partial(self._join, seat, sides))

    def _part(self, seat: Seat, sides: tuple[str, ...]) -> None:
        self._story.tell(f"! {seat} is cut off from {' and '.join(sides)}")
        seat.cut += "peers" in sides
        seat.unheard += "driver" in sides

    def _join(self, seat: Seat, sides: tuple[str, ...]) -> None:
        if "peers" in sides and self._world.likely(0.5):
            seat.fleet.wires.reset(seat)
        self._mend(seat, partial(_reach, seat, sides))

    def _mend(self, seat: Seat, mend: Callable[[], None]) -> None:
        self._story.tell(f"! {seat} is there again")
        mend()
        seat.fleet.reached(seat)

    def _slow(self, hit: list[Seat], blow: Blow) -> None:
        for seat in hit:
            factor = self._world.between(1.5, 5.0)
            self._turn(seat, factor)
            self._world.after(blow.lasts_s, partial(self._turn, seat, 1.0 / factor))

    def _turn(self, seat: Seat, factor: float) -> None:
        seat.micro_batch_s *= factor

    # ---- machines

    def _leave(self, hit: list[Seat], blow: Blow) -> None:
        """Their machines go, with a word or without one, and come back."""
        for seat in hit:
            fleet = seat.fleet
            if not fleet.up[seat.node]:
                continue
            fleet.up[seat.node] = False
            if blow.notice_s is not None:
                reason = "its machine is going to be gone"
                word = MemberLeaving(member=seat.number, reason=reason, deadline_s=blow.notice_s)
                fleet.tell(word)
            gone_s = blow.notice_s or 0.0
            self._world.after(gone_s, partial(fleet.die, seat, "its machine is gone"))
            self._world.after(gone_s + blow.lasts_s, partial(self._come, seat))
        self._world.after(self._world.between(0.0, 2.0), self._room)

    def _come(self, seat: Seat) -> None:
        seat.fleet.up[seat.node] = True
        self._room()

    def _room(self) -> None:
        if self.fleet is not None:
            self.fleet.place()
            self.fleet.tell(CapacityChanged(workers=self.fleet.room))

    # ---- the driver

    def _jump(self, hit: list[Seat], blow: Blow) -> None:
        if self._world.likely(0.7):
            self._world.ahead_s += blow.lasts_s
        else:
            for seat in hit:
                seat.ahead_s += blow.lasts_s

    def _deafen(self, hit: list[Seat], blow: Blow) -> None:
        if self.start is not None:
            self.start.deaf_until_s = self._world.now_s + blow.lasts_s

    def _fill(self, hit: list[Seat], blow: Blow) -> None:
        self._stage.disk_full = True
        self._world.after(blow.lasts_s, self._free)

    def _free(self) -> None:
        self._stage.disk_full = False


def _reach(seat: Seat, sides: tuple[str, ...]) -> None:
    seat.unheard -= "driver" in sides
    if "peers" in sides:
        seat.reach()
