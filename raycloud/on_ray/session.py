"""One start of a run: what it is given, from where it goes on, and what all are told first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raycloud import __version__
from raycloud.checkpoint import Manifest, Store, latest, steps
from raycloud.control import ControlSettings
from raycloud.errors import RunDirectoryError, SpecError
from raycloud.events import Noticed, RunStarted
from raycloud.order import Position
from raycloud.spec.rundir import NothingSavedError
from raycloud.training.config import MemberConfig

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Event, Observed
    from raycloud.on_ray.run import StopSwitch
    from raycloud.packing.code import TaskCode
    from raycloud.report.tally import Tally
    from raycloud.spec import Job, RunDirectory
    from raycloud.task import Task

SILENCE_S = 600.0  # a step, or measuring the held-out samples, may take minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start of a run.

    Attributes:
        code: What of `task` goes to workers.
        only_steps: Ends after this many steps, whatever the job's length; None: at its end.
        asked: The job with `${NAME}` where `job` has a secret; None: it has none.
        mark: What shows members on other nodes that they see the place of its checkpoints.
    """

    job: Job
    task: type[Task]
    code: TaskCode
    directory: RunDirectory
    resume: bool
    clock: Clock
    began_s: float
    observer: Callable[[Observed], None]
    stop: StopSwitch | None
    only_steps: int | None = None
    asked: Job | None = None
    mark: str = ""

    @property
    def written(self) -> Job:
        """The job to write down: its secrets are names, where it names them."""
        return self.asked or self.job

    @property
    def checkpoints(self) -> str:
        """Where checkpoints go."""
        return self.job.checkpoint.path or str(self.directory.checkpoints.resolve())

    def config(self, data: Mapping[str, Any]) -> MemberConfig:
        """What all members are told; `data` are its fields that say where the data is."""
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

    def settings(self, origin: Origin, tally: Tally, capacity: int) -> ControlSettings:
        """Everything that control knows before the first event.

        Args:
            origin: Where the start goes on.
            tally: What the log of the run comes to.
            capacity: How many members the machines hold.
        """
        job = self.job
        return ControlSettings(
            min_workers=job.elastic.min_workers,
            max_workers=job.most_workers,
            silence_s=SILENCE_S,
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


def origin_of(session: Session, store: Store) -> Origin:
    """The beginning for a new run, the newest sound checkpoint for one that is resumed.

    Raises:
        RunDirectoryError: A new run would write among another run's checkpoints.
        NothingSavedError: A resumed one has none.
        SpecError: The run has already done more steps than are asked for.
    """
    if not session.resume:
        if there := steps(store):
            raise RunDirectoryError(
                f"{store.place} holds the checkpoints of another run (newest: step {there[-1]})",
                hint="give another checkpoint.path, or go on with that run: --resume --run-dir DIR",
            )
        return Origin(opening=(_started(session),))
    found = latest(store)
    manifest = found.manifest
    if manifest is None:
        raise NothingSavedError(
            f"{session.directory.path} has no checkpoint to resume from",
            hint="--resume allow sets its files aside and begins again, or give another --run-dir",
        )
    asked = session.job.steps
    if asked is not None and asked < manifest.step:
        raise SpecError(
            "steps",
            asked,
            f"the run has done {manifest.step} steps already",
            hint=f"write steps {manifest.step} or more",
        )
    damaged = (
        Noticed(
            what=f"the checkpoint of step {step} is damaged and was passed over",
            detail={"why": why},
        )
        for step, why in found.skipped
    )
    return Origin(
        manifest=manifest,
        step=manifest.step,
        position=Position(epoch=manifest.epoch, offset=manifest.offset),
        ledger=dict(manifest.ledger),
        generation=manifest.generation,
        opening=(_started(session, resumed_from_step=manifest.step), *damaged),
    )


def _started(session: Session, **more: Any) -> RunStarted:
    return RunStarted(job=session.job.name, version=__version__, **more)
