"""Launch of a run: its driver, cluster and records are put together here, and ended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raycloud import __version__, errors
from raycloud.checkpoint import LimitedStore, marked, open_store
from raycloud.control import Control
from raycloud.errors import RaycloudError
from raycloud.events import (
    DataPrepared,
    Event,
    MemberFailed,
    MemberLost,
    Noticed,
    PartWritten,
    Printed,
    RolledBack,
    RunFinished,
)
from raycloud.on_ray.attach import inventory, joined
from raycloud.on_ray.checkpoints import CheckpointPublisher, found_back, origin_of
from raycloud.on_ray.cluster import RayCluster
from raycloud.on_ray.pool import ActorPool, SupersededError
from raycloud.on_ray.roles import in_roles, with_roles
from raycloud.on_ray.session import Run, error_of
from raycloud.order import ledger_line
from raycloud.planner.inventory import capacity, require
from raycloud.planner.roles import Roles
from raycloud.redact import redacted
from raycloud.report.data import brief
from raycloud.report.recorder import Journals, Recorder
from raycloud.report.tracking import Trackers
from raycloud.run.driver import Driver
from raycloud.worker.outbox import PRINTED

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.checkpoint import Manifest, Store
    from raycloud.commands import Finish
    from raycloud.on_ray.failover import Failover
    from raycloud.on_ray.session import Origin, Session
    from raycloud.spec import Job
    from raycloud.worker.outbox import LogLines

_ENDS_S, _TIDIES_S = 1.0, 20.0  # for what the store is asked for when a run ends
_AT_ONCE_S = 1.0  # to wait for trackers where someone wants the run to end now


def drive(session: Session) -> Run:
    """Carry a run out, from its first member to its summary.

    Raises:
        RaycloudError: Why it failed; log, summary and checkpoints are written.
    """
    store = LimitedStore(open_store(session.checkpoints))
    own = (
        session.only_steps is not None
        or session.seats is not None
        or session.job.servers.shards > 0
    )
    outlives = joined() and not own  # servers end with the command that drives them
    origin = None if outlives and session.resume else origin_of(session, store)
    nodes = inventory()
    worker, fewest = session.job.resources.worker, session.job.elastic.min_workers
    held = capacity(nodes, worker)
    room = max(held, fewest) if session.autoscales else require(nodes, worker, fewest)
    sinks = LogSinks(session)
    with (
        Recorder(
            session.directory, session.clock, started_s=session.began_s, listener=sinks.add
        ) as recorder,
        _pool(session, recorder, outlives=outlives) as (pool, found, told),
        marked(store) as mark,  # machines may be added that do not see this place
    ):
        if found is not None:
            origin = found.origin
        origin = origin or origin_of(session, store)
        session.directory.write_job(session.asked)
        session = replace(session, mark=mark)
        chosen: tuple[Event, ...] = ()
        if found is None:
            session, chosen = with_roles(session)
        elif found.roles is not None:
            session = in_roles(session, Roles.from_record(found.roles))
        with contextlib.closing(
            RayCluster(session, pool, nodes, origin.manifest, lambda: recorder.written)
        ) as cluster:
            records = RunRecords(session, recorder, sinks, store, origin.manifest, cluster)
            settings = session.settings(origin, recorder.tally, room)
            control = Control(settings)
            driver = Driver(control, cluster, records, session.clock.monotonic_s)

            def begin() -> None:
                notes = _workers_notes(session.job, held, room)
                for event in (*origin.opening, *told, *chosen, *notes):
                    records.log(event)
                if found is None:
                    cluster.begin()
                    pool.remember(_for_the_next(session, origin, cluster))
                    first, fewest = settings.first_member, settings.min_workers
                    most = settings.workers if pool.most is None else max(fewest, pool.most)
                    members = range(first, first + min(settings.workers, most))
                    driver.start(cluster.secure(members, fewest, settings.workers))
                    return
                for one in found.survivors:  # the log has it, and who looks on has not seen it
                    session.observer(one.ready)
                cluster.adopt(found)
                driver.take_over(found.adoption)

            return _run(session, driver, cluster, records, begin)


def _for_the_next(session: Session, origin: Origin, cluster: RayCluster) -> dict[str, Any]:
    """What the next driver has to know of this start, as plain values."""
    return {
        "origin": origin.manifest and origin.manifest.to_bytes(),
        "pipeline": cluster.pipeline,
        "roles": None if session.roles is None else asdict(session.roles),
    }


def _workers_notes(job: Job, held: int, room: int) -> Iterator[Event]:
    """What a person should know of how many workers there are going to be.

    Args:
        job: Which is begun.
        held: For how many the machines have room.
        room: For how many there is going to be.
    """
    asked, most = job.elastic.max_workers, job.most_workers
    if asked != "auto" and most < asked:
        what = f"a step has {most} micro-batches, so no more than {most} workers are used"
        yield Noticed(what=what)
    if held < room:
        what = f"Ray's autoscaler is asked for room for {room} workers"
        yield Noticed(what=what, detail={"machines_hold": held})


@contextlib.contextmanager
def _pool(
    session: Session, recorder: Recorder, *, outlives: bool
) -> Iterator[tuple[ActorPool, Failover | None, tuple[Event, ...]]]:
    """The run's pool, the members that are there already, and what the log is told of them."""
    if session.seats is not None:
        job, name = session.job, str(session.directory.path)
        fewest, most = job.elastic.min_workers, job.most_workers
        fresh = job.compile or job.resources.worker.gpus > 0
        with session.seats.lease(name, fewest, most, fresh=fresh) as pool:
            yield pool, None, ()
    elif outlives:
        from raycloud.on_ray.failover import outliving

        with outliving(session, recorder) as found:
            yield found
    else:
        yield ActorPool(session.clock), None, ()


