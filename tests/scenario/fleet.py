"""Members' processes as the driver of a scenario sees them: placed, heard, ended."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.checkpoint.naming import blamed
from raycloud.checkpoint.store import LocalStore
from raycloud.control.heartbeats import Behind, Heard
from raycloud.events import Event, MemberLost, MemberReturned, MemberSpawned
from raycloud.recovery.rendezvous import Host
from raycloud.run.driver import ENDED
from raycloud.step.straggler import Straggling
from raycloud.worker.member import Member
from tests.scenario.stage import MemberClock, Process, here
from tests.scenario.threads import Turns

if TYPE_CHECKING:
    from raycloud.data.provider import Provider
    from raycloud.worker.context import MemberConfig
    from tests.scenario.stage import Stage
    from tests.scenario.wires import Wires

_DELAY_S = 0.4  # a word is at most so long on its way
_POLL_S = 1.0
_PLACED_S = 0.5
_DIES_S = (0.05, 2.0)
_CUT_S = (0.22, 1.0)  # until a machine counts as cut off
_GHOST_S = (0.2, 6.0)  # from a lost member's thaw to its end
_WRITES_S = (0.01, 0.1)


class Seat(Process):
    """One member's process.

    Attributes:
        member: The real one, once there is a place.
        micro_batch_s: How long a micro-batch takes it.
        last_words_s: Dead, and what it has said may still be heard until then.
        well_since_s: Since when nothing keeps it from the driver.
        given_up: The driver does not want it any more, and could not end it.
        checked: The newest step at whose beginning its state was looked at.
    """

    member: _Heard

    def __init__(self, fleet: Fleet, config: MemberConfig, node: int) -> None:
        super().__init__(fleet.stage, config.member, node)
        self.fleet, self.config, self.micro_batch_s = fleet, config, fleet.speeds[node]
        self.calls: list[Callable[[Member], None]] = []
        self.due_s = self.called_s = self.last_words_s = self.well_since_s = 0.0
        self.on_its_way = self.given_up = False
        self.checked = -1

    @property
    def answers(self) -> bool:
        """The driver's calls reach it."""
        return self.alive and not (self.frozen or self.unheard)

    def counts_as(self, number: int) -> bool:
        """Whether what it computes as this member is anybody's."""
        there = self.fleet.seats.get(number) is self and self.member.number == number
        return self.alive and not self.given_up and (there or self.fleet.over)

    @property
    def step(self) -> int:
        """The step that it computes; -1 before the first."""
        step = self.member.step if hasattr(self, "member") else None
        return -1 if step is None else step


class _Heard(Member):
    """A member whose words are fetched as soon as there are any."""

    def __init__(self, seat: Seat, before: Member | None = None) -> None:
        self._seat, self.number = seat, seat.number
        super().__init__(seat.config, seat.fleet.host(seat), seat.fleet.provider, before=before)

    def _report(self, event: Event) -> None:
        super()._report(event)
        if self._seat.member is self:
            self._seat.fleet.said(self._seat)


class Disk(LocalStore):
    """The checkpoints' place: slow enough that a writer may die, and full now and then."""

    def __init__(self, stage: Stage, path: str | Path) -> None:
        super().__init__(Path(path))
        self._stage = stage

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        super().write(name, self._slowly(name, chunks))

    def _slowly(
        self, name: str, chunks: Iterable[bytes | memoryview]
    ) -> Iterator[bytes | memoryview]:
        for chunk in chunks:
            if here() is not None:
                self._stage.wait(self._stage.world.between(*_WRITES_S), "save")
            if self._stage.disk_full:
                why = OSError(errno.ENOSPC, "No space left on device")
                raise blamed("write", name, why)
            yield chunk


