"""What the user's code must keep to, checked where a member first meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.errors import DataError, RaycloudError, TaskError
from raycloud.order import Steps

if TYPE_CHECKING:
    from raycloud.spec import Job
    from raycloud.task import Task


def construct(kind: type[Task], job: Job) -> Task:
    """The task, made from the job's settings; `TaskError` where that raises."""
    try:
        return kind(**job.settings)
    except RaycloudError:
        raise
    except Exception as error:
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