def _run(
    session: Session,
    driver: Driver,
    cluster: RayCluster,
    records: RunRecords,
    begin: Callable[[], None],
) -> Run:
    """Carry a start out; `begin` asks for members, or goes on with those that are there."""

    def close(status: str, why: str | None) -> dict[str, Any]:
        return records.close(
            status,
            why,
            steps=driver.control.committed_step,
            at_once=status == "stopped" and driver.finish is None,
        )

    try:
        begin()
        finish = driver.run()
    except KeyboardInterrupt:
        close("stopped", "ended at once on request")
        raise
    except SupersededError:
        raise  # nothing here is this driver's any more
    except Exception as error:
        close("failed", error.message if isinstance(error, RaycloudError) else repr(error))
        raise
    finally:
        cluster.close()
        records.end(_ENDS_S if driver.finish is None else _TIDIES_S)
    driver.wind_up()
    summary, path = close(finish.status, finish.error), session.directory.path
    if finish.status == "failed":
        raise failure_of(driver.failure, finish, path)
    return Run(status=finish.status, directory=path, summary=summary)


def failure_of(
    failure: MemberFailed | MemberLost | None, finish: Finish, directory: Path
) -> errors.RaycloudError:
    """Why a run failed: the first member's failure, or else what control says."""
    if isinstance(failure, MemberFailed):
        error = error_of(failure, f"member {failure.member}: ")
        error.hint = error.hint or f"the run is kept in {directory}"
        return error
    message, _, hint = (finish.error or "the run failed").partition("\n\nhint: ")
    hint = f"{hint} (run directory {directory})" if hint else f"see the log in {directory}"
    lost = isinstance(failure, MemberLost)
    kind = errors.MemberLostError if lost else getattr(errors, finish.blames)
    made: errors.RaycloudError = kind(message, hint=hint)
    return made


