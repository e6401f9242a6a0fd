"""The driver of one start: words up to control, commands down, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, assert_never

from raycloud.commands import (
    Command,
    Finish,
    Form,
    LeaveOut,
    Meet,
    Notice,
    Prepare,
    Publish,
    Readmit,
    Record,
    Release,
    Reshare,
    Restore,
    Spawn,
    TellRecovery,
)
from raycloud.control import Control, ControlSettings, Phase
from raycloud.events import (
    ChangeApplied,
    CheckpointPublished,
    Event,
    GenerationFormed,
    MemberLeaving,
    MemberLost,
    Noticed,
    Recovered,
    RolledBack,
    StepsCommitted,
)
from raycloud.order import ledger_line
from raycloud.simulate.fleet import ENDED
from raycloud.simulate.stopwatch import Stopwatch
from raycloud.simulate.story import Kept
from raycloud.simulate.telling import few, numbers, short

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.simulate.computing import Computing
    from raycloud.simulate.ending import Ending
    from raycloud.simulate.fleet import Fleet
    from raycloud.simulate.story import Story
    from raycloud.simulate.words import Words
    from raycloud.simulate.world import World

_WELL_S = 10.0  # who was well for so long is well
_IDLE_S = 400.0  # who is ready and takes no part for so long is forgotten
_FEW = 64  # members, up to which that is looked at
_WAITS_S = 1_500.0  # so long a run may wait for members although machines hold enough
_PUBLISH_S = 0.2


class Driver:
    """Joins control and the fleet of one start.

    Args:
        settings: Of control.
        ending: What befalls members.
        computing: What they do together.
        story: What is known of the run; this start is added.
        clock: To measure decisions with.
    """

    def __init__(
        self,
        settings: ControlSettings,
        ending: Ending,
        computing: Computing,
        story: Story,
        clock: Clock,
    ) -> None:
        """Nothing happens before `start`."""
        self.settings = settings
        self.control = Control(settings)
        self.finish: Finish | None = None
        self._ending, self._computing, self._story = ending, computing, story
        self._watch = Stopwatch(clock)
        self._world: World = computing.world
        self._fleet: Fleet = computing.fleet
        self._words: Words = computing.words
        self._log = computing.world.log
        self._committed = settings.step
        self._spawned: set[int] = set()
        self._group: tuple[int, ...] = ()
        self._newest = settings.first_generation - 1
        self._published = settings.step
        self._idle_s: dict[int, float] = {}
        self._waits_s: float | None = None  # since when, although machines hold enough
        self._noticed = False  # some member is to leave, or was
        self._loud = settings.max_workers <= _FEW

    def start(self) -> None:
        """Ask for the members."""
        commands = self.control.start(self._world.clock_s)
        self._carry_out(commands)

    def take(self, event: Event) -> None:
        """A word has come."""
        if self.finish is not None:
            return
        if isinstance(event, MemberLost):
            known = event.member in self._fleet.seats or event.member in self._fleet.away
            if not known and event.reason != ENDED:
                return  # the driver has ended it itself
            self._fleet.drop(event.member)
        elif isinstance(event, GenerationFormed):
            self._check_formed(event)
        elif isinstance(event, MemberLeaving):
            self._noticed = True
        self._feed(event)

    def turn(self) -> None:
        """Who answers, who is overdue, and what time brings."""
        if self.finish is not None:
            return
        heard = self._fleet.heard()
        now_s = self._world.clock_s
        self._watch.begin()
        self.control.hear(heard)
        lost = self.control.overdue(now_s)
        self._measure("overdue")
        while lost is not None and self.finish is None:
            self._note_lost(lost)
            self._feed(lost)
            self._watch.begin()
            lost = self.control.overdue(now_s)
            self._measure("overdue")
        if self.finish is None:
            self._watch.begin()
            commands = self.control.tick(now_s)
            self._measure("tick")
            self._log.count(self._world.now_s)
            self._carry_out(commands)
        if self._loud:
            self._check_idle()
            self._check_waiting()

    def _feed(self, event: Event) -> None:
        world = self._world
        if not self._loud and isinstance(event, (StepsCommitted, ChangeApplied)):
            self._log.count(world.now_s, *numbers(event))
        else:
            self._log.add(f"{world.now_s:.6f} < {short(event)}")
        self._watch.begin()
        commands = self.control.on(event, world.clock_s)
        self._measure(type(event).__name__)
        if commands:
            self._carry_out(commands)

    def _measure(self, kind: str) -> None:
        took_s, story = self._watch.took_s(), self._story
        story.took_s.append(took_s)
        if took_s > story.worst_s:
            story.worst_s = took_s
            story.worst = f"{kind} in {self.control.phase}"

    # ---- commands

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._log.add(f"{self._world.now_s:.6f} > {short(command)}")
            if self.finish is not None:
                self._wrong(f"a command came after the last one: {short(command)}")
            match command:
                case Spawn(members=members, joins=joins):
                    self._spawn(members, joins=joins)
                case Restore():
                    self._restore()
                case Form():
                    self._form(command)
                case Prepare():
                    self._prepare(command)
                case Publish():
                    self._publish(command)
                case Record(records=records):
                    self._story.lines += [ledger_line(record) for record in records]
                    self._check_progress()
                case Notice() | TellRecovery() | Release() | LeaveOut() | Readmit():
                    self._obey(command)
                case Finish():
                    self._end(command)
                case _:
                    assert_never(command)

    def _tell(self, event: Event) -> None:
        self._words.tell(event, self._world.now_s)

    def _end(self, command: Finish) -> None:
        self.finish = command
        if " times in step " in (command.error or ""):
            self._wrong(f"it gave up, though no step ends members: {command.error}")

    def _spawn(self, members: tuple[int, ...], *, joins: bool) -> None:
        if self._spawned & set(members) or min(members) < self._story.spawned:
            self._wrong(f"members {few(members)} are asked for twice")
        self._spawned |= set(members)
        self._story.spawned = max(members) + 1
        self._fleet.spawn(members, joins=joins)

    def _restore(self) -> None:
        kept = self._story.kept
        self._computing.go_back(kept)
        self._committed = self._computing.origin.step
        self._tell(RolledBack(step=self._committed, ledger={} if kept is None else kept.ledger))

    def _obey(self, command: Notice | TellRecovery | Release | LeaveOut | Readmit) -> None:
        match command:
            case Notice():
                self._tell(Noticed(**asdict(command)))
            case TellRecovery():
                self._story.recoveries += 1
                self._tell(Recovered(**asdict(command)))
            case Release(members=members):
                self._spawned -= set(members)
                self._ending.release(members)
            case LeaveOut(member=member):
                self._ending.leave_out(member)
            case Readmit(member=member, process=process):
                self._readmit(member, process)
            case _:
                assert_never(command)

    def _readmit(self, member: int, process: int) -> None:
        if member < self._story.spawned:
            self._wrong(f"member {member} is there already")
        self._spawned.add(member)
        self._story.spawned, self._story.returned = member + 1, self._story.returned + 1
        self._fleet.readmit(member, process)

    def _form(self, command: Form) -> None:
        self._story.generations += 1
        self._story.generation = command.generation
        self._check_group("Form", command.generation, command.members, command.shares)
        self._group = command.members
        self._meet(command.members)
        self._computing.meetings.form(command)

    def _meet(self, members: tuple[int, ...]) -> None:
        """Who had done its part may have ended since, and nobody missed it."""
        for number in members:
            if number not in self._fleet.seats:
                self._tell(MemberLost(member=number, reason=ENDED))

    def _prepare(self, command: Prepare) -> None:
        change = command.change
        if command.members != self.control.group:
            self._wrong(f"change {command.number} is sent to others than those that compute")
        if isinstance(change, Reshare | Meet):
            members = change.members if isinstance(change, Meet) else command.members
            self._story.generations += 1
            self._story.generation = change.generation
            self._check_group("Prepare", change.generation, members, change.shares)
        if isinstance(change, Meet):
            self._meet(change.members)
        self._computing.changes.prepare(command)

    def _publish(self, command: Publish) -> None:
        step = command.step
        values = {part["value"] for part in command.parts.values()}
        if len(values) != 1 or step <= self._published:
            self._wrong(f"the checkpoint of step {step} has {len(values)} different states")
        self._published = step
        kept = self._story.kept = Kept(
            step=step,
            position=self.control.position_at(step),
            ledger=self.control.ledger_at(step),
            value=min(values),
            useful_s=self._computing.useful_s,
            generation=self._story.generation,
        )
        self._story.values[step] = kept.value
        published = CheckpointPublished(step=step, path="", state_bytes=8, write_s=_PUBLISH_S)
        self._tell(published)

    # ---- promises

    def _wrong(self, what: str) -> None:
        self._story.wrong.append(what)

    def _check_group(
        self, kind: str, generation: int, members: tuple[int, ...], shares: tuple[int, ...]
    ) -> None:
        settings = self.settings
        if generation <= self._newest:
            self._wrong(f"{kind} of generation {generation} after {self._newest}")
        self._newest = generation
        if sum(shares) != settings.micro_batches or min(shares) < 0:
            self._wrong(f"{kind} of generation {generation}: no shares of a step: {few(shares)}")
        if len(shares) != len(members) or not set(members) <= self._spawned:
            self._wrong(f"{kind} of generation {generation} without its members: {few(members)}")
        # The first ones are those that are there: who is too many leaves at once. Who is to leave
        # stays until another has its state.
        most = self.control.workers[1] + self._noticed
        if self._group and len(members) > most:
            self._wrong(f"{kind} of generation {generation} has {len(members)} members")

    def _check_progress(self) -> None:
        now = self.control.committed_step
        if now < self._committed:
            self._wrong(f"step {self._committed} counted, and then only {now}")
        if now > self._computing.reached:
            self._wrong(f"step {now} counts, and members have {self._computing.reached}")
        self._committed = now

    def _check_formed(self, event: GenerationFormed) -> None:
        if event.generation >= self._newest and event.first_step < self._committed:
            what = f"generation {event.generation} begins at step {event.first_step}"
            self._wrong(f"{what}, though {self._committed} steps count")

    def _note_lost(self, lost: MemberLost) -> None:
        body = self._fleet.seats.get(lost.member)
        if body is None or not body.well or not body.built:
            return
        if self._world.now_s - body.well_since_s > _WELL_S:
            self._story.mistaken += 1

    def _check_idle(self) -> None:
        """Whoever is there takes part before long, or is let go."""
        now_s, control = self._world.now_s, self.control
        group = set(control.group)
        for number, body in (*self._fleet.seats.items(), *self._fleet.away.items()):
            due = body.built and body.well and control.phase is Phase.TRAINING
            if not due or number in group:
                self._idle_s.pop(number, None)
            elif now_s - self._idle_s.setdefault(number, now_s) > _IDLE_S:
                self._idle_s[number] = float("inf")
                self._wrong(f"member {number} is ready and takes no part for {_IDLE_S:g} s")

    def _check_waiting(self) -> None:
        """Where machines hold enough members, the run does not wait for ever."""
        control, now_s = self.control, self._world.now_s
        enough = self._fleet.room >= control.workers[0]
        if control.phase not in {Phase.WAITING, Phase.RESTORING} or not enough:
            self._waits_s = None
        elif self._waits_s is None:
            self._waits_s = now_s
        elif now_s - self._waits_s > _WAITS_S:
            self._waits_s = float("inf")
            self._wrong(f"it waits for members for {_WAITS_S:g} s, and machines hold enough")
