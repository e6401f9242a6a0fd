"""The members' processes: placed, built, ended; and which of them answer the driver's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raycloud.control.heartbeats import Heard
from raycloud.events import MemberLeaving, MemberLost, MemberReturned, MemberSpawned
from raycloud.run.driver import ENDED
from raycloud.simulate.words import Body, ready

if TYPE_CHECKING:
    from raycloud.simulate.machines import Machines, Notice
    from raycloud.simulate.scenario import Scenario
    from raycloud.simulate.words import Words
    from raycloud.simulate.world import World

_POLL_S = 1.0  # as the real one asks
_LOOK_S = 0.5
_CUT_S = (0.22, 1.0)  # until a machine counts as cut off that acknowledges nothing, and
_MEMBER_S = 0.00125  # as much more for each member
_FEW = 64  # members whose answers come late by chance
_ANEW_S = (0.05, 2.0)  # until a process that is back has ended what it did


class Fleet:
    """Members of one start of a run.

    Attributes:
        seats: Members whose processes the driver holds, dead ones too until it knows.
        away: Those that it has left out, and whose processes it keeps.
        waiting: Members for which there is no place yet.
        building: How many are not ready yet.
        samples: Of the data, as those find it that are built in this start.
        over: The start is over: nothing that was planned happens any more.
    """

    def __init__(
        self, scenario: Scenario, world: World, machines: Machines, words: Words, samples: int
    ) -> None:
        """No members yet."""
        self._scenario, self._world, self._machines = scenario, world, machines
        self._words = words
        self.seats: dict[int, Body] = {}
        self.away: dict[int, Body] = {}
        self.waiting: dict[int, Body] = {}
        self.building = 0
        self.samples = samples
        self.over = False
        self._due_s: dict[int, float] = {}  # of those that do not answer
        self._cut_since_s: dict[int, float] = {}  # ... because their machines do not
        self.die: Callable[[Body], None] = self.kill  # whoever knows more of a death replaces it

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Let `act` happen so many seconds from now, unless this start is over by then."""
        self._world.after(seconds, lambda: None if self.over else act())

    def spawn(self, members: Sequence[int], *, joins: bool) -> None:
        """Start these members, those that join as soon as there is a place."""
        for number in members:
            self.waiting[number] = Body(number=number, joins=joins)
        self.place()

    def place(self) -> None:
        """Start whoever has found a place meanwhile."""
        for number, body in list(self.waiting.items()):
            place = self._machines.seat()
            if place is None:
                return
            del self.waiting[number]
            self._start(body, place)

    def _start(self, body: Body, place: int) -> None:
        body.place, body.well_since_s = place, self._world.now_s
        self.seats[body.number] = body
        self.building += 1
        after_s = self._world.between(0.0, _LOOK_S) if body.joins else 0.0
        self._words.tell(MemberSpawned(member=body.number), self._world.now_s + after_s)
        built = self._world.between(1.0 - self._scenario.spread, 1.0)
        build_s = self._scenario.build_s * built + after_s
        if body.joins and self._world.likely(self._scenario.stillborn):
            self.later(build_s * self._world.between(0.0, 1.0), lambda: self._miss(body))
        else:
            self.later(build_s, lambda: self._build(body))

    def _build(self, body: Body) -> None:
        if not body.alive:
            return
        self.building -= 1
        body.built = True
        # A probe of a few micro-batches is noisy.
        probed_s = self.micro_batch_s(body) * self._world.between(0.8, 1.3)
        node = self._machines.node_of(body.place or 0)
        self._words.say(body, ready(body, samples=self.samples, micro_batch_s=probed_s, node=node))
        if node in self._machines.notices:
            self.warn(body, self._machines.notices[node], f"node-{node}")

    def warn(self, body: Body, notice: Notice, node: str = "") -> None:
        """It hears that it is going to be gone, or its node is; or the driver does."""
        body.warned, left_s = True, max(0.0, notice.gone_s - self._world.now_s)
        word = MemberLeaving(
            member=body.number,
            reason="notice",
            deadline_s=left_s if notice.told else None,
            node=node,
        )
        if notice.drained:
            self._words.tell(word, self._world.now_s + self._world.between(0.0, _LOOK_S))
        else:
            self._words.say(body, word)

    @property
    def room(self) -> int:
        """How many members the machines hold that can be reached."""
        return self._machines.within_reach

    def _miss(self, body: Body) -> None:
        if body.alive:
            self.die(body)
            self.lose(body, "no memory", 0.5)

    def micro_batch_s(self, body: Body) -> float:
        """How long a micro-batch takes it now."""
        return self._machines.speeds[self._machines.node_of(body.place or 0)]

    def on_node(self, node: int) -> list[Body]:
        """Living members that are on a node."""
        return [
            body
            for body in (*self.seats.values(), *self.away.values())
            if body.alive and body.place is not None and self._machines.node_of(body.place) == node
        ]

    @property
    def alive(self) -> list[Body]:
        """Members whose processes live."""
        return [body for body in self.seats.values() if body.alive]

    def kill(self, body: Body) -> None:
        """Its process ends."""
        if not body.alive:
            return
        if not body.built:
            self.building -= 1
        self.hush(body)
        body.alive = False
        body.heard_until_s = self._world.now_s + self._world.between(0.0, self._scenario.delay_s)
        if body.place is not None:
            self._machines.leave(body.place)
        self.later(_LOOK_S, self.place)

    def lose(self, body: Body, reason: str, after_s: float) -> None:
        """Its end becomes known to the driver, after its last words."""
        at_s = max(self._world.now_s + after_s, body.heard_until_s)
        self._words.tell(MemberLost(member=body.number, reason=reason), at_s)

    def drop(self, member: int) -> None:
        """The driver does not hold it any more."""
        self.waiting.pop(member, None)
        self._due_s.pop(member, None)
        body = self.seats.pop(member, None) or self.away.pop(member, None)
        if body is not None:
            self.kill(body)
            self._due_s.pop(member, None)

    def leave_out(self, member: int) -> None:
        """The driver listens to it no more, and waits for its process to answer again."""
        self._due_s.pop(member, None)
        body = self.seats.pop(member, None)
        if body is not None:
            body.away, body.withheld = True, []
            self.away[member] = body
            self._return(body)

    def _return(self, body: Body) -> None:
        """The driver finds that it answers."""
        number = body.number

        def look() -> None:
            if self.away.get(number) is body and body.well:
                word = MemberReturned(member=number, late_s=_POLL_S)
                self._words.tell(word, self._world.now_s)

        self.later(self._world.between(0.0, _POLL_S), look)

    def readmit(self, member: int, process: int) -> None:
        """A process that has returned goes on as another member, which has nothing that counts."""
        body = self.away.pop(process, None)
        if body is None or not body.alive:
            self._words.tell(MemberLost(member=member, reason=ENDED), self._world.now_s)
            return
        body.number, body.joins, body.away, body.begun = member, True, False, False
        body.step = body.value = body.told = body.owes = 0
        body.kept, body.withheld, body.built = (), [], False
        self.seats[member] = body
        self.building += 1
        if not body.well:
            self.hush(body)
        self._words.tell(MemberSpawned(member=member), self._world.now_s)
        self.later(self._world.between(*_ANEW_S), lambda: self._build(body))

    def hush(self, body: Body) -> None:
        """It does not answer from now on."""
        if body.away:
            return
        due_s = self._world.clock_s + self._world.between(0.0, _POLL_S)
        self._due_s.setdefault(body.number, due_s)

    def unhush(self, body: Body) -> None:
        """It answers again, and says what it has kept to itself."""
        if not body.well:
            return
        self._due_s.pop(body.number, None)
        body.well_since_s = self._world.now_s
        if body.away:
            self._return(body)
        withheld, body.withheld = body.withheld, []
        for event, after_s in withheld:
            self._words.say(body, event, after_s)

    def heard(self) -> Heard:
        """Who has answered since the last call, and until when the next answers are due."""
        clock_s, chance = self._world.clock_s, self._world.chance
        answering = [n for n in self.seats if n not in self._due_s] if self._due_s else self.seats
        late_s = dict.fromkeys(answering, 0.0)
        if len(late_s) <= _FEW:
            lateness = chance.exponential(0.05, len(late_s)).tolist()
            late_s = dict(zip(late_s, lateness, strict=True))
        due_s = dict.fromkeys(self.seats, clock_s + _POLL_S)
        due_s.update(self._due_s)
        cut_s = self._cut() if self._due_s else {}
        reached = frozenset(self._reached()) if cut_s else frozenset[int]()
        return Heard(looked_s=clock_s, late_s=late_s, due_s=due_s, cut_s=cut_s, reached=reached)

    def _cut(self) -> dict[int, float]:
        """Whose machines are known to acknowledge nothing, and for how long."""
        now_s, least_s = self._world.now_s, self._world.between(*_CUT_S)
        least_s += _MEMBER_S * len(self.seats)
        quiet = [n for n in self._due_s if n in self.seats and not self._acknowledged(n)]
        self._cut_since_s = {n: self._cut_since_s.get(n, now_s) for n in quiet}
        silent_s = {n: now_s - since_s for n, since_s in self._cut_since_s.items()}
        return {n: seconds for n, seconds in silent_s.items() if seconds >= least_s}

    def _reached(self) -> list[int]:
        return [n for n in self.seats if n not in self._due_s or self._acknowledged(n)]

    def _acknowledged(self, number: int) -> bool:
        """Its process may be frozen; where it is dead, and its machine not, nobody is asked."""
        place = self.seats[number].place
        return place is None or self._machines.acknowledges(place)