class RunRecords:
    """The `Records` of a run directory and a store; observer and cluster see all that is logged."""

    def __init__(
        self,
        session: Session,
        recorder: Recorder,
        sinks: LogSinks,
        store: Store,
        origin: Manifest | None,
        cluster: RayCluster,
    ) -> None:
        self._recorder, self._sinks, self._cluster = recorder, sinks, cluster
        self._observer = session.observer
        self._store, self._origin = store, origin
        self._publishing = CheckpointPublisher(store, session)
        self.publish, self.end = self._publishing.publish, self._publishing.close

    @property
    def busy(self) -> bool:
        """See `Records.busy`."""
        return self._publishing.busy

    def log(self, event: Event, word: tuple[int, int] | None = None) -> None:
        """See `Records.log`."""
        told = for_the_log(event)
        self._recorder.record(told, word)
        self._observer(told)
        self._cluster.see(event)

    def add_to_ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Records.add_to_ledger`."""
        self._recorder.append_ledger([ledger_line(one).rstrip("\n") for one in records])

    def find_back(self, published: int | None, newest: int | None) -> None:
        """See `Records.find_back`."""
        look = partial(found_back, self._store, self._origin, published, newest)
        self._publishing.find_back(look)

    def results(self) -> list[Event]:
        """See `Records.results`."""
        self._recorder.keep_up()
        return [*self._publishing.poll(), *self._sinks.poll(self._cluster.lines())]

    def close(self, status: str, why: str | None, *, steps: int, at_once: bool) -> dict[str, Any]:
        """Write the last events, and the summary; returns that."""
        for notice in self._sinks.poll(self._cluster.lines()):
            self.log(notice)
        for notice in self._sinks.close(status, at_once=at_once):
            self.log(notice)
        self.log(RunFinished(status=status, steps=steps, error=why))
        plan = self._cluster.plan
        predicted = None if plan is None else asdict(plan.predicted)
        return self._recorder.publish_summary(predicted=predicted).to_record()


class LogSinks:
    """Trackers and the members' own logs. What goes wrong with them is a notice, once."""

    def __init__(self, session: Session) -> None:
        folder, self._observer = session.directory.path, session.observer
        self._journals: Journals | None = Journals(folder / "logs")
        self._trackers: Trackers | None = Trackers(session.job, folder, version=__version__)
        self._trouble: list[Noticed] = []

    def add(self, t: float, step: int, values: Mapping[str, float]) -> None:
        """Tell trackers the measures after `step` steps. Returns at once."""
        if self._trackers is not None:
            self._trackers.add(t, step, values)

    def poll(self, lines: Iterable[LogLines]) -> list[Noticed]:
        """Write what members' logs say; returns what went wrong since the last call."""
        try:
            for one in lines:
                self._show(one)
                if self._journals is not None:
                    self._journals.write(one.member, one.lines)
        except OSError as error:  # a full disk: what the run needs to go on is not written here
            self._journals = None
            self._failed("the members' logs are no longer kept", error)
        try:
            if self._trackers is not None:
                self._trouble += self._trackers.notices()
        except OSError as error:
            self._trackers = None
            self._failed("trackers are told nothing more", error)
        found, self._trouble = self._trouble, []
        return found

    def _show(self, lines: LogLines) -> None:
        """Tell whoever watches what was printed; nothing else is done with it."""
        for record in map(json.loads, lines.lines):
            if record["logger"] == PRINTED:
                self._observer(Printed(member=lines.member, text=record["message"]))

    def close(self, status: str, *, at_once: bool) -> list[Noticed]:
        """Tell trackers how the run ended, and wait a little for them."""
        if self._trackers is None:
            return []
        try:
            if at_once:
                return self._trackers.close(status, wait_s=_AT_ONCE_S)
            return self._trackers.close(status)
        except OSError as error:
            self._failed("what trackers call the run could not be kept", error)
            return self.poll(())

    def _failed(self, what: str, error: OSError) -> None:
        self._trouble.append(Noticed(what=what, detail={"why": str(error.strerror or error)}))


def for_the_log(event: Event) -> Event:
    """The event as it is kept and shown: without what other files hold, and without secrets."""
    if isinstance(event, PartWritten):  # the manifest says what is in it
        names = ("file", "bytes", "sha256")
        part = {name: event.part["record"][name] for name in names}
        return replace(event, part=part)
    if isinstance(event, DataPrepared):
        event = brief(event)
    if isinstance(event, RolledBack):  # so has the file of the ledger
        event = replace(event, ledger={})
    return redacted(event)
