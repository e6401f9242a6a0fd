"""One start of a run in virtual time: its `Cluster` and `Records`, and control, watched.

What control decides is logged, timed, and held to its promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.commands import Finish, Meet, Reshare
from raycloud.control import Control, ControlSettings, Phase
from raycloud.events import (
    ChangeApplied,
    CheckpointPublished,
    DataGrew,
    GenerationFormed,
    MemberLeaving,
    MemberLost,
    Recovered,
    RolledBack,
    StepsCommitted,
)
from raycloud.order import ledger_line
from raycloud.run.driver import ENDED, Driver
from raycloud.simulate.computing import Computing
from raycloud.simulate.fleet import Fleet, Messages
from raycloud.simulate.generations import Ending, Meetings
from raycloud.simulate.history import Kept
from raycloud.simulate.world import few, numbers, short
from raycloud.spec.sizes import report_s

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.commands import Command, Form, Prepare, Publish, Spawn
    from raycloud.control.heartbeats import Heard
    from raycloud.events import Event
    from raycloud.simulate.history import History
    from raycloud.simulate.machines import Machines
    from raycloud.simulate.scenario import Scenario
    from raycloud.simulate.world import World

_WELL_S = 10.0  # who was well for so long is well
_SHORT_S = 0.001
_OLD_S = 0.0005


class Stopwatch:
    """Measures one thing after the other.

    To ask for processor seconds takes as long as a short decision. So what takes less than a
    millisecond is told by the clock, which never says less; of what takes longer the processor
    seconds are told, others being busy here, too: at most 0.5 ms too many.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._asked_s = float("-inf")  # when processor seconds were asked for,
        self._cpu_s = 0.0  # and what they were

    def begin(self) -> None:
        """From now on."""
        self._began_s = now_s = self._clock.monotonic_s()
        if now_s - self._asked_s > _OLD_S:
            self._asked_s, self._cpu_s = now_s, self._clock.cpu_s()

    def took_s(self) -> float:
        """How long it took since `begin`."""
        took_s = self._clock.monotonic_s() - self._began_s
        if took_s < _SHORT_S:
            return took_s
        self._asked_s = float("-inf")
        return min(took_s, self._clock.cpu_s() - self._cpu_s)


