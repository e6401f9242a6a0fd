"""What the user's code must keep to, checked where a member first meets it."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

from raycloud.errors import DataError, RaycloudError, SpecError, TaskError
from raycloud.order import Steps, stream_seed
from raycloud.packing.code import TaskCode
from raycloud.spec.mistakes import NOT_SET, Mistake, refusal
from raycloud.training.randomness import everything, restore, seed_everything

if TYPE_CHECKING:
    from raycloud.spec import Job
    from raycloud.task import Task


_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TASK_STREAM = 6
_AFTER_IMPORT: dict[tuple[str, int], Any] = {}  # by code and seed


class RaisedError(TaskError):
    """The user's code raised: on other samples it may not, and with less at once."""


class DrawnError(RaisedError):
    """A pass drew from numpy's or Python's generator before anything was known of that."""


def raised(what: str, error: BaseException) -> TaskError:
    """The task's fault for what its code raised; `what` begins the sentence: `Task.data`.

    `SystemExit` and `KeyboardInterrupt`, which here come from the task's code alone, ask to end:
    nothing is computed again, or skipped, because of them.
    """
    kind = RaisedError if isinstance(error, Exception) else TaskError
    text = str(error)
    return kind(f"{what} raised {type(error).__name__}" + (f": {text}" if text else ""))


def check_settings(kind: type[Task], job: Job) -> None:
    """Refuse settings that the task's constructor does not take, or lacks, before anything starts.

    Raises:
        SpecError: Names the setting, and the one that was probably meant.
    """
    try:
        parameters = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # a constructor that Python cannot look into
        return
    known = [p.name for p in parameters if p.kind in _BY_NAME]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    where = f"{kind.__qualname__}.__init__"
    for name in () if takes_all else sorted(job.settings.keys() - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        listed = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        hint = f"did you mean {near[0]}?" if near else listed
        raise SpecError(f"settings.{name}", job.settings[name], f"{where} has none", hint=hint)
    lacking = [p.name for p in parameters if p.kind in _BY_NAME and p.default is p.empty]
    for name in sorted(set(lacking) - job.settings.keys()):
        hint = f"give it in the job file, or with --set settings.{name}=VALUE"
        raise refusal(
            [
                Mistake(
                    field=f"settings.{name}", value=NOT_SET, problem=f"{where} needs it", hint=hint
                )
            ]
        )


def construct(kind: type[Task] | TaskCode, job: Job) -> Task:
    """The task, made from the job's settings.

    What it draws without a generator of its own, and what `Task.data` draws afterwards, is the same
    in each process: all global generators begin with the job's seed before its file is imported.

    Raises:
        TaskError: That, or making it, raises.
    """
    seed_everything(stream_seed(job.seed, _TASK_STREAM))
    if isinstance(kind, TaskCode):
        kind = _imported(kind, job)
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


def _imported(code: TaskCode, job: Job) -> type[Task]:
    """The class; all generators are as importing it has left them, however often that is asked."""
    drawn = code.digest, job.seed
    kind = code.load()
    if drawn in _AFTER_IMPORT:
        restore(_AFTER_IMPORT[drawn])
    else:
        _AFTER_IMPORT[drawn] = everything()
    return kind


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
