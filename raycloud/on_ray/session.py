"""One start of a run: what it is given, from where it goes on, and what it ends with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from raycloud import errors
from raycloud.control import ControlSettings
from raycloud.errors import SpecError
from raycloud.events import CheckpointPublished, Noticed, SyncAsked, SyncPoint
from raycloud.order import Position
from raycloud.spec import RunDirectory
from raycloud.spec.load import point_of
from raycloud.spec.rundir import Range, checked_range, checked_servers, take_point
from raycloud.spec.sections import parse_point

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from raycloud.checkpoint import Manifest
    from raycloud.clock import Clock
    from raycloud.events import Event, MemberFailed, Observed
    from raycloud.on_ray.pool import ActorPool
    from raycloud.packing.code import TaskCode
    from raycloud.planner.roles import Roles
    from raycloud.report.state import Tally
    from raycloud.spec import Job
    from raycloud.task import Task
    from raycloud.worker.context import MemberConfig

SILENCE_S = 600.0  # a step, or measuring the held-out samples, may take minutes


class StopSwitch(Protocol):
    """What a caller turns to ask a run to checkpoint and end."""

    @property
    def reason(self) -> str | None:
        """Why; None until someone asks."""
        ...


class RunHandle:
    """What a caller holds of a run: it may be stopped, and have other workers, servers or codecs.

        handle = raycloud.RunHandle()
        threading.Thread(target=raycloud.train, args=(job,), kwargs={"stop": handle}).start()
        handle.resize(1, 4)

    Any thread may call it.
    """

    def __init__(self) -> None:
        """Ask for nothing yet."""
        self.reason: str | None = None
        self._turn = Lock()
        self._range: Range | None = None
        self._point: dict[str, Any] | None = None
        self._servers: int | None = None

    def stop(self, reason: str = "asked to stop") -> None:
        """Ask for a checkpoint and the end; the first reason stays."""
        self.reason = self.reason or reason

    def resize(self, min_workers: int, max_workers: int) -> None:
        """Ask for at least and at most so many workers, from soon on.

        Raises:
            ValueError: That is no range of workers.
        """
        with self._turn:
            self._range = checked_range(min_workers, max_workers)

    def take_range(self) -> Range | None:
        """What was asked for since the last call; None: nothing."""
        with self._turn:
            found, self._range = self._range, None
        return found

    def resync(self, point: str) -> None:
        """Ask for another way of updates from soon on, as `raycloud set` does: `codec=int4`.

        Raises:
            ValueError: That names none.
        """
        with self._turn:
            self._point = parse_point(point)

    def take_point(self) -> dict[str, Any] | None:
        """What was asked for since the last call; None: nothing."""
        with self._turn:
            found, self._point = self._point, None
        return found

    def reshard(self, servers: int) -> None:
        """Ask for so many servers, each with a part of what all have, from soon on.

        Raises:
            ValueError: That is no number of servers.
        """
        with self._turn:
            self._servers = checked_servers(servers)

    def take_servers(self) -> int | None:
        """What was asked for since the last call; None: nothing."""
        with self._turn:
            found, self._servers = self._servers, None
        return found


def passed_over(wish: str, error: Exception) -> Noticed:
    """What the log says of a wish for others that cannot be."""
    return Noticed(what=f"a wish for other {wish} was passed over", detail={"why": str(error)})


class Seats(Protocol):
    """Where several runs get their places: see `raycloud.on_ray.seats`."""

    def lease(
        self, run: str, fewest: int, most: int, *, fresh: bool
    ) -> AbstractContextManager[ActorPool]:
        """Places for so many members of a run, as a pool, until the run is over.

        `fresh`: its processes are of no use to other runs.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that ended well: all steps done, or stopped on request after a checkpoint.

    Attributes:
        status: `finished` or `stopped`.
        directory: Where everything it left lies.
        summary: What `summary.json` says.
    """

    status: str
    directory: Path
    summary: dict[str, Any]

    @property
    def events(self) -> list[Event]:
        """Everything that happened, in order."""
        from raycloud.report.log import read_events

        return [event for _, event in read_events(RunDirectory(self.directory).events_jsonl)]

    @property
    def metrics(self) -> dict[str, float]:
        """The measures of the held-out samples at the end."""
        return dict(self.summary["eval"])

    @property
    def checkpoint(self) -> str | None:
        """Where the newest checkpoint lies; None where there is none."""
        found = (e.path for e in reversed(self.events) if isinstance(e, CheckpointPublished))
        return next(found, None)

    def __repr__(self) -> str:
        """The summary, as the command line shows it."""
        from raycloud.report.summary import Summary
        from raycloud.report.summary_text import summary_text

        return summary_text(Summary.from_record(self.summary), self.directory)

    def _repr_html_(self) -> str:
        from raycloud.report.summary import Summary
        from raycloud.report.summary_text import summary_html

        return summary_html(Summary.from_record(self.summary), self.directory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start of a run.

    Attributes:
        code: What of `task` goes to workers.
        asked: The job with `${NAME}` where `job` has a secret: what is written down.
        only_steps: Ends after this many steps, whatever the job's length; None: at its end.
        mark: What shows members on other nodes that they see the place of its checkpoints.
        seats: Where its members get their places from; None: it reserves its own.
        roles: Which nodes train, and which make batches; None: that was not chosen.
    """

    job: Job
    asked: Job
    task: type[Task]
    code: TaskCode
    directory: RunDirectory
    resume: bool
    clock: Clock
    began_s: float
    observer: Callable[[Observed], None]
    stop: StopSwitch | None
    only_steps: int | None = None
    mark: str = ""
    seats: Seats | None = None
    roles: Roles | None = None

    @property
    def checkpoints(self) -> str:
        """Where checkpoints go."""
        return self.job.checkpoint.path or str(self.directory.checkpoints.resolve())

    def config(self, data: Mapping[str, Any]) -> MemberConfig:
        """What all members are told; `data` are its fields that say where the data is."""
        from raycloud.worker.context import MemberConfig  # loads torch; a pool does not

        return MemberConfig(
            member=-1,
            node="",
            address="",
            job=self.code.named_in(self.job),
            task=self.code,
            checkpoints=self.checkpoints,
            mark=self.mark,
            only_steps=self.only_steps,
            **data,
        )

    @property
    def autoscales(self) -> bool:
        """Whether Ray's autoscaler is asked for machines; seats are a sweep's to ask for."""
        return self.job.elastic.autoscale and self.seats is None

    def asked_points(self) -> list[Event]:
        """Another way of updates, where one is asked for that the job could have asked for."""
        handle = self.stop if isinstance(self.stop, RunHandle) else None
        try:
            told = None if handle is None else handle.take_point()
            told = told or take_point(self.directory.path)
            if told is None:
                return []
            return [SyncAsked(point=asdict(point_of(self.job, told)))]
        except (ValueError, SpecError) as error:
            return [passed_over("updates", error)]

    def settings(self, origin: Origin, tally: Tally, capacity: int) -> ControlSettings:
        """Everything that control knows before the first event."""
        job, resumed = self.job, tally.sync if self.resume else None
        # What the job says now counts, where that is another than it was.
        known = resumed is not None and SyncPoint(**resumed.given) == job.sync_point
        in_force = SyncPoint(**resumed.point) if resumed is not None and known else None
        toured = resumed is not None and known and resumed.toured
        if self.resume and in_force is None and (job.tour_points or tally.sync_asked):
            in_force = job.sync_point  # members that are there may be on their way to another
        points = [*job.tour_points, *filter(None, [in_force])]
        longest = max(job.first_period, *(one.period for one in points), 1)
        settings = ControlSettings(
            sync=job.sync_point,
            in_force=in_force,
            tour=job.tour_points,
            toured=toured,
            warm_steps=job.warm_steps,
            reads=job.reads,
            measures=job.measures,
            job_steps=self.only_steps or job.steps,
            epochs=None if job.steps is not None else job.epochs,
            exact=job.sync_point.codec == "none"
            and not job.asynchronous
            and job.resources.worker.gpus == 0,
            auto_period=job.auto_period,
            min_workers=job.elastic.min_workers,
            max_workers=job.most_workers,
            silence_s=SILENCE_S * job.round_steps(longest),  # a member tells of whole rounds
            saves=job.checkpoint.every_steps == "auto",
            most_failed=job.checkpoint.most_failed,
            capacity=capacity,
            global_batch=job.global_batch,
            micro_batch=job.micro_batch,
            drop_last=job.drop_last,
            shares=job.elastic.shares,
            step=origin.step,
            position=origin.position,
            ledger=origin.ledger if origin.step else None,
            first_generation=max(origin.generation, tally.generation) + 1,
            first_member=max(tally.spawned, default=-1) + 1,
        )
        return replace(settings, others_s=math.inf) if begins_together(job) else settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a start goes on: at the beginning, from a checkpoint, or where members are.

    Attributes:
        manifest: The checkpoint; None: there is none. Members that are there began with it.
        step: The first that is not yet committed.
        position: Where the sequence stands before that.
        ledger: What is committed, as its state.
        generation: The newest that there was; -1: none.
        opening: What the log is told first.
    """

    manifest: Manifest | None = None
    step: int = 0
    position: Position = field(default_factory=Position)
    ledger: Mapping[str, Any] = field(default_factory=dict)
    generation: int = -1
    opening: tuple[Event, ...] = ()


def begins_together(job: Job) -> bool:
    """Whether nobody may be late: with the same shares a run is to be the same bit by bit.

    Nor where nobody could join once the data has grown, or a tour would begin with each.
    """
    return job.elastic.shares != "auto" or job.data.refresh or bool(job.tour_points)


def error_of(failure: MemberFailed, where: str = "") -> errors.RaycloudError:
    """The error that a member sent by name, as its own kind; `where` is put before its message."""
    kind = getattr(errors, failure.error, errors.InternalError)
    if kind is errors.SpecError:  # it has no field of the job file to name here
        kind = errors.JobError
    made: errors.RaycloudError = kind(where + failure.message, hint=failure.hint)
    return made
