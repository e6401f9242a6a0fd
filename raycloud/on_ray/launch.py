"""Launch of a run: its driver, cluster and records are put together here, and ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raycloud import errors
from raycloud.checkpoint import LimitedStore, marked, open_store
from raycloud.control import Control
from raycloud.errors import RaycloudError
from raycloud.events import MemberFailed, MemberLost, Noticed
from raycloud.on_ray.attach import inventory, joined
from raycloud.on_ray.checkpoints import origin_of
from raycloud.on_ray.cluster import RayCluster
from raycloud.on_ray.pool import ActorPool, SupersededError
from raycloud.on_ray.records import LogSinks, RunRecords
from raycloud.on_ray.session import Run
from raycloud.planner.inventory import require
from raycloud.report.recorder import Recorder
from raycloud.run.driver import Driver

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.commands import Finish
    from raycloud.events import Event
    from raycloud.on_ray.failover import Failover
    from raycloud.on_ray.session import Session
    from raycloud.spec import Job

_ENDS_S, _TIDIES_S = 1.0, 20.0  # for what the store is asked for when a run ends


def drive(session: Session) -> Run:
    """Carry a run out, from its first member to its summary.

    Raises:
        RaycloudError: Why it failed; log, summary and checkpoints are written.
    """
    store = LimitedStore(open_store(session.checkpoints))
    outlives = joined() and session.only_steps is None
    origin = None if outlives and session.resume else origin_of(session, store)
    nodes = inventory()
    require(nodes, session.job.resources.worker, session.job.elastic.min_workers)
    sinks = LogSinks(session)
    with (
        Recorder(
            session.directory, session.clock, started_s=session.began_s, listener=sinks.add
        ) as recorder,
        _pool(session, recorder, outlives=outlives) as (pool, found, told),
        marked(store) as mark,  # machines may be added that do not see this place
    ):
        if found is not None:
            origin = found.starts_at(session)
        origin = origin or origin_of(session, store)
        session.directory.write_job(session.written)
        session = replace(session, mark=mark)
        with contextlib.closing(
            RayCluster(session, pool, nodes, origin.manifest, lambda: recorder.written)
        ) as cluster:
            records = RunRecords(session, recorder, sinks, store, origin.manifest, cluster)
            control = Control(session.settings(origin, recorder.tally, cluster.room))
            driver = Driver(control, cluster, records, session.clock.monotonic_s)

            def begin() -> None:
                for event in (*origin.opening, *told, *_limited(session.job)):
                    records.log(event)
                if found is None:
                    cluster.begin()
                    known = origin.manifest and origin.manifest.to_bytes()
                    pool.remember({"origin": known, "pipeline": cluster.pipeline})
                    driver.start()
                    return
                for one in found.survivors:  # the log has it, and who looks on has not seen it
                    session.observer(one.ready)
                cluster.adopt(found)
                driver.take_over(found.adoption)

            return _Start(session=session, driver=driver, cluster=cluster, records=records).run(
                begin
            )


def _limited(job: Job) -> Iterator[Noticed]:
    """That more workers are allowed than a step has micro-batches for."""
    if (most := job.most_workers) < job.elastic.max_workers:
        what = f"a step has {most} micro-batches, so no more than {most} workers are used"
        yield Noticed(what=what)


@contextlib.contextmanager
def _pool(
    session: Session, recorder: Recorder, *, outlives: bool
) -> Iterator[tuple[ActorPool, Failover | None, tuple[Event, ...]]]:
    """The run's pool, the members that are there already, and what the log is told of them.

    On a cluster that was joined the pool outlives this process.
    """
    if not outlives:
        yield ActorPool(session.clock), None, ()
        return
    from raycloud.on_ray.failover import outliving

    with outliving(session, recorder) as found:
        yield found


@dataclass(frozen=True, kw_only=True)
class _Start:
    """One start, put together."""

    session: Session
    driver: Driver
    cluster: RayCluster
    records: RunRecords

    def run(self, begin: Callable[[], None]) -> Run:
        """Carry it out; `begin` asks for members, or goes on with those that are there."""
        driver = self.driver
        try:
            begin()
            finish = driver.run()
        except KeyboardInterrupt:
            self._close("stopped", "ended at once on request")
            raise
        except SupersededError:
            raise  # nothing here is this driver's any more
        except Exception as error:
            self._close(
                "failed", error.message if isinstance(error, RaycloudError) else repr(error)
            )
            raise
        finally:
            self.cluster.close()
            self.records.end(_ENDS_S if driver.finish is None else _TIDIES_S)
        driver.wind_up()
        summary = self._close(finish.status, finish.error)
        path = self.session.directory.path
        if finish.status == "failed":
            raise failure_of(driver.failure, finish, path)
        return Run(status=finish.status, directory=path, summary=summary)

    def _close(self, status: str, why: str | None) -> dict[str, Any]:
        """The last events, and the summary."""
        plan = self.cluster.plan
        return self.records.close(
            status,
            why,
            steps=self.driver.control.committed_step,
            predicted=None if plan is None else asdict(plan.predicted),
            at_once=status == "stopped" and self.driver.finish is None,
        )


def error_of(failure: MemberFailed, where: str = "") -> errors.RaycloudError:
    """The error that a member sent by name, as its own kind; `where` is put before its message."""
    kind = getattr(errors, failure.error, errors.InternalError)
    if kind is errors.SpecError:  # it has no field of the job file to name here
        kind = errors.JobError
    made: errors.RaycloudError = kind(where + failure.message, hint=failure.hint)
    return made


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
