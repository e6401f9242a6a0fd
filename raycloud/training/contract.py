"""What the user's code must keep to, checked where a member first meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.errors import DataError, RaycloudError, TaskError
from raycloud.order import Steps

if TYPE_CHECKING:
    from raycloud.spec import Job
    from raycloud.task import Task


class RaisedError(TaskError):
    """The user's code raised: on other samples it may not, and with less at once."""


def raised(what: str, error: BaseException) -> TaskError:
    """The task's fault for what its code raised; `what` begins the sentence: `Task.data`.

    `SystemExit` and `KeyboardInterrupt`, which here come from the task's code alone, ask to end:
    nothing is computed again, or skipped, because of them.
    """
    kind = RaisedError if isinstance(error, Exception) else TaskError
    text = str(error)
    return kind(f"{what} raised {type(error).__name__}" + (f": {text}" if text else ""))


def construct(kind: type[Task], job: Job) -> Task:
    """The task, made from the job's settings; `TaskError` where that raises."""
    try:
        return kind(**job.settings)
    except RaycloudError:
        raise
    except BaseException as error:
        raise TaskError(
            f"the task could not be made from settings {sorted(job.settings)}: "
            f"{type(error).__name__}: {error}",
            hint="`settings` are the keyword arguments of the task's constructor",
        ) from error


def cut(job: Job, samples: int) -> Steps:
    """How the sequence is cut into steps; `DataError` where there is too little for one."""
    try:
        return Steps(
            samples=samples,
            global_batch=job.global_batch,
            micro_batch=job.micro_batch,
            drop_last=job.drop_last,
        )
    except ValueError as error:
        raise DataError(
            f"the data set is too small: {error}",
            hint="lower global_batch, set drop_last to false, or give more data",
        ) from error
