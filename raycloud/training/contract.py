"""What the user's code must keep to, checked where a member first meets it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycloud.errors import DataError, RaycloudError, TaskError
from raycloud.order import Steps
from raycloud.task import Splits, Task
from raycloud.training.feed import random_state

if TYPE_CHECKING:
    from raycloud.spec import Job


def global_draws() -> tuple[bytes, bytes, int]:
    """Fingerprints of torch's and numpy's global generators: equal where nothing was drawn."""
    state: Any = np.random.get_state()
    return random_state(torch.device("cpu")), state[1].tobytes(), state[2]


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


def load_samples(task: Task, job: Job) -> Splits:
    """The data sets; `DataError` or `TaskError` where they cannot be read or have no length."""
    try:
        splits = task.data(job.data.path)
    except RaycloudError:
        raise
    except OSError as error:
        raise DataError(
            f"the data set could not be read: {error}", hint="check data.path"
        ) from error
    except Exception as error:
        raise TaskError(f"Task.data raised {type(error).__name__}: {error}") from error
    if not isinstance(splits, Splits):
        raise TaskError(
            f"Task.data returned {type(splits).__name__}", hint="return raycloud.Splits(train=...)"
        )
    try:
        count = len(splits.train)
    except TypeError as error:
        raise TaskError(
            f"Task.data returned training samples without a length: {error}",
            hint="return a data set with __len__ and __getitem__ (map-style)",
        ) from error
    if count == 0:
        raise DataError("the data set has no training samples", hint="check data.path")
    return splits
