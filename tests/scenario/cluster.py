"""`Cluster` and `Records` over members in threads; the driver, the control, the ledger are real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.checkpoint import DamagedError, Manifest, publish, retain
from raycloud.commands import Command, Finish, Form, Meet, Prepare, Publish, Record, Reshare, Spawn
from raycloud.control import Control, ControlSettings
from raycloud.errors import CheckpointError
from raycloud.events import (
    CheckpointFailed,
    CheckpointPublished,
    Event,
    MemberFailed,
    MemberLost,
    MemberReady,
    PartWritten,
    Recovered,
    RolledBack,
    StepsCommitted,
)
from raycloud.net.stream import Place
from raycloud.on_ray.checkpoints import found_back, manifest_of
from raycloud.order import Position, ledger_line
from raycloud.recovery.rendezvous import Meeting
from raycloud.run.driver import ENDED, Driver
from raycloud.simulate.world import short
from raycloud.worker.context import MemberConfig
from tests.scenario.fleet import Disk

NOWHERE = Place("", 0, 0)  # who is alone asks nobody

if TYPE_CHECKING:
    from raycloud.control.heartbeats import Heard
    from raycloud.simulate.world import World
    from raycloud.spec import Job
    from tests.scenario.fleet import Fleet

_TURN_S = 0.2
_PUBLISH_S = 0.1
_FINDS_S = 0.5
_SILENCE_S = 60.0
_LONG_S = 1e9
_WELL_S = 10.0  # who was well for so long is well
_KNOWN = ("was lost", "could not be kept")  # why a start may fail


@dataclass(eq=False)
class Story:
    """What is known of a run over all of its starts.

    Attributes:
        folder: Where its checkpoints are.
        lines: Of its ledger's file.
        told: What happened, in lines.
        spawned: One past the newest member's number.
        generation: The newest.
        recoveries: How often training went on after a generation broke.
        rolled_back: How often members went back to a checkpoint.
        returned: How often a process came back that was given up.
        mistaken: How often a member was given up that was well.
        wrong: Which promises were broken.
    """

    folder: Path
    world: World
    lines: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    spawned: int = 0
    generation: int = -1
    recoveries: int = 0
    rolled_back: int = 0
    returned: int = 0
    mistaken: int = 0
    wrong: list[str] = field(default_factory=list)

    def tell(self, line: str) -> None:
        """Add a line, which the digest of the run takes in."""
        self.told.append(f"{self.world.now_s:9.3f} {line}")
        self.world.log.add(self.told[-1])


class Watched(Control):
    """The real one; what it asks for is told, and whom it takes for lost is looked at."""

    def __init__(self, settings: ControlSettings, fleet: Fleet, story: Story) -> None:
        super().__init__(settings)
        self._fleet, self._story = fleet, story

    def start(self, now_s: float, capacity: int | None = None) -> tuple[Command, ...]:
        return self._told(super().start(now_s, capacity))

    def on(self, event: Event, now_s: float) -> tuple[Command, ...]:
        return self._told(super().on(event, now_s))

    def tick(self, now_s: float) -> tuple[Command, ...]:
        return self._told(super().tick(now_s))

    def overdue(self, now_s: float) -> MemberLost | None:
        lost = super().overdue(now_s)
        seat = None if lost is None else self._fleet.seats.get(lost.member)
        well = seat is not None and seat.answers
        if well and self._story.world.now_s - seat.well_since_s > _WELL_S:
            self._story.tell("! this member is well")
            self._story.mistaken += 1
        return lost

    def _told(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        for command in commands:
            if not isinstance(command, Record):
                self._story.tell(f"> {short(command)}")
            if isinstance(command, Finish) and command.status != "finished":
                why = str(command.error)
                if not any(known in why for known in _KNOWN):
                    wrong = f"{command.status}, and no fault explains it: {why}"
                    self._story.wrong.append(wrong)
        return commands


class ThreadCluster:
    """The members of one start, and what it keeps.

    Args:
        job: What is asked.
        fleet: The members.
        story: What is known; this start is added.
        manifest: The checkpoint to go on from; None: from the beginning.
        at_once: Those that join take the state where all meet.

    Attributes:
        control: Decides.
        driver: The real one, over this cluster.
        deaf_until_s: It takes nothing in before.
        listener: Is told all that is logged.
    """

    busy = False

    def __init__(
        self,
        job: Job,
        fleet: Fleet,
        story: Story,
        manifest: Manifest | None,
        *,
        at_once: bool = False,
    ) -> None:
        self._job, self._fleet, self._story, self._manifest = job, fleet, story, manifest
        assert isinstance(job.task, type)
        self._task = job.task
        self._world = story.world
        self._store = Disk(fleet.stage, story.folder)
        self.deaf_until_s = 0.0
        self.listener: Callable[[Event], None] = lambda event: None
        self._unread: list[Event] = []
        fleet.tell = self.tell
        elastic = job.elastic
        settings = ControlSettings(
            min_workers=elastic.min_workers,
            max_workers=job.most_workers,
            capacity=fleet.room,
            global_batch=job.global_batch,
            micro_batch=job.micro_batch,
            shares=elastic.shares,
            silence_s=_SILENCE_S,
            hand_over_s=_LONG_S if at_once else 0.0,  # the fake transport takes hardly any
            saves=job.checkpoint.every_steps == "auto",
            reads=job.reads,
            measures=job.measures,
            step=manifest.step if manifest else 0,
            position=manifest.position if manifest else Position(),
            ledger=manifest.ledger if manifest else None,
            first_generation=story.generation + 1,
            first_member=story.spawned,
        )
        self.control = Watched(settings, fleet, story)
        self.driver = Driver(self.control, self, self, lambda: self._world.clock_s)

    @property
    def finish(self) -> Finish | None:
        return self.driver.finish

    def start(self) -> None:
        """Ask for the members, and look after them from now on."""
        self.driver.start()
        self._world.after(_TURN_S, self._turn)

    def tell(self, event: Event) -> None:
        """A word has come, or the driver has learned something."""
        if self._deaf:
            self._unread.append(event)
        elif self._sees(event):
            self.driver.take(event)

    @property
    def _deaf(self) -> bool:
        return self._world.now_s < self.deaf_until_s

    def _sees(self, event: Event) -> bool:
        if isinstance(event, MemberLost):
            seat = self._fleet.seats.get(event.member) or self._fleet.away.get(event.member)
            if seat is None and event.reason != ENDED:
                return False  # it was ended here
            if seat is not None and not seat.alive:
                self._fleet.drop([event.member])
        return True

    def _turn(self) -> None:
        if self.finish is not None:
            return
        self._world.after(max(_TURN_S, self.deaf_until_s - self._world.now_s), self._turn)
        if not self._deaf:
            self.driver.turn()

    # ---- members

    def spawn(self, command: Spawn) -> None:
        if min(command.members) < self._story.spawned:
            self._story.wrong.append(f"members were asked for twice: {command}")
        self._story.spawned = max(command.members) + 1
        told = MemberConfig(
            member=-1,
            node="",
            address="",
            job=self._job,
            task=self._task,
            checkpoints=str(self._story.folder),
            resume_step=self._manifest.step if self._manifest and not command.joins else None,
            joins=command.joins,
            origin=self._manifest if command.joins else None,
            back=command.back,
        )
        self._fleet.spawn([replace(told, member=member) for member in command.members])

    def form(self, command: Form) -> None:
        self._story.generation = command.generation
        self._meet(command, command.settled)

    def prepare(self, command: Prepare) -> None:
        change, number = command.change, command.number
        coming: tuple[int, ...] = ()
        if isinstance(change, Meet | Reshare):
            self._story.generation = max(self._story.generation, change.generation)
        if isinstance(change, Meet):
            coming = change.members
            self._meet(change, number, ahead=command.members)
        for member in command.members:
            if member not in coming:
                self._fleet.call(member, lambda it: it.prepare(number, change))

    def _meet(self, formed: Form | Meet, settled: int, ahead: Sequence[int] = ()) -> None:
        zones = tuple(self._fleet.zone(member) for member in formed.members)
        for rank, member in enumerate(formed.members):
            comes = settled if member in ahead else None
            meeting = Meeting.of(formed, rank, NOWHERE, settled=settled, ahead=comes, zones=zones)
            self._fleet.call(member, lambda it, meeting=meeting: it.form(meeting))

    def release(self, members: Sequence[int]) -> None:
        self._fleet.drop(members)

    def leave_out(self, member: int) -> None:
        self._fleet.leave_out(member)

    def readmit(self, member: int, process: int) -> None:
        self._story.spawned = member + 1
        self._story.returned += 1
        self._fleet.readmit(member, process)

    def holds(self, member: int) -> bool:
        return member in self._fleet.seats

    def hear(self, timeout_s: float) -> list[Event]:
        """What came while the driver was deaf; all else comes by itself."""
        unread, self._unread = self._unread, []
        return [event for event in unread if self._sees(event)]

    def poll(self) -> Heard:
        return self._fleet.heard()

    # ---- records

    def results(self) -> tuple[Event, ...]:
        """They come as words."""
        return ()

    def log(self, event: Event, word: tuple[int, int] | None) -> None:
        match event:
            case StepsCommitted():
                line = f"{short(event)}, loss {event.loss:.9g}"
            case PartWritten():
                of = f"{event.part['rank']} of step {event.step} as {event.generation}"
                line = f"{event.member} wrote part {of}: {event.part['record']['sha256'][:12]}"
            case MemberReady():
                line = short(replace(event, pid=0))  # the same in whichever process it is replayed
            case _:
                line = short(event)
        self._story.tell(f"< {line}")
        self._story.rolled_back += isinstance(event, RolledBack)
        self._story.recoveries += isinstance(event, Recovered)
        if isinstance(event, MemberFailed):
            self._story.wrong.append(f"member {event.member}: {event.error}: {event.message}")
        self.listener(event)

    def add_to_ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._story.lines += [ledger_line(record) for record in records]

    def publish(self, command: Publish, *, samples: int, ledger: Mapping[str, Any]) -> None:
        manifest = manifest_of(command, self._job, samples=samples, ledger=ledger)
        try:
            publish(self._store, manifest)
        except CheckpointError as error:
            damaged = isinstance(error, DamagedError)
            failed = CheckpointFailed(step=command.step, why=error.message, damaged=damaged)
            self._soon(failed, _PUBLISH_S)
            return
        retain(self._store, self._job.checkpoint.keep, newest=manifest.step)
        published = CheckpointPublished(
            step=manifest.step, path="", state_bytes=manifest.state_bytes, write_s=_PUBLISH_S
        )
        self._soon(published, _PUBLISH_S)

    def find_back(self, published: int | None, newest: int | None) -> None:
        back, _ = found_back(self._store, self._manifest, published, newest)
        self._soon(back, self._world.between(0.0, _FINDS_S))

    def _soon(self, event: Event, seconds: float) -> None:
        self._world.after(seconds, lambda: self.tell(event))