class Fleet:
    """The members of one start, and the machines that they run on.

    Args:
        stage: Where their threads take turns.
        wires: How they meet.
        speeds: Seconds per micro-batch, by node.
        up: Which nodes are there, each with a place for one; whoever changes it calls `place`.

    Attributes:
        seats: Members that the driver holds, dead ones too until it knows.
        away: Those that it has left out, and whose processes it keeps.
        tell: Takes what the driver learns of them.
        provider: Prepares the data of a task that returns a `Source`; None: there is none.
    """

    def __init__(self, stage: Stage, wires: Wires, speeds: list[float], up: list[bool]) -> None:
        self.stage, self._world, self.wires, self.speeds = stage, stage.world, wires, speeds
        self.up, self._turns = up, Turns(stage)
        self.tell: Callable[[Event], None] = lambda event: None
        self.seats: dict[int, Seat] = {}
        self.away: dict[int, Seat] = {}
        self.all: list[Seat] = []  # that ever were
        self._waiting: list[MemberConfig] = []
        self._cut_since_s: dict[int, float] = {}  # machines that acknowledge nothing
        self.over = False
        self.provider: Provider | None = None

    def host(self, seat: Seat) -> Host:
        """Where a member lives."""
        return Host(
            clock=MemberClock(seat),
            threads=self._turns,
            sockets=self.wires.streams,
            open_store=partial(Disk, self.stage),
            meet=self.wires.meet,
            leave=lambda transports: None,
        )

    @property
    def room(self) -> int:
        """How many members the machines hold."""
        return sum(self.up)

    @property
    def alive(self) -> list[Seat]:
        """Those whose processes live and are wanted."""
        return [seat for seat in self.seats.values() if seat.alive]

    def zone(self, member: int) -> str:
        """The zone of a member's machine: there are two."""
        seat = self.seats.get(member)
        return "" if seat is None else f"zone-{seat.node % 2}"

    def spawn(self, configs: Sequence[MemberConfig]) -> None:
        """Start these members as soon as there are places."""
        self._waiting += configs
        self.place()

    def place(self) -> None:
        """Start whoever has found a place."""
        taken = {seat.node for seat in self.all if seat.alive}
        free = [node for node, up in enumerate(self.up) if up and node not in taken]
        for node in free[: len(self._waiting)] if not self.over else ():
            self._start(self._waiting.pop(0), node)

    def _start(self, config: MemberConfig, node: int) -> None:
        named = replace(config, node=f"node-{node}", address="127.0.0.1")
        seat = Seat(self, named, node)
        self.seats[seat.number] = seat
        self.all.append(seat)
        seat.due_s = self._world.clock_s + _POLL_S
        with self.stage.on_behalf_of(seat):
            seat.member = _Heard(seat)
        self._later(self._world.between(0.0, _PLACED_S), MemberSpawned(member=seat.number))

    def _later(self, seconds: float, event: Event) -> None:
        self._world.after(seconds, lambda: None if self.over else self.tell(event))

    # ---- words

    def call(self, member: int, act: Callable[[Member], None]) -> None:
        """Tell a member something: in order for each, and later where it cannot be reached."""
        seat = self.seats.get(member)
        if seat is not None:
            at_s = self._world.between(0.001, 0.1)
            seat.called_s = max(seat.called_s, self._world.now_s + at_s)
            self._world.at(seat.called_s, partial(self._called, seat, act))

    def _called(self, seat: Seat, act: Callable[[Member], None]) -> None:
        if seat.answers and not seat.calls:
            with self.stage.on_behalf_of(seat):
                act(seat.member)
        elif seat.alive:
            seat.calls.append(act)

    def said(self, seat: Seat) -> None:
        if not seat.on_its_way:
            seat.on_its_way = True
            self._world.after(self._world.between(0.0, _DELAY_S), partial(self._fetch, seat))

    def _fetch(self, seat: Seat) -> None:
        seat.on_its_way = False
        heard = seat.answers or (not seat.alive and self._world.now_s <= seat.last_words_s)
        if heard and self.seats.get(seat.number) is seat and seat.member.number == seat.number:
            for event in seat.member.poll(0.0):
                self.tell(event)

    def reached(self, seat: Seat) -> None:
        """The driver may reach a member again: what was said meanwhile is heard."""
        if not seat.answers:
            return
        seat.due_s, seat.well_since_s = self._world.clock_s + _POLL_S, self._world.now_s
        calls, seat.calls = seat.calls, []
        for act in calls:
            with self.stage.on_behalf_of(seat):
                act(seat.member)
        self.said(seat)
        self._return(seat)
        if seat.given_up:
            self._world.after(self._world.between(*_GHOST_S), partial(self.kill, seat))

    def heard(self) -> Heard:
        """Who has answered since this was last asked, and until when the next answers are due."""
        now_s, late_s, behind = self._world.clock_s, dict[int, float](), dict[int, Behind]()
        for number, seat in self.seats.items():
            if seat.answers and now_s >= seat.due_s:
                late_s[number] = float(self._world.chance.exponential(0.03))
                seat.due_s = now_s + _POLL_S
                for one in seat.member.stalls():
                    if isinstance(one, Straggling):
                        behind[number] = Behind(**asdict(one))
        due_s = {number: seat.due_s for number, seat in self.seats.items()}
        quiet = [n for n, seat in self.seats.items() if seat.unheard or self._is_gone(seat)]
        self._cut_since_s = {n: self._cut_since_s.get(n, self._world.now_s) for n in quiet}
        silent_s = {n: self._world.now_s - s for n, s in self._cut_since_s.items()}
        least_s = self._world.between(*_CUT_S) if quiet else 0.0
        return Heard(
            looked_s=now_s,
            late_s=late_s,
            due_s=due_s,
            behind=behind,
            cut_s={n: seconds for n, seconds in silent_s.items() if seconds >= least_s},
            reached=frozenset(self.seats.keys() - self._cut_since_s.keys()),
        )

    def _is_gone(self, seat: Seat) -> bool:
        """Its machine is; one that is only going to be still acknowledges."""
        return not (seat.alive or self.up[seat.node])

    def leave_out(self, member: int) -> None:
        """The driver listens to it no more, and waits for its process to answer again."""
        seat = self.seats.pop(member, None)
        if seat is not None:
            self.away[member] = seat
            self._return(seat)

    def _return(self, seat: Seat) -> None:
        """The driver finds that it answers, if it has left it out."""
        number = seat.number

        def look() -> None:
            if self.away.get(number) is seat and seat.answers and not self.over:
                self.tell(MemberReturned(member=number, late_s=self._world.clock_s - seat.due_s))

        self._world.after(self._world.between(0.0, _POLL_S), look)

    def readmit(self, member: int, process: int) -> None:
        """A process that has returned goes on as another member, as soon as it hears of that."""
        seat = self.away.pop(process, None)
        if seat is None or not seat.alive:
            self._later(0.0, MemberLost(member=member, reason=ENDED))
            return
        seat.number = member
        seat.config = replace(seat.config, member=member, joins=True)
        seat.checked = -1
        self.seats[member] = seat
        seat.due_s = self._world.clock_s + _POLL_S
        self._later(0.0, MemberSpawned(member=member))
        self.call(member, partial(self._go_on, seat))

    def _go_on(self, seat: Seat, before: Member) -> None:
        seat.member = _Heard(seat, before)

    # ---- ends

    def kill(self, seat: Seat) -> None:
        """Its process ends, and with it its connections."""
        if seat.alive:
            seat.alive = False
            heard_s = self._world.between(0.0, _DELAY_S) if self._world.likely(0.5) else 0.0
            seat.last_words_s = self._world.now_s + heard_s
            self.wires.gone(seat)
            self._world.after(_PLACED_S, self.place)

    def die(self, seat: Seat, why: str) -> None:
        """The same, and the driver finds out."""
        if seat.alive:
            self.kill(seat)
            self._later(self._world.between(*_DIES_S), MemberLost(member=seat.number, reason=why))

    def drop(self, members: Iterable[int]) -> None:
        """The driver ends these, as far as it reaches them."""
        wanted = set(members)
        self._waiting = [config for config in self._waiting if config.member not in wanted]
        for seat in [
            held.pop(number) for held in (self.seats, self.away) for number in wanted & set(held)
        ]:
            if seat.answers or self._world.likely(0.5):
                self.kill(seat)
            else:  # it goes on by itself, and will not be listened to
                seat.given_up = True
        self.place()

    def close(self) -> None:
        """Every process ends that can be reached."""
        self.over = True
        self.drop([*self.seats, *self.away])
