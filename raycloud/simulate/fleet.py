"""Members' processes and their messages: placed, built, ended; who answers, and what it says.

As Ray's calls to actors do it, a member's messages come in the order in which it sent them, and
once, since a call that failed is not made again; how those of several members interleave is left to
chance. What was on its way when a member died may still come; what comes later than that is lost.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Any

from raycloud.control.heartbeats import Heard
from raycloud.events import (
    Event,
    MemberLeaving,
    MemberLost,
    MemberReady,
    MemberReturned,
    MemberSpawned,
    StepsCommitted,
)
from raycloud.run.driver import ENDED

if TYPE_CHECKING:
    from raycloud.order import Position
    from raycloud.planner.speed import Speed
    from raycloud.simulate.machines import Machines, Notice
    from raycloud.simulate.scenario import Scenario
    from raycloud.simulate.world import World

_DRAWN = 256  # delays at once
_NEVER = float("inf")
_FEW = 8  # words that find their places among the others one by one


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """One simulated member."""

    number: int
    place: int | None = None  # None: it waits for one
    joins: bool = False  # others, that compute
    alive: bool = True
    built: bool = False  # it has model and data
    warned: bool = False  # it is going to be gone, and the driver may know
    away: bool = False  # the driver has left it out, and does not listen to it
    frozen: int = 0  # by so many faults: it does not compute, nor speak
    unheard: int = 0  # by so many faults: the driver cannot be reached
    # What it would say, and the seconds after which that would have come.
    withheld: list[tuple[Event, float]] = field(default_factory=list)
    begun: bool = False  # it has the state of the training
    step: int = 0  # that it is to commit next
    value: int = 0  # its parameters before that step
    told: int = 0  # one past the last step that it has told of
    generation: int = 0  # as which it computed last
    owes: int = 0  # micro-batches computed, and not told of,
    owes_s: float = 0.0  # and how long they took
    kept: tuple[int, ...] | range = ()  # micro-batches of its step
    outbox_s: float = 0.0  # its last word arrives then
    heard_until_s: float = float("inf")  # dead, and later words of it are lost
    well_since_s: float = 0.0

    @property
    def well(self) -> bool:
        """It can compute, be heard and be called."""
        return self.alive and not self.frozen and not self.unheard


# Millions of these are made. A frozen record sets each field by `object.__setattr__`, which takes
# most of the time; this one has the same fields, is not frozen, and then becomes one that is.
_Draft: Any = make_dataclass(
    "_Draft", [(f.name, f.type, f) for f in fields(StepsCommitted)], kw_only=True, slots=True
)

# Minus when it arrives, and minus its place in the order; whose. The next one sorts last.
_Word = tuple[float, int, SimulatedMember | None, Event]


class Messages:
    """Words on their way, each for at most `delay_s`."""

    def __init__(self, world: World, delay_s: float) -> None:
        self._world = world
        self._delay_s = delay_s
        self._new: list[_Word] = []
        self._due: list[_Word] = []  # sorted
        self._count = 0
        self._drawn_s: list[float] = []  # delays
        self.deaf_until_s = 0.0  # the driver takes nothing in before

    def __len__(self) -> int:
        """How many are on their way."""
        return len(self._due) + len(self._new)

    @property
    def next_s(self) -> float:
        """When the next one is taken in."""
        if self._new:
            self._sort()
        if not self._due:
            return _NEVER
        arrives_s = -self._due[-1][0]
        return arrives_s if arrives_s > self.deaf_until_s else self.deaf_until_s

    def say(self, body: SimulatedMember, event: Event, after_s: float = 0.0) -> None:
        """A member says something, once `after_s` have passed."""
        if not body.alive or body.away:
            return
        if body.frozen or body.unheard:
            body.withheld.append((event, after_s))
            return
        if not self._drawn_s:
            self._drawn_s = (self._world.chance.random(_DRAWN) * self._delay_s).tolist()
        arrives_s = self._world.now_s + after_s + self._drawn_s.pop()
        body.outbox_s = max(body.outbox_s, arrives_s)
        self._push(body.outbox_s, body, event)

    def tell(self, event: Event, at_s: float) -> None:
        """The driver finds out by itself."""
        self._push(at_s, None, event)

    def take(self) -> Event | None:
        """The next one; None: it is lost."""
        if self._new:
            self._sort()
        minus_s, _, body, event = self._due.pop()
        return event if body is None or -minus_s <= body.heard_until_s else None

    def hurry(self) -> None:
        """All that is on its way arrives now, in order."""
        now_s = self._world.now_s
        self._sort()
        self._due = [(max(s, -now_s), n, b, e) for n, (s, _, b, e) in enumerate(self._due)]

    def _push(self, arrives_s: float, body: SimulatedMember | None, event: Event) -> None:
        self._count += 1
        self._new.append((-arrives_s, -self._count, body, event))

    def _sort(self) -> None:
        """Many words are said at once: they are sorted once, and not each among all others."""
        if len(self._new) <= _FEW:
            for word in self._new:
                insort(self._due, word)
        else:
            self._due += self._new
            self._due.sort()
        self._new.clear()


def committed(body: SimulatedMember, last_step: int, at: Position, computed: int) -> StepsCommitted:
    """A member's word that it committed all steps from what it told last to before `last_step`.

    The sequence stands `at` then, and all members together computed so many micro-batches.
    """
    compute_s = body.owes_s
    word: StepsCommitted = _Draft(
        member=body.number,
        generation=body.generation,
        first_step=body.told,
        last_step=last_step,
        epoch=at.epoch,
        offset=at.offset,
        loss=1.0,
        weight=1.0,
        samples=body.owes,
        micro_batches=body.owes,
        computed=computed,
        grad_norm=1.0,
        learning_rate=1.0,
        wall_s=compute_s,
        compute_s=compute_s,
        data_s=0.0,
        exchange_s=0.0,
        cpu_s=compute_s,
        bytes_sent=0,
        bytes_dense=0,
    )
    word.__class__ = StepsCommitted
    return word


_POLL_S = 1.0  # as the real one asks
_LOOK_S = 0.5
_CUT_S = (0.22, 1.0)  # until a machine counts as cut off that acknowledges nothing, and
_MEMBER_S = 0.00125  # as much more for each member
_FEW_MEMBERS = 64  # members whose answers come late by chance
_ANEW_S = (0.05, 2.0)  # until a process that is back has ended what it did


class Fleet:
    """Members of one start of a run; who is away has been left out, and its process is kept."""

    def __init__(
        self, scenario: Scenario, world: World, machines: Machines, words: Messages, samples: int
    ) -> None:
        self._scenario, self._world, self.machines = scenario, world, machines
        self._words = words
        self.seats: dict[int, SimulatedMember] = {}  # dead ones too until the driver knows
        self.away: dict[int, SimulatedMember] = {}
        self.waiting: dict[int, SimulatedMember] = {}  # for a place
        self.building = 0
        self.samples = samples
        self.over = False  # nothing that was planned happens any more
        self._due_s: dict[int, float] = {}  # of those that do not answer
        self._cut_since_s: dict[int, float] = {}  # ... because their machines do not
        # Whoever knows more of a death replaces it.
        self.die: Callable[[SimulatedMember], None] = self.kill

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Let `act` happen so many seconds from now, unless this start is over by then."""
        self._world.after(seconds, lambda: None if self.over else act())

    def spawn(self, members: Sequence[int], *, joins: bool) -> None:
        """Start these members, those that join as soon as there is a place."""
        for number in members:
            self.waiting[number] = SimulatedMember(number=number, joins=joins)
        self.place()

    def place(self) -> None:
        """Start whoever has found a place meanwhile."""
        for number, body in list(self.waiting.items()):
            place = self.machines.seat()
            if place is None:
                return
            del self.waiting[number]
            self._start(body, place)

    def _start(self, body: SimulatedMember, place: int) -> None:
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

    def _build(self, body: SimulatedMember) -> None:
        if not body.alive:
            return
        self.building -= 1
        body.built = True
        node = self.machines.node_of(body.place or 0)
        # A probe of a few micro-batches is noisy.
        noise = self.machines.slow[node] * self._world.between(0.8, 1.3)
        speed = self.machines.speeds[node]
        ready = MemberReady(
            member=body.number,
            samples=self.samples,
            parameters=1,
            state_bytes=8,
            gradient_bytes=8,
            fixed_s=noise * speed.fixed_s,
            micro_batch_s=noise * speed.micro_batch_s,
            node=f"node-{node}",
        )
        self._words.say(body, ready)
        if node in self.machines.notices:
            self.warn(body, self.machines.notices[node], f"node-{node}")

    def warn(self, body: SimulatedMember, notice: Notice, node: str = "") -> None:
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
        return self.machines.within_reach

    def _miss(self, body: SimulatedMember) -> None:
        if body.alive:
            self.die(body)
            self.lose(body, "no memory", 0.5)

    def node_of(self, body: SimulatedMember) -> int:
        """Its machine."""
        return self.machines.node_of(body.place or 0)

    def seconds(self, body: SimulatedMember, micro_batches: float) -> float:
        """How long so many micro-batches of a step take it now."""
        return self.machines.seconds(self.node_of(body), micro_batches)

    def speed(self, body: SimulatedMember) -> Speed:
        """The same for any number of them."""
        node = self.node_of(body)
        one, slow = self.machines.speeds[node], self.machines.slow[node]
        return replace(one, fixed_s=slow * one.fixed_s, micro_batch_s=slow * one.micro_batch_s)

    def on_node(self, node: int) -> list[SimulatedMember]:
        """Living members that are on a node."""
        return [
            body
            for body in (*self.seats.values(), *self.away.values())
            if body.alive and body.place is not None and self.machines.node_of(body.place) == node
        ]

    @property
    def alive(self) -> list[SimulatedMember]:
        """Members whose processes live."""
        return [body for body in self.seats.values() if body.alive]

    def kill(self, body: SimulatedMember) -> None:
        """Its process ends."""
        if not body.alive:
            return
        if not body.built:
            self.building -= 1
        self.hush(body)
        body.alive = False
        body.heard_until_s = self._world.now_s + self._world.between(0.0, self._scenario.delay_s)
        if body.place is not None:
            self.machines.leave(body.place)
        self.later(_LOOK_S, self.place)

    def lose(self, body: SimulatedMember, reason: str, after_s: float) -> None:
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

    def _return(self, body: SimulatedMember) -> None:
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
        body.owes_s = 0.0
        body.kept, body.withheld, body.built = (), [], False
        self.seats[member] = body
        self.building += 1
        if not body.well:
            self.hush(body)
        self._words.tell(MemberSpawned(member=member), self._world.now_s)
        self.later(self._world.between(*_ANEW_S), lambda: self._build(body))

    def hush(self, body: SimulatedMember) -> None:
        """It does not answer from now on."""
        if body.away:
            return
        due_s = self._world.clock_s + self._world.between(0.0, _POLL_S)
        self._due_s.setdefault(body.number, due_s)

    def unhush(self, body: SimulatedMember) -> None:
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
        late_s = dict.fromkeys((n for n in self.seats if n not in self._due_s), 0.0)
        if len(late_s) <= _FEW_MEMBERS:
            lateness = chance.exponential(0.05, len(late_s)).tolist()
            late_s = dict(zip(late_s, lateness, strict=True))
        due_s = dict.fromkeys(self.seats, clock_s + _POLL_S)
        due_s.update(self._due_s)
        cut_s = self._cut() if self._due_s else {}
        seats = self.seats if cut_s else ()
        reached = frozenset(n for n in seats if n not in self._due_s or self._acknowledged(n))
        return Heard(looked_s=clock_s, late_s=late_s, due_s=due_s, cut_s=cut_s, reached=reached)

    def _cut(self) -> dict[int, float]:
        """Whose machines are known to acknowledge nothing, and for how long."""
        now_s, least_s = self._world.now_s, self._world.between(*_CUT_S)
        least_s += _MEMBER_S * len(self.seats)
        quiet = [n for n in self._due_s if n in self.seats and not self._acknowledged(n)]
        self._cut_since_s = {n: self._cut_since_s.get(n, now_s) for n in quiet}
        silent_s = {n: now_s - since_s for n, since_s in self._cut_since_s.items()}
        return {n: seconds for n, seconds in silent_s.items() if seconds >= least_s}

    def _acknowledged(self, number: int) -> bool:
        """Its process may be frozen; where it is dead, and its machine not, nobody is asked."""
        place = self.seats[number].place
        return place is None or self.machines.acknowledges(place)
