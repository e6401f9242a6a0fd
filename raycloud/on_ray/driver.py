"""The driver of one run: events up to control, commands down, everything into the log."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, assert_never

from raycloud.checkpoint import LimitedStore, Manifest, Store, marked, open_store
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
from raycloud.control import Control
from raycloud.control.tables import GONE, Phase
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
    StopRequested,
)
from raycloud.on_ray.cluster import inventory
from raycloud.on_ray.failure import failure_of
from raycloud.on_ray.fleet import Fleet
from raycloud.on_ray.manifests import Publishing
from raycloud.on_ray.measures import Measures
from raycloud.on_ray.meeting import MeetingPlace
from raycloud.on_ray.origin import config_of, found_back, opening, settings_of
from raycloud.on_ray.outlets import Outlets, for_the_log
from raycloud.on_ray.outside import Outside
from raycloud.on_ray.profile import profile_of
from raycloud.on_ray.run import Run
from raycloud.on_ray.session import Session, origin_of
from raycloud.on_ray.sources import Sources
from raycloud.on_ray.takeover import held, known_of
from raycloud.on_ray.tenure import FollowedError, outlives
from raycloud.order import ledger_line
from raycloud.planning.inventory import Inventory, require
from raycloud.planning.plan import Plan, make
from raycloud.report.recorder import Recorder
from raycloud.training.words import Word

if TYPE_CHECKING:
    from raycloud.training.member import Meeting

_TURN_S = 0.2
_SOON_S = 0.02  # where the last checkpoint is all that is waited for
_ENDS_S, _TIDIES_S = 1.0, 20.0  # for what the store is asked for when a run ends


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
    store = LimitedStore(open_store(session.checkpoints))
    origin = None if session.resume and outlives(session) else origin_of(session, store)
    nodes = inventory()
    require(nodes, session.job.resources.worker, session.job.elastic.min_workers)
    outlets = Outlets(session)
    with (
        Recorder(
            session.directory, session.clock, started_s=session.began_s, listener=outlets.add
        ) as recorder,
        held(session, recorder) as mine,
        marked(store) as mark,  # machines may be added that do not see this place
    ):
        origin = origin or origin_of(mine, store)
        session.directory.write_job(session.written)
        session = replace(mine, mark=mark)
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
        self._session, worker = session, session.job.resources.worker
        self._recorder, self._outlets = recorder, outlets
        self._store, self._manifest = store, manifest
        self._publishing = Publishing(store, session)
        outside = self._outside = Outside(nodes, worker, session.directory, session.clock)
        self._control = Control(settings_of(session, manifest, recorder.tally, outside.room))
        self._fleet = Fleet(worker, session.clock, session.tenure)
        self._sources = Sources(session)
        self._meeting: MeetingPlace | None = None
        self._known = _Known()
        self._measures = Measures()
        self._plan: Plan | None = None
        self._pending: deque[Event | Word] = deque()
        self._finish: Finish | None = None
        self._stop_sent = False

    def run(self) -> Run:
        """Until control says that the run is over."""
        try:
            self._meeting = MeetingPlace()
            self._begin(self._session.clock.monotonic_s())
            while self._finish is None:
                self._turn()
        except KeyboardInterrupt:
            self._close("stopped", "ended at once on request")
            raise
        except FollowedError:
            raise  # nothing here is this driver's any more
        except Exception as error:
            self._close(
                "failed", error.message if isinstance(error, RaycloudError) else repr(error)
            )
            raise
        finally:
            self._fleet.close()
            self._sources.close()
            if self._meeting is not None:
                self._meeting.close()
            self._publishing.close(_ENDS_S if self._finish is None else _TIDIES_S)
        return self._ended(self._finish)

    def _begin(self, now_s: float) -> None:
        """Ask for members, or go on with those that are there."""
        session, taken = self._session, self._session.taken
        for event in opening(session, self._manifest):
            self._log(event)
        if taken is None:
            self._sources.begin()
            if session.tenure is not None:
                session.tenure.remember(known_of(session, self._manifest, self._sources.pipeline))
            self._carry_out(self._control.start(now_s))
            return
        for one in taken.survivors:
            self._known.ready[one.member] = one.ready
            session.observer(one.ready)  # which the log has, and who looks on has not seen
        self._fleet.adopt(taken.actors, taken.collators)
        self._carry_out(self._control.take_over(taken.adoption, now_s))

    def note(self, what: str, **detail: object) -> None:
        """Put a notice into the log."""
        self._log(Noticed(what=what, detail=detail))

    def _turn(self) -> None:
        """Whatever has happened since the last turn."""
        stop, tenure = self._session.stop, self._session.tenure
        if stop is not None and stop.reason is not None and not self._stop_sent:
            self._stop_sent = True
            self._pending.append(StopRequested(reason=stop.reason))
        soon = self._publishing.busy and self._control.phase is Phase.CLOSING
        turn_s = _SOON_S if soon else _TURN_S
        self._pending.extend(self._fleet.poll(turn_s, self._recorder.written))
        if tenure is not None:
            tenure.check()  # before any of it is written
        self._recorder.keep_up()
        self._pending.extend(self._outside.poll(self._placed))
        self._pending.extend(self._sources.poll())
        self._pending.extend(self._publishing.poll())
        self._pending.extend(self._outlets.poll(self._fleet.lines()))
        while self._pending and self._finish is None:
            self._take(self._pending.popleft())
        self._control.hear(self._fleet.heard())
        now_s = self._session.clock.monotonic_s()
        while self._finish is None and (lost := self._control.overdue(now_s)) is not None:
            self._take(lost)
        if self._finish is None:
            self._carry_out(self._control.tick(now_s))

    def _placed(self) -> dict[int, str]:
        """The nodes of the members that are there."""
        members, ready = self._control.members, self._known.ready
        return {m: told.node for m, told in ready.items() if members.get(m) not in GONE}

    def _log(self, event: Event, word: tuple[int, int] | None = None) -> None:
        """Keep an event, and which word of which member it was, and show it."""
        event = for_the_log(event)
        self._recorder.record(event, word)
        self._session.observer(event)

    def _take(self, told: Event | Word) -> None:
        """Log an event, and let control decide what follows."""
        event = told.event if isinstance(told, Word) else told
        self._log(event, (told.member, told.number) if isinstance(told, Word) else None)
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
        ends = self._finish is not None or self._control.phase is Phase.ENDING
        if isinstance(event, MemberFailed | MemberLost) and ends:
            self._known.failure = self._known.failure or event  # others were got over

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Spawn():
                    self._spawn(command)
                case Restore(newest=newest):
                    self._measures = Measures()  # some are made again
                    known = self._manifest, self._control.last_published, newest
                    self._publishing.find_back(partial(found_back, self._store, *known))
                case Form():
                    self._meet(command, command.settled)
                case Prepare():
                    self._prepare(command)
                case Publish():
                    control, step = self._control, command.step
                    self._publishing.publish(
                        command, samples=control.samples_at(step), ledger=control.ledger_at(step)
                    )
                case Record():
                    lines = [ledger_line(record).rstrip("\n") for record in command.records]
                    self._recorder.append_ledger(lines)
                case Notice():
                    self._pending.append(Noticed(**asdict(command)))
                case TellRecovery():
                    self._pending.append(Recovered(**asdict(command)))
                case Release() | LeaveOut() | Readmit():
                    self._fleet.obey(command)
                case Finish():
                    self._finish = command
                case _:
                    assert_never(command)

    def _spawn(self, command: Spawn) -> None:
        asked = self._session.job.data.collators
        told = config_of(self._session, self._sources.told())
        if command.joins:
            told = replace(told, joins=True, origin=self._manifest, back=command.back)
            for member, vacancy in zip_longest(command.members, command.vacancies):
                self._fleet.await_place(replace(told, member=member), vacancy)
            return
        told = replace(told, resume_step=self._manifest.step if self._manifest else None)
        collators = self._fleet.spawn([replace(told, member=m) for m in command.members])
        if collators < asked:
            self.note("collators found no free CPU", asked=asked, started=collators)
        self._pending.extend(MemberSpawned(member=member) for member in command.members)

    def _meet(self, formed: Form | Meet, settled: int, computing: Sequence[int] = ()) -> None:
        """Tell members where to meet, but those whose loss is the next that is taken in."""
        lost = {told.member for told in self._pending if isinstance(told, MemberLost)}
        for rank, member in enumerate(formed.members):
            if member not in lost:
                ahead = settled if member in computing else None
                meeting = replace(self._meeting_of(formed, rank), settled=settled, ahead=ahead)
                self._fleet.form(member, meeting)
        self._write_plan(formed.members, formed.shares)

    def _prepare(self, command: Prepare) -> None:
        """Send a change ahead; to a `Meet`, members come while those of the present compute."""
        coming = command.change
        if not isinstance(coming, Meet):
            for member in command.members:
                self._fleet.prepare(member, command.number, coming)
            if isinstance(coming, Reshare) and coming.caught_up:
                self._write_plan(command.members, coming.shares)
            return
        self._meet(coming, command.number, command.members)
        for member in set(command.members) - set(coming.members):
            self._fleet.prepare(member, command.number, coming)

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
        self._pending.extend(self._publishing.poll())
        while self._pending:  # what came with the last turn
            self._take(self._pending.popleft())
        summary = self._close(finish.status, finish.error)
        if finish.status == "failed":
            raise failure_of(self._known.failure, finish, self._session.directory.path)
        return Run(status=finish.status, directory=self._session.directory.path, summary=summary)
