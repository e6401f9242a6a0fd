"""The driver of one run: events up to control, commands down, everything into the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, assert_never

from raycloud import __version__
from raycloud.checkpoint import Manifest, Store, marked, open_store
from raycloud.commands import (
    Command,
    Finish,
    Form,
    Meet,
    Notice,
    Prepare,
    Publish,
    Record,
    Release,
    Reshare,
    Spawn,
    TellRecovery,
)
from raycloud.control import Control, ControlSettings
from raycloud.control.tables import GONE
from raycloud.errors import InternalError, RaycloudError
from raycloud.events import (
    EvaluationPart,
    Event,
    MemberFailed,
    MemberLeaving,
    MemberLost,
    MemberReady,
    MemberSpawned,
    Noticed,
    Recovered,
    RunFinished,
    RunStarted,
    StopRequested,
)
from raycloud.on_ray.cluster import inventory
from raycloud.on_ray.failure import failure_of
from raycloud.on_ray.fleet import Fleet
from raycloud.on_ray.manifests import manifest_of, publish_manifest
from raycloud.on_ray.measures import Measures
from raycloud.on_ray.meeting import MeetingPlace
from raycloud.on_ray.outlets import Outlets, for_the_log
from raycloud.on_ray.outside import Outside
from raycloud.on_ray.profile import profile_of
from raycloud.on_ray.run import Run
from raycloud.on_ray.session import Session, origin_of
from raycloud.on_ray.sources import Sources
from raycloud.on_ray.tasks import by_value
from raycloud.order import Position, ledger_line
from raycloud.planning.inventory import Inventory, require
from raycloud.planning.plan import Plan, make
from raycloud.report.recorder import Recorder
from raycloud.training.member import Meeting, MemberConfig

_TURN_S = 0.2
_SILENCE_S = 600.0  # a step, or measuring the held-out samples, may take minutes


@dataclass(eq=False)
class _Known:
    """What members said of themselves, and the failure that ended the run."""

    ready: dict[int, MemberReady] = field(default_factory=dict)
    failure: MemberFailed | MemberLost | None = None


def drive(session: Session) -> Run:
    """Carry a run out, from its first member to its summary.

    Raises:
        RaycloudError: Why it failed; log, summary and checkpoints are written.
    """
    store = open_store(session.checkpoints)
    origin = origin_of(session, store)
    nodes = inventory()
    require(nodes, session.job.resources.worker, session.job.elastic.min_workers)
    outlets = Outlets(session)
    with (
        Recorder(
            session.directory, session.clock, started_s=session.began_s, listener=outlets.add
        ) as recorder,
        marked(store) as mark,  # machines may be added that do not see this place
    ):
        session.directory.write_job(session.written)
        session = replace(session, mark=mark)
        driver = Driver(session, recorder, store, origin.manifest, nodes, outlets)
        for step, why in origin.skipped:
            driver.note(f"the checkpoint of step {step} is damaged and was passed over", why=why)
        if (most := session.job.most_workers) < session.job.elastic.max_workers:
            driver.note(f"a step has {most} micro-batches, so no more than {most} workers are used")
        return driver.run()


class Driver:
    """Joins control, fleet, log and checkpoints of one run."""

    def __init__(
        self,
        session: Session,
        recorder: Recorder,
        store: Store,
        manifest: Manifest | None,
        nodes: Inventory,
        outlets: Outlets,
    ) -> None:
        """Decide how many members the machines hold."""
        job = session.job
        self._session = session
        self._recorder, self._outlets = recorder, outlets
        self._store = store
        self._manifest = manifest
        self._outside = Outside(nodes, job.resources.worker, session.directory, session.clock)
        tally = recorder.tally
        settings = ControlSettings(
            min_workers=job.elastic.min_workers,
            max_workers=job.most_workers,
            silence_s=_SILENCE_S,
            saves=job.checkpoint.every_steps == "auto",
            capacity=self._outside.room,
            global_batch=job.global_batch,
            micro_batch=job.micro_batch,
            drop_last=job.drop_last,
            shares=job.elastic.shares,
            step=manifest.step if manifest else 0,
            position=Position(epoch=manifest.epoch, offset=manifest.offset)
            if manifest
            else Position(),
            ledger=manifest.ledger if manifest and manifest.step else None,
            first_generation=max(manifest.generation, tally.generation) + 1 if manifest else 0,
            first_member=max(tally.spawned, default=-1) + 1,
        )
        self._control = Control(settings)
        self._fleet = Fleet(job.resources.worker, session.clock)
        self._sources = Sources(session)
        self._meeting: MeetingPlace | None = None
        self._known = _Known()
        self._measures = Measures()
        self._plan: Plan | None = None
        self._pending: deque[Event] = deque()
        self._finish: Finish | None = None
        self._stop_sent = False

    def run(self) -> Run:
        """Until control says that the run is over."""
        session, clock = self._session, self._session.clock
        by_value(session.task)
        step = self._manifest.step if self._manifest else None
        try:
            self._log(RunStarted(job=session.job.name, version=__version__, resumed_from_step=step))
            self._sources.begin()
            self._meeting = MeetingPlace()
            self._carry_out(self._control.start(clock.monotonic_s()))
            while self._finish is None:
                self._turn()
        except KeyboardInterrupt:
            self._close("stopped", "ended at once on request")
            raise
        except Exception as error:
            self._close(
                "failed", error.message if isinstance(error, RaycloudError) else repr(error)
            )
            raise
        finally:
            self._fleet.close()
            self._sources.close()
        return self._ended(self._finish)

    def note(self, what: str, **detail: object) -> None:
        """Put a notice into the log."""
        self._log(Noticed(what=what, detail=detail))

    def _turn(self) -> None:
        """Whatever has happened since the last turn."""
        stop = self._session.stop
        if stop is not None and stop.reason is not None and not self._stop_sent:
            self._stop_sent = True
            self._pending.append(StopRequested(reason=stop.reason))
        self._pending.extend(self._fleet.poll(_TURN_S))
        self._pending.extend(self._outside.poll(self._placed))
        self._pending.extend(self._sources.poll())
        self._pending.extend(self._outlets.poll(self._fleet.lines()))
        while self._pending and self._finish is None:
            self._take(self._pending.popleft())
        self._control.hear(self._fleet.heard())
        now_s = self._session.clock.monotonic_s()
        if self._finish is None and (lost := self._control.overdue(now_s)) is not None:
            self._take(lost)
        if self._finish is None:
            self._carry_out(self._control.tick(now_s))

    def _placed(self) -> dict[int, str]:
        """The nodes of the members that are there."""
        members, ready = self._control.members, self._known.ready
        return {m: told.node for m, told in ready.items() if members.get(m) not in GONE}

    def _log(self, event: Event) -> None:
        """Keep an event, and show it."""
        event = for_the_log(event)
        self._recorder.record(event)
        self._session.observer(event)

    def _take(self, event: Event) -> None:
        """Log an event, and let control decide what follows."""
        self._log(event)
        self._sources.on(event)
        match event:
            case MemberReady():
                self._known.ready[event.member] = event
            case MemberLeaving():
                self._outside.leaves(event)
            case EvaluationPart():
                control = self._control
                group = control.group_of(event.generation)
                whole = self._measures.add(event, group, control.sound_from)
                self._pending.extend([whole] if whole is not None else [])
            case _:
                pass
        self._carry_out(self._control.on(event, self._session.clock.monotonic_s()))
        if isinstance(event, MemberFailed | MemberLost) and self._finish is not None:
            self._known.failure = self._known.failure or event  # others were got over

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Spawn():
                    self._spawn(command)
                case Form():
                    self._form(command)
                case Prepare():
                    self._prepare(command)
                case Publish():
                    self._publish(command)
                case Record():
                    lines = [ledger_line(record).rstrip("\n") for record in command.records]
                    self._recorder.append_ledger(lines)
                case Notice():
                    self._pending.append(
                        Noticed(what=command.what, member=command.member, detail=command.detail)
                    )
                case TellRecovery():
                    self._pending.append(Recovered(**asdict(command)))
                case Release():
                    self._fleet.release(command.members)
                case Finish():
                    self._finish = command
                case _:
                    assert_never(command)

    def _spawn(self, command: Spawn) -> None:
        session, asked = self._session, self._session.job.data.collators
        told = MemberConfig(
            member=-1,
            node="",
            address="",
            job=session.job,
            task=session.task,
            checkpoints=session.checkpoints,
            mark=session.mark,
            only_steps=session.only_steps,
            **self._sources.told(),
        )
        if command.joins:
            for member in command.members:
                self._fleet.await_place(
                    replace(told, member=member, joins=True, origin=self._manifest)
                )
            return
        told = replace(told, resume_step=self._manifest.step if self._manifest else None)
        collators = self._fleet.spawn([replace(told, member=m) for m in command.members])
        if collators < asked:
            self.note("collators found no free CPU", asked=asked, started=collators)
        self._pending.extend(MemberSpawned(member=member) for member in command.members)

    def _form(self, command: Form) -> None:
        for rank, member in enumerate(command.members):
            meeting = self._meeting_of(command, rank)
            self._fleet.form(member, replace(meeting, settled=command.settled))
        self._write_plan(command.members, command.shares)

    def _prepare(self, command: Prepare) -> None:
        """Send a change ahead; to a `Meet`, members come while those of the present compute."""
        coming = command.change
        if not isinstance(coming, Meet):
            for member in command.members:
                self._fleet.prepare(member, command.number, coming)
            if isinstance(coming, Reshare) and coming.caught_up:
                self._write_plan(command.members, coming.shares)
            return
        for rank, member in enumerate(coming.members):
            computes = command.number if member in command.members else None
            meeting = self._meeting_of(coming, rank)
            self._fleet.form(member, replace(meeting, settled=command.number, ahead=computes))
        for member in set(command.members) - set(coming.members):
            self._fleet.prepare(member, command.number, coming)
        self._write_plan(coming.members, coming.shares)

    def _meeting_of(self, formed: Form | Meet, rank: int) -> Meeting:
        if self._meeting is None:
            raise InternalError("members were to meet before there was a meeting place")
        nodes = tuple(self._known.ready[member].node for member in formed.members)
        return self._meeting.of(formed, rank, nodes)

    def _write_plan(self, members: tuple[int, ...], shares: tuple[int, ...]) -> None:
        """Keep what is predicted of this generation, to be held against what is measured."""
        job = self._session.job
        readies = [self._known.ready[member] for member in members]
        elastic = job.elastic.model_copy(update={"shares": shares})
        self._plan = make(
            job.model_copy(update={"elastic": elastic}),
            self._outside.inventory,
            profile_of(readies),
            placed={r.member: r.node for r in readies},
        )
        self._session.directory.write_plan(self._plan.to_json())

    def _publish(self, command: Publish) -> None:
        manifest = manifest_of(
            command,
            self._session.written,
            samples=self._control.samples_at(command.step),
            ledger=self._control.ledger_at(command.step),
        )
        self._pending.append(publish_manifest(manifest, self._store, self._session))

    def _close(self, status: str, why: str | None) -> dict[str, Any]:
        """The last events, and the summary."""
        at_once = status == "stopped" and self._finish is None
        for notice in (
            *self._outlets.poll(self._fleet.lines()),
            *self._outlets.close(status, at_once=at_once),
        ):
            self._log(notice)
        self._log(RunFinished(status=status, steps=self._control.committed_step, error=why))
        predicted = asdict(self._plan.predicted) if self._plan is not None else None
        return self._recorder.publish_summary(predicted=predicted).to_record()

    def _ended(self, finish: Finish) -> Run:
        while self._pending:  # what came with the last turn
            self._take(self._pending.popleft())
        summary = self._close(finish.status, finish.error)
        if finish.status == "failed":
            raise failure_of(self._known.failure, finish, self._session.directory.path)
        return Run(status=finish.status, directory=self._session.directory.path, summary=summary)