class WatchedControl(Control):
    """The real one: what it decides is logged, timed, and held to its promises."""

    def __init__(
        self, settings: ControlSettings, world: World, fleet: Fleet, story: History, clock: Clock
    ) -> None:
        super().__init__(settings)
        self._world, self._fleet, self._story = world, fleet, story
        self._watch = Stopwatch(clock)
        self._ended = False

    def start(self, now_s: float, capacity: int | None = None) -> tuple[Command, ...]:
        """See `Control.start`."""
        return self._log(super().start(now_s, capacity))

    def on(self, event: Event, now_s: float) -> tuple[Command, ...]:
        """See `Control.on`."""
        self._watch.begin()
        commands = super().on(event, now_s)
        self._measure(type(event).__name__)
        return self._log(commands) if commands else commands

    def tick(self, now_s: float) -> tuple[Command, ...]:
        """See `Control.tick`."""
        self._watch.begin()
        commands = super().tick(now_s)
        self._measure("tick")
        self._world.log.count(self._world.now_s)
        return self._log(commands)

    def overdue(self, now_s: float) -> MemberLost | None:
        """See `Control.overdue`; one that is well is mistaken for lost."""
        self._watch.begin()
        lost = super().overdue(now_s)
        self._measure("overdue")
        body = None if lost is None else self._fleet.seats.get(lost.member)
        if body is not None and body.well and body.built:
            self._story.mistaken += self._world.now_s - body.well_since_s > _WELL_S
        return lost

    def _log(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        for command in commands:
            self._world.log.add(f"{self._world.now_s:.6f} > {short(command)}")
            if self._ended:
                self._story.wrong.append(f"a command came after the last one: {short(command)}")
            if isinstance(command, Finish):
                self._ended = True
                if " times in step " in (command.error or ""):
                    what = f"it gave up, though no step ends members: {command.error}"
                    self._story.wrong.append(what)
        return commands

    def _measure(self, kind: str) -> None:
        took_s, story = self._watch.took_s(), self._story
        story.took_s.append(took_s)
        if took_s > story.worst_s:
            story.worst_s = took_s
            story.worst = f"{kind} in {self.phase}"


_IDLE_S = 400.0  # who is ready and takes no part for so long is forgotten
_FEW = 64  # members, up to which that is looked at
_WAITS_S = 1_500.0  # so long a run may wait for members although machines hold enough
_PUBLISH_S = 0.2


class VirtualCluster:
    """The members of one start, and what it keeps; what control asks for is checked."""

    busy = False

    def __init__(
        self, control: Control, ending: Ending, computing: Computing, story: History
    ) -> None:
        self._control, self._ending = control, ending
        self._computing, self._story = computing, story
        self._meetings = Meetings(computing)
        self._world, self._fleet = computing.world, computing.fleet
        self._words, self._log = computing.words, computing.world.log
        self._committed = self._published = computing.origin.step
        self._spawned: set[int] = set()
        self._group: tuple[int, ...] = ()
        self._newest = story.next_generation - 1
        self._idle_s: dict[int, float] = {}
        self._waits_s: float | None = None  # since when, although machines hold enough
        self._noticed = False  # some member is to leave, or was
        self._loud = computing.scenario.members <= _FEW

    def sees(self, event: Event) -> bool:
        """A word has come; whether the driver hears it: not of a member that it has ended."""
        match event:
            case MemberLost(member=member, reason=reason):
                known = member in self._fleet.seats or member in self._fleet.away
                if not known and reason != ENDED:
                    return False
                self._fleet.drop(member)
            case GenerationFormed():
                self._check_formed(event)
            case MemberLeaving():
                self._noticed = True
            case _:
                pass
        return True

    # ---- members

    def spawn(self, command: Spawn) -> None:
        """See `Cluster.spawn`."""
        members = command.members
        if self._spawned & set(members) or min(members) < self._story.spawned:
            self._wrong(f"members {few(members)} are asked for twice")
        self._spawned |= set(members)
        self._story.spawned = max(members) + 1
        self._fleet.spawn(members, joins=command.joins)

    def form(self, command: Form) -> None:
        """See `Cluster.form`."""
        self._count_generation(command.generation)
        self._check_group("Form", command.generation, command.members, command.shares)
        self._group = command.members
        self._meetings.form(command)

    def prepare(self, command: Prepare) -> None:
        """See `Cluster.prepare`."""
        change = command.change
        if command.members != self._control.group:
            self._wrong(f"change {command.number} is sent to others than those that compute")
        if isinstance(change, Reshare | Meet):
            members = change.members if isinstance(change, Meet) else command.members
            self._count_generation(change.generation)
            self._check_group("Prepare", change.generation, members, change.shares)
        self._computing.changes.prepare(command)

    def release(self, members: Sequence[int]) -> None:
        """See `Cluster.release`."""
        self._spawned -= set(members)
        self._ending.release(members)

    def leave_out(self, member: int) -> None:
        """See `Cluster.leave_out`."""
        self._ending.leave_out(member)

    def readmit(self, member: int, process: int) -> None:
        """See `Cluster.readmit`."""
        if member < self._story.spawned:
            self._wrong(f"member {member} is there already")
        self._spawned.add(member)
        self._story.spawned, self._story.returned = member + 1, self._story.returned + 1
        self._fleet.readmit(member, process)

    def holds(self, member: int) -> bool:
        """See `Cluster.holds`."""
        return member in self._fleet.seats

    def hear(self, timeout_s: float) -> tuple[Event, ...]:  # noqa: ARG002 - nothing is waited for
        """Words come by themselves, each in its time."""
        return ()

    def poll(self) -> Heard:
        """See `Cluster.poll`."""
        if self._loud:
            self._check_idle()
            self._check_waiting()
        return self._fleet.heard()

    # ---- records

    def results(self) -> tuple[Event, ...]:
        """They come as words."""
        return ()

    def log(self, event: Event, word: tuple[int, int] | None) -> None:  # noqa: ARG002 - none has one
        """See `Records.log`."""
        self._story.recoveries += isinstance(event, Recovered)
        now_s = self._world.now_s
        if not self._loud and isinstance(event, StepsCommitted | ChangeApplied):
            self._log.count(now_s, *numbers(event))
        else:
            self._log.add(f"{now_s:.6f} < {short(event)}")

    def add_to_ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Records.add_to_ledger`."""
        self._story.lines += [ledger_line(record) for record in records]
        self._check_progress()

    def publish(self, command: Publish, *, samples: int, ledger: Mapping[str, Any]) -> None:  # noqa: ARG002 - the manifest's
        """See `Records.publish`; that takes a little while."""
        step = command.step
        values = {part["value"] for part in command.parts.values()}
        if len(values) != 1 or step <= self._published:
            self._wrong(f"the checkpoint of step {step} has {len(values)} different states")
        self._published = step
        now_s = self._computing.so_far_s(self._computing.group)
        useful_s, busy_s = self._computing.saved_s.get(step, now_s)
        kept = self._story.kept = Kept(
            step=step,
            position=self._control.position_at(step),
            ledger=dict(ledger),
            value=min(values),
            useful_s=useful_s,
            busy_s=busy_s,
            generation=self._story.generation,
        )
        self._story.values[step] = kept.value
        self._tell(CheckpointPublished(step=step, path="", state_bytes=8, write_s=_PUBLISH_S))

    def find_back(self, published: int | None, newest: int | None) -> None:  # noqa: ARG002 - one is kept
        """See `Records.find_back`."""
        kept = self._story.kept
        self._computing.go_back(kept)
        self._committed = self._computing.origin.step
        self._tell(RolledBack(step=self._committed, ledger={} if kept is None else kept.ledger))

    def _tell(self, event: Event) -> None:
        self._words.tell(event, self._world.now_s)

    # ---- promises

    def _wrong(self, what: str) -> None:
        self._story.wrong.append(what)

    def _count_generation(self, generation: int) -> None:
        self._story.generations += 1
        self._story.generation = generation

    def _check_group(
        self, kind: str, generation: int, members: tuple[int, ...], shares: tuple[float, ...]
    ) -> None:
        if generation <= self._newest:
            self._wrong(f"{kind} of generation {generation} after {self._newest}")
        self._newest = generation
        if sum(shares) != self._computing.scenario.micro_batches or min(shares) < 0:
            self._wrong(f"{kind} of generation {generation}: no shares of a step: {few(shares)}")
        if len(shares) != len(members) or not set(members) <= self._spawned:
            self._wrong(f"{kind} of generation {generation} without its members: {few(members)}")
        # The first ones are those that are there: who is too many leaves at once. Who is to leave
        # stays until another has its state.
        most = self._control.workers[1] + self._noticed
        if self._group and len(members) > most:
            self._wrong(f"{kind} of generation {generation} has {len(members)} members")

    def _check_progress(self) -> None:
        now = self._control.committed_step
        if now < self._committed:
            self._wrong(f"step {self._committed} counted, and then only {now}")
        if now > self._computing.reached:
            self._wrong(f"step {now} counts, and members have {self._computing.reached}")
        self._committed = now

    def _check_formed(self, event: GenerationFormed) -> None:
        if event.generation >= self._newest and event.first_step < self._committed:
            what = f"generation {event.generation} begins at step {event.first_step}"
            self._wrong(f"{what}, though {self._committed} steps count")

    def _check_idle(self) -> None:
        """Whoever is there takes part before long, or is let go."""
        now_s, control = self._world.now_s, self._control
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
        control, now_s = self._control, self._world.now_s
        enough = self._fleet.room >= control.workers[0]
        if control.phase not in {Phase.WAITING, Phase.RESTORING} or not enough:
            self._waits_s = None
        elif self._waits_s is None:
            self._waits_s = now_s
        elif now_s - self._waits_s > _WAITS_S:
            self._waits_s = float("inf")
            self._wrong(f"it waits for members for {_WAITS_S:g} s, and machines hold enough")


_TURN_S = 1.0
_LACKING_S = 150.0  # so long members may be asked for again before all is thinned out


class Start:
    """The driver, the fleet and their words, from one start of a run to its end.

    While nothing goes on it is thinned out: no word comes and no second ticks until the next
    happening. Just before that, everyone tells how far it is.
    """

    def __init__(
        self, scenario: Scenario, world: World, machines: Machines, story: History, clock: Clock
    ) -> None:
        self._scenario, self._world = scenario, world
        self.room = machines.room
        kept = story.kept
        self.words = Messages(world, scenario.delay_s)
        self.fleet = Fleet(scenario, world, machines, self.words, story.samples)
        self._samples, self._version = story.samples, 0
        self.computing = Computing(scenario, world, self.fleet, self.words, kept)
        self.ending = Ending(self.computing)
        settings = ControlSettings(
            min_workers=scenario.least,
            max_workers=scenario.members,
            capacity=self.room,
            global_batch=scenario.global_batch,
            micro_batch=scenario.micro_batch,
            drop_last=scenario.drop_last,
            shares=scenario.shares,
            silence_s=scenario.silence_s,
            saves=scenario.every_steps == "auto",
            step=self.computing.origin.step,
            position=self.computing.origin.position,
            ledger=None if kept is None else kept.ledger,
            first_generation=story.next_generation,
            first_member=story.spawned,
        )
        control = WatchedControl(settings, world, self.fleet, story, clock)
        self.cluster = VirtualCluster(control, self.ending, self.computing, story)
        self.driver = Driver(control, self.cluster, self.cluster, lambda: world.clock_s)
        self._awake_until_s = 0.0
        self._dozing = False

    def run(self, until_s: float) -> bool:
        """Let happen what happens, to the end of this start; False where `until_s` comes first."""
        self._stay_awake()
        self.driver.start()
        self.fleet.later(_TURN_S, self._turn)
        self.fleet.later(self._report_s, self._round)
        world, words, driver = self._world, self.words, self.driver
        while driver.finish is None:
            word_s, next_s = words.next_s, world.next_s
            if word_s > until_s and next_s > until_s:
                return False
            if word_s > next_s:
                world.happen()
                continue
            world.now_s = max(word_s, world.now_s)
            self._hear()
        return True

    def _hear(self) -> None:
        """Take in the next word."""
        if (event := self.words.take()) is not None and self.cluster.sees(event):
            self.driver.take(event)

    @property
    def _report_s(self) -> float:
        """Until the next reports."""
        asked_s, group = self._scenario.report_s, self.computing.group
        return report_s(len(group.members) if group else 1) if asked_s is None else asked_s

    def close(self) -> None:
        """Every process ends."""
        self.fleet.over = True
        for number in [*self.fleet.seats, *self.fleet.away, *self.fleet.waiting]:
            self.fleet.drop(number)

    def wake(self) -> None:
        """Something is about to happen: the driver knows how things stood until now."""
        if self._dozing:
            self._dozing = False
            self.computing.round(everyone=True)
            self.words.hurry()
            while self.words.next_s <= self._world.now_s and self.driver.finish is None:
                self._hear()
            self.driver.turn()
            self.fleet.later(_TURN_S, self._turn)
            self.fleet.later(self._report_s, self._round)
        self._stay_awake()

    def grow(self, samples: int) -> None:
        """There is more data, and it has been read."""
        if samples > self._samples:
            self._samples, self._version = samples, self._version + 1
            grew = DataGrew(samples=samples, version=self._version)
            self.words.tell(grew, self._world.now_s)

    def _stay_awake(self) -> None:
        self._awake_until_s = self._world.now_s + self._scenario.awake_s

    def _turn(self) -> None:
        if self._world.now_s < self.words.deaf_until_s:
            self.fleet.later(self.words.deaf_until_s - self._world.now_s, self._turn)
            return
        self.driver.turn()
        if self._world.now_s > self._awake_until_s and self._quiet():
            self._dozing = True
        else:
            self.fleet.later(_TURN_S, self._turn)

    def _round(self) -> None:
        if not self._dozing:
            self.computing.round(everyone=False)
            self.fleet.later(self._report_s, self._round)

    def _quiet(self) -> bool:
        """Nothing goes on but steps."""
        control, group, fleet = self.driver.control, self.computing.group, self.fleet
        if group is None or group.stalled_s is not None or group.newcomers or len(self.words):
            return False
        if control.phase is not Phase.TRAINING or control.change_outstanding is not None:
            return False
        if fleet.building or fleet.away or len(fleet.seats) != len(group.members):
            return False
        lacking = len(group.members) < min(self._scenario.members, self.room)
        if lacking and self._world.now_s < self._awake_until_s + _LACKING_S:
            return False
        return all(body.well for body in fleet.seats.values())
