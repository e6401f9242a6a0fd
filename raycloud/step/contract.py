"""The contract of the user's code: how it is called, and what it must keep to.

What it raises is the task's fault, and says so.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raycloud.errors import DataError, RaycloudError, SpecError, TaskError
from raycloud.order import Steps, stream_seed
from raycloud.packing.code import TaskCode
from raycloud.spec.mistakes import NOT_SET, mistake
from raycloud.step.randomness import everything, restore, seed_everything

if TYPE_CHECKING:
    from raycloud.spec import Job
    from raycloud.task import Task

_BY_NAME = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NEEDED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TASK_STREAM = 6
_AFTER_IMPORT: dict[tuple[str, int], Any] = {}  # by code and seed


class RaisedError(TaskError):
    """The user's code raised: on other samples it may not, and with less at once."""


class DrawnError(RaisedError):
    """A pass drew from numpy's or Python's generator before anything was known of that."""


def raised(what: str, error: BaseException, where: str = "") -> TaskError:
    """The task's fault for what its code raised; `what` begins the sentence: `Task.data`.

    `SystemExit` and `KeyboardInterrupt`, which here come from the task's code alone, ask to end:
    nothing is computed again, or skipped, because of them.
    """
    kind = RaisedError if isinstance(error, Exception) else TaskError
    text = f": {error}" if str(error) else ""
    return kind(f"{what} raised {type(error).__name__}{text}{where}")


def call(what: str, function: Callable[[], Any], where: Callable[[], str] = str) -> Any:
    """Call the user's code; what it raises is the task's fault, see `raised`."""
    try:
        return function()
    except RaycloudError:
        raise
    except BaseException as error:
        raise raised(what, error, where()) from error


def check_settings(kind: type[Task], job: Job) -> None:
    """Refuse settings that the task's constructor does not take, or lacks; names the nearest."""
    if (parameters := _parameters(kind)) is None:
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
        field, problem = f"settings.{name}", f"{where} needs it"
        hint = f"give it in the job file, or with --set {field}=VALUE"
        raise mistake(field, NOT_SET, problem, hint)


def construct(kind: type[Task] | TaskCode, job: Job) -> Task:
    """The task, made from the job's settings; `TaskError`: that raises.

    What it draws without a generator of its own, and what `Task.data` draws afterwards, is the same
    in each process: all global generators begin with the job's seed before its file is imported.
    """
    seed_everything(stream_seed(job.seed, _TASK_STREAM))
    if isinstance(kind, TaskCode):  # importing it leaves the generators as it did the first time
        drawn, code = (kind.digest, job.seed), kind
        kind = code.load()
        if drawn in _AFTER_IMPORT:
            restore(_AFTER_IMPORT[drawn])
        else:
            _AFTER_IMPORT[drawn] = everything()
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


def check_loss(loss: Any) -> None:
    """Refuse what no backward pass can begin with."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        got = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            got = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        hint = "return the mean loss of the batch: a tensor without dimensions, with a gradient"
        raise TaskError(f"Task.loss returned {got}", hint=hint)


def check_model(model: Any) -> None:
    """Refuse what is no model, or one whose parameters have no shape yet."""
    if not isinstance(model, nn.Module):
        raise _returned("model", model, hint="return a torch.nn.Module")
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise TaskError(
            f"{lazy[0]!r} of the model has no shape yet: a lazy module finds it in its first pass",
            hint="let Task.model pass one batch of the right shape through the model before it "
            "returns it, or give the module its sizes",
        )


def scale_rates(optimizer: Any, factor: float) -> None:
    """Multiply the learning rate of each group, before a schedule begins with it."""
    for group in optimizer.param_groups if factor != 1.0 else ():
        if "lr" in group:
            group["lr"] = group["lr"] * factor


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is not one optimizer whose `step` goes by the gradients that are there.

    What has the methods of `torch.optim.Optimizer` will do: some wrap one.
    """
    methods = ("step", "zero_grad", "state_dict", "load_state_dict", "param_groups")
    if isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in methods):
        hint = "return one torch.optim.Optimizer, made with the model's parameters: its parameter "
        hint += "groups may have settings of their own, and Task.scheduler returns the schedule"
        raise _returned("optimizer", optimizer, hint=hint)
    needed = _needed(optimizer.step)
    if isinstance(optimizer, LBFGS) or needed:
        asks = needed[0] if needed else "closure"
        why = f", whose step() needs {asks!r}: an optimizer that computes the loss again is not "
        hint = "return one that goes by the gradients alone, such as torch.optim.AdamW"
        raise _returned("optimizer", optimizer, f"{why}there yet", hint=hint)
    if isinstance(optimizer, SparseAdam):
        why = ": gradients are exchanged as dense tensors"
        hint = "return torch.optim.Adam, which does the same with them"
        raise _returned("optimizer", optimizer, why, hint=hint)


def check_scheduler(scheduler: Any, measures_every: int | None = None) -> None:
    """Refuse what is no schedule that is stepped once per step, or after each measuring.

    It is measured each so many steps, `measures_every`; None: once, at the end.
    """
    if scheduler is None:
        return
    methods = ("step", "state_dict", "load_state_dict")
    if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in methods):
        hint = "return one schedule, such as those of torch.optim.lr_scheduler, or None: "
        hint += "SequentialLR and ChainedScheduler join several"
        raise _returned("scheduler", scheduler, hint=hint)
    measured = goes_by_measured(scheduler)
    if measured and measures_every is None:
        why = ", which goes by what is measured, and evaluate.every_steps is null: nothing is "
        hint = "set evaluate.every_steps, such as 100: the schedule is stepped after each"
        raise _returned("scheduler", scheduler, f"{why}measured before the end", hint=hint)
    if not measured and (needed := _needed(scheduler.step)):
        hint = "return a schedule whose step() can be called without arguments, once per step; or "
        hint += "with `metrics` alone, after each measuring, as ReduceLROnPlateau"
        raise _returned("scheduler", scheduler, f", whose step() needs {needed[0]!r}", hint=hint)


def goes_by_measured(scheduler: Any) -> bool:
    """Whether a schedule is stepped by what is measured, as `ReduceLROnPlateau`."""
    return isinstance(scheduler, ReduceLROnPlateau) or (
        scheduler is not None and _needed(scheduler.step) == ["metrics"]
    )


def _returned(what: str, value: Any, why: str = "", *, hint: str) -> TaskError:
    kind = "None" if value is None else type(value).__name__
    named = f"the class {value.__name__}" if isinstance(value, type) else kind
    return TaskError(f"Task.{what} returned {named}{why}", hint=hint)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # one that Python cannot look into
        return None


def _needed(function: Callable[..., Any]) -> list[str]:
    """Arguments without which it cannot be called."""
    every = _parameters(function) or ()
    return [p.name for p in every if p.kind in _NEEDED and p.default is p.empty]
