"""The driver of one start: the real control, ledger and checkpoints over a fleet that it hears."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.checkpoint import DamagedError, Manifest, publish, retain
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
from raycloud.control import Control, ControlSettings
from raycloud.errors import CheckpointError
from raycloud.events import (
    CheckpointFailed,
    CheckpointPublished,
    Event,
    MemberFailed,
    MemberLost,
    MemberReady,
    Noticed,
    PartWritten,
    Recovered,
    RolledBack,
    StepsCommitted,
)
from raycloud.on_ray.manifests import manifest_of
from raycloud.on_ray.origin import found_back
from raycloud.order import Position, ledger_line
from raycloud.simulate.telling import short
from raycloud.sync.stream import Place
from raycloud.training.member import Meeting, MemberConfig
from tests.scenario.fleet import ENDED, Disk

NOWHERE = Place("", 0, 0)  # who is alone asks nobody

if TYPE_CHECKING:
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


class Driver:
    """Joins control and a fleet.

    Args:
        job: What is asked.
        fleet: The members.
        story: What is known; this start is added.
        manifest: The checkpoint to go on from; None: from the beginning.
        at_once: Those that join take the state where all meet.
    """

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
        self.finish: Finish | None = None
        self.deaf_until_s = 0.0
        self._unread: list[Event] = []
        fleet.tell = self.take
        elastic = job.elastic
        self.control = Control(
            ControlSettings(
                min_workers=elastic.min_workers,
                max_workers=elastic.max_workers,
                capacity=fleet.room,
                global_batch=job.global_batch,
                micro_batch=job.micro_batch,
                shares=elastic.shares,
                silence_s=_SILENCE_S,
                hand_over_s=_LONG_S if at_once else 0.0,  # the fake transport takes hardly any
                saves=job.checkpoint.every_steps == "auto",
                step=manifest.step if manifest else 0,
                position=Position(epoch=manifest.epoch, offset=manifest.offset)
                if manifest
                else Position(),
                ledger=manifest.ledger if manifest else None,
                first_generation=story.generation + 1,
                first_member=story.spawned,
            )
        )

    def start(self) -> None:
        """Ask for the members, and look after them from now on."""
        self._carry_out(self.control.start(self._world.clock_s))
        self._world.after(_TURN_S, self._turn)

    def take(self, event: Event) -> None:
        """A word has come, or the driver has learned something."""
        if self.finish is not None:
            return
        if self._world.now_s < self.deaf_until_s:
            self._unread.append(event)
            return
        if isinstance(event, MemberLost):
            seat = self._fleet.seats.get(event.member) or self._fleet.away.get(event.member)
            if seat is None and event.reason != ENDED:
                return  # it was ended here
            if seat is not None and not seat.alive:
                self._fleet.drop([event.member])
        self._tell("<", event)
        self._story.rolled_back += isinstance(event, RolledBack)
        if isinstance(event, MemberFailed):
            self._story.wrong.append(f"member {event.member}: {event.error}: {event.message}")
        self._carry_out(self.control.on(event, self._world.clock_s))

    def _tell(self, sign: str, word: Event | Command) -> None:
        match word:
            case Record():
                return
            case StepsCommitted():
                line = f"{short(word)}, loss {word.loss:.9g}"
            case PartWritten():
                of = f"{word.part['rank']} of step {word.step} as {word.generation}"
                line = f"{word.member} wrote part {of}: {word.part['record']['sha256'][:12]}"
            case MemberReady():
                line = short(replace(word, pid=0))  # the same in whichever process it is replayed
            case _:
                line = short(word)
        self._story.tell(f"{sign} {line}")

    def _turn(self) -> None:
        if self.finish is not None:
            return
        self._world.after(max(_TURN_S, self.deaf_until_s - self._world.now_s), self._turn)
        if self._world.now_s < self.deaf_until_s:
            return
        unread, self._unread = self._unread, []
        for event in unread:
            self.take(event)
        self.control.hear(self._fleet.heard())
        now_s = self._world.clock_s
        if self.finish is None and (lost := self.control.overdue(now_s)) is not None:
            seat = self._fleet.seats.get(lost.member)
            well = seat is not None and seat.answers
            if well and self._world.now_s - seat.well_since_s > _WELL_S:
                self._story.tell("! this member is well")
                self._story.mistaken += 1
            self.take(lost)
        if self.finish is None:
            self._carry_out(self.control.tick(now_s))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self._tell(">", command)
            match command:
                case Spawn():
                    self._spawn(command)
                case Restore(newest=newest):
                    published = self.control.last_published
                    back, _ = found_back(self._store, self._manifest, published, newest)
                    self._soon(back, self._world.between(0.0, _FINDS_S))
                case Form():
                    self._story.generation = command.generation
                    self._form(command)
                case Prepare():
                    self._prepare(command)
                case Publish():
                    self._publish(command)
                case Record(records=records):
                    self._story.lines += [ledger_line(record) for record in records]
                case Notice() | TellRecovery():
                    self._note(command)
                case Release() | LeaveOut() | Readmit():
                    self._obey(command)
                case Finish(status=status, error=why):
                    self.finish = command
                    if status != "finished" and not any(known in str(why) for known in _KNOWN):
                        self._story.wrong.append(f"{status}, and no fault explains it: {why}")
                case _:
                    raise AssertionError(f"a scenario does not know what {command} asks for")

    def _note(self, command: Notice | TellRecovery) -> None:
        self._story.recoveries += isinstance(command, TellRecovery)
        kind = Noticed if isinstance(command, Notice) else Recovered
        self._soon(kind(**asdict(command)))

    def _obey(self, command: Release | LeaveOut | Readmit) -> None:
        match command:
            case Release(members=members):
                self._fleet.drop(members)
            case LeaveOut(member=member):
                self._fleet.leave_out(member)
            case Readmit(member=member, process=process):
                self._story.spawned = member + 1
                self._story.returned += 1
                self._fleet.readmit(member, process)

    def _soon(self, event: Event, seconds: float = 0.0) -> None:
        self._world.after(seconds, lambda: self.take(event))

    def _spawn(self, command: Spawn) -> None:
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

    def _form(self, command: Form) -> None:
        for rank, member in enumerate(command.members):
            meeting = replace(self._meeting(command, rank), settled=command.settled)
            self._fleet.call(member, lambda it, meeting=meeting: it.form(meeting))
            if member not in self._fleet.seats:  # it had done its part before it ended
                self._soon(MemberLost(member=member, reason=ENDED))

    def _prepare(self, command: Prepare) -> None:
        change, number = command.change, command.number
        coming: tuple[int, ...] = ()
        if isinstance(change, Meet | Reshare):
            self._story.generation = max(self._story.generation, change.generation)
        if isinstance(change, Meet):
            coming = change.members
            for rank, member in enumerate(coming):
                ahead = number if member in command.members else None
                meeting = replace(self._meeting(change, rank), settled=number, ahead=ahead)
                self._fleet.call(member, lambda it, meeting=meeting: it.form(meeting))
        for member in command.members:
            if member not in coming:
                self._fleet.call(member, lambda it: it.prepare(number, change))

    def _meeting(self, formed: Form | Meet, rank: int) -> Meeting:
        return Meeting(
            place=NOWHERE,
            generation=formed.generation,
            rank=rank,
            members=formed.members,
            shares=formed.shares,
            planned=isinstance(formed, Meet),
            following=formed.following,
            back=None if isinstance(formed, Meet) else formed.back,
        )

    def _publish(self, command: Publish) -> None:
        manifest = manifest_of(
            command,
            self._job,
            samples=self.control.samples_at(command.step),
            ledger=self.control.ledger_at(command.step),
        )
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
