"""One start of a run: what it is given, and from where it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.checkpoint import Found, Store, latest, steps
from raycloud.errors import RunDirectoryError, SpecError
from raycloud.spec.rundir import NothingSavedError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Observed
    from raycloud.on_ray.run import StopSwitch
    from raycloud.on_ray.takeover import Takeover
    from raycloud.on_ray.tenure import Tenure
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job, RunDirectory
    from raycloud.task import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start of a run.

    Attributes:
        code: What of `task` goes to workers.
        only_steps: Ends after this many steps, whatever the job's length; None: at its end.
        asked: The job with `${NAME}` where `job` has a secret; None: it has none.
        mark: What shows members on other nodes that they see the place of its checkpoints.
        tenure: Holds what it makes, and outlives it; None: what it makes ends with it.
        taken: Members that it goes on with; None: it starts its own.
        not_taken: Why members that it found were ended instead; empty: there were none.
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
    tenure: Tenure | None = None
    taken: Takeover | None = None
    not_taken: str = ""

    @property
    def written(self) -> Job:
        """The job to write down: its secrets are names, where it names them."""
        return self.asked or self.job

    @property
    def checkpoints(self) -> str:
        """Where checkpoints go."""
        return self.job.checkpoint.path or str(self.directory.checkpoints.resolve())


def origin_of(session: Session, store: Store) -> Found:
    """The checkpoint to go on from: none for a new run, the newest sound one for a resumed one.

    Where members go on it is the one that they began with.

    Raises:
        RunDirectoryError: A new run would write among another run's checkpoints.
        NothingSavedError: A resumed one has none.
        SpecError: The run has already done more steps than are asked for.
    """
    if session.taken is not None:
        return Found(manifest=session.taken.origin)
    if not session.resume:
        if there := steps(store):
            raise RunDirectoryError(
                f"{store.place} holds the checkpoints of another run (newest: step {there[-1]})",
                hint="give another checkpoint.path, or go on with that run: --resume --run-dir DIR",
            )
        return Found(manifest=None)
    found = latest(store)
    if found.manifest is None:
        raise NothingSavedError(
            f"{session.directory.path} has no checkpoint to resume from",
            hint="--resume allow sets its files aside and begins again, or give another --run-dir",
        )
    asked = session.job.steps
    if asked is not None and asked < found.manifest.step:
        raise SpecError(
            "steps",
            asked,
            f"the run has done {found.manifest.step} steps already",
            hint=f"write steps {found.manifest.step} or more",
        )
    return found
