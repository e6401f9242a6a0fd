"""Calling the user's code: what it raises is the task's fault, and says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raycloud.errors import RaycloudError, TaskError
from raycloud.training.contract import RaisedError, raised

__all__ = [
    "RaisedError",
    "call",
    "call_backward",
    "check_loss",
    "check_model",
    "check_optimizer",
    "check_scheduler",
    "goes_by_measured",
]

_NEEDED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call(what: str, function: Callable[[], Any]) -> Any:
    """Call the user's code; what it raises is the task's fault and says so."""
    try:
        return function()
    except RaycloudError:
        raise
    except BaseException as error:
        raise raised(f"Task.{what}", error) from error


def call_backward(loss: torch.Tensor) -> None:
    """The backward pass: the user's modules may have code in it."""
    try:
        loss.backward()
    except RaycloudError:
        raise
    except BaseException as error:
        raise raised("the backward pass", error) from error


def check_loss(loss: Any) -> None:
    """Refuse what no backward pass can begin with."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad:
        got = (
            f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            if isinstance(loss, torch.Tensor)
            else type(loss).__name__
        )
        raise TaskError(
            f"Task.loss returned {got}",
            hint="return the mean loss of the batch: a tensor without dimensions, with a gradient",
        )


def check_model(model: Any) -> None:
    """Refuse what is no model, or one whose parameters have no shape yet.

    Raises:
        TaskError: Names what was returned, or the parameter.
    """
    if not isinstance(model, nn.Module):
        raise TaskError(f"Task.model returned {_named(model)}", hint="return a torch.nn.Module")
    tensors = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise TaskError(
            f"{lazy[0]!r} of the model has no shape yet: a lazy module finds it in its first pass",
            hint="let Task.model pass one batch of the right shape through the model before it "
            "returns it, or give the module its sizes",
        )


def check_optimizer(optimizer: Any) -> None:
    """Refuse what is not one optimizer whose `step` goes by the gradients that are there.

    What has the methods of `torch.optim.Optimizer` will do: some wrap one.

    Raises:
        TaskError: Names what was returned.
    """
    methods = ("step", "zero_grad", "state_dict", "load_state_dict", "param_groups")
    kind = _named(optimizer)
    if isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in methods):
        raise TaskError(
            f"Task.optimizer returned {kind}",
            hint="return one torch.optim.Optimizer, made with the model's parameters: its "
            "parameter groups may have settings of their own, and Task.scheduler returns the "
            "schedule",
        )
    needed = _needed(optimizer.step)
    if isinstance(optimizer, LBFGS) or needed:
        asks = needed[0] if needed else "closure"
        raise TaskError(
            f"Task.optimizer returned {kind}, whose step() needs {asks!r}: an optimizer that "
            "computes the loss again is not there yet",
            hint="return one that goes by the gradients alone, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, SparseAdam):
        raise TaskError(
            "Task.optimizer returned SparseAdam: gradients are exchanged as dense tensors",
            hint="return torch.optim.Adam, which does the same with them",
        )


def check_scheduler(scheduler: Any, measures_every: int | None = None) -> None:
    """Refuse what is no schedule that is stepped once per step, or after each measuring.

    Args:
        scheduler: What was returned.
        measures_every: Steps between two measurements; None: there is one, at the end.

    Raises:
        TaskError: Names what was returned.
    """
    if scheduler is None:
        return
    methods = ("step", "state_dict", "load_state_dict")
    kind = _named(scheduler)
    if isinstance(scheduler, type) or not all(hasattr(scheduler, name) for name in methods):
        raise TaskError(
            f"Task.scheduler returned {kind}",
            hint="return one schedule, such as those of torch.optim.lr_scheduler, or None: "
            "SequentialLR and ChainedScheduler join several",
        )
    measured = goes_by_measured(scheduler)
    if measured and measures_every is None:
        raise TaskError(
            f"Task.scheduler returned {kind}, which goes by what is measured, and "
            "evaluate.every_steps is null: nothing is measured before the end",
            hint="set evaluate.every_steps, such as 100: the schedule is stepped after each",
        )
    if not measured and (needed := _needed(scheduler.step)):
        raise TaskError(
            f"Task.scheduler returned {kind}, whose step() needs {needed[0]!r}",
            hint="return a schedule whose step() can be called without arguments, once per step; "
            "or with `metrics` alone, after each measuring, as ReduceLROnPlateau",
        )


def goes_by_measured(scheduler: Any) -> bool:
    """Whether a schedule is stepped by what is measured, as `ReduceLROnPlateau`."""
    return isinstance(scheduler, ReduceLROnPlateau) or (
        scheduler is not None and _needed(scheduler.step) == ["metrics"]
    )


def _named(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else type(value).__name__


def _needed(function: Callable[..., Any]) -> list[str]:
    """Arguments without which it cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function that Python cannot look into
        return []
    return [p.name for p in parameters if p.kind in _NEEDED and p.default is p.empty]
