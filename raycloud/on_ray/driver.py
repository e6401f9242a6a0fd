"""From one start of a run to its end: what drives it is put together here, and ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raycloud.checkpoint import LimitedStore, marked, open_store
from raycloud.control import Control
from raycloud.errors import RaycloudError
from raycloud.events import Noticed
from raycloud.on_ray.cluster import inventory, joined
from raycloud.on_ray.failure import failure_of
from raycloud.on_ray.keeper import FollowedError, Keeper
from raycloud.on_ray.outlets import Outlets
from raycloud.on_ray.ray_cluster import RayCluster
from raycloud.on_ray.records import RunRecords
from raycloud.on_ray.run import Run
from raycloud.on_ray.session import origin_of
from raycloud.planning.inventory import require
from raycloud.report.recorder import Recorder
from raycloud.run.driver import Driver

if TYPE_CHECKING:
    from raycloud.events import Event
    from raycloud.on_ray.session import Session
    from raycloud.on_ray.takeover import Takeover
    from raycloud.on_ray.tenure import Tenure

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
    outlets = Outlets(session)
    with (
        Recorder(
            session.directory, session.clock, started_s=session.began_s, listener=outlets.add
        ) as recorder,
        _held(session, recorder, outlives=outlives) as (keeper, taken, told),
        marked(store) as mark,  # machines may be added that do not see this place
    ):
        if taken is not None:
            origin = taken.starts_at(session)
        origin = origin or origin_of(session, store)
        session.directory.write_job(session.written)
        session = replace(session, mark=mark)
        with contextlib.closing(
            RayCluster(session, keeper, nodes, origin.manifest, lambda: recorder.written)
        ) as cluster:
            records = RunRecords(session, recorder, outlets, store, origin.manifest, cluster)
            control = Control(session.settings(origin, recorder.tally, cluster.room))
            start = _Start(
                session=session,
                driver=Driver(control, cluster, records, session.clock.monotonic_s),
                cluster=cluster,
                records=records,
                keeper=keeper,
                taken=taken,
                known={"origin": origin.manifest and origin.manifest.to_bytes()},
            )
            return start.run((*origin.opening, *told))


@contextlib.contextmanager
def _held(
    session: Session, recorder: Recorder, *, outlives: bool
) -> Iterator[tuple[Keeper | Tenure, Takeover | None, tuple[Event, ...]]]:
    """What makes and holds the run's processes; on a cluster that was joined it outlives this one.

    Yields:
        That, the members that are there already, and what the log is told of them.
    """
    if not outlives:
        yield Keeper(session.clock), None, ()
        return
    from raycloud.on_ray.takeover import held

    with held(session, recorder) as found:
        yield found


@dataclass(frozen=True, kw_only=True)
class _Start:
    """One start, put together.

    Attributes:
        taken: Members that are there already.
        known: What a driver that takes the run over has to know.
    """

    session: Session
    driver: Driver
    cluster: RayCluster
    records: RunRecords
    keeper: Keeper | Tenure
    taken: Takeover | None
    known: Mapping[str, Any]

    def run(self, opening: Iterable[Event]) -> Run:
        """Carry it out; `opening` is what the log is told first."""
        driver = self.driver
        try:
            for event in opening:
                self.records.log(event)
            self._begin()
            finish = driver.run()
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
            self.cluster.close()
            self.records.end(_ENDS_S if driver.finish is None else _TIDIES_S)
        driver.wind_up()
        summary = self._close(finish.status, finish.error)
        path = self.session.directory.path
        if finish.status == "failed":
            raise failure_of(driver.failure, finish, path)
        return Run(status=finish.status, directory=path, summary=summary)

    def _begin(self) -> None:
        """Ask for members, or go on with those that are there."""
        job, taken = self.session.job, self.taken
        if (most := job.most_workers) < job.elastic.max_workers:
            what = f"a step has {most} micro-batches, so no more than {most} workers are used"
            self.records.log(Noticed(what=what))
        if taken is None:
            self.cluster.begin()
            self.keeper.remember({**self.known, "pipeline": self.cluster.pipeline})
            self.driver.start()
            return
        for one in taken.survivors:  # the log has it, and who looks on has not seen it
            self.session.observer(one.ready)
        self.cluster.adopt(taken)
        self.driver.take_over(taken.adoption)

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
