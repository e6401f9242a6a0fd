"""Calling the user's code: what it raises is the task's fault, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raycloud.errors import RaycloudError, TaskError
from raycloud.training.contract import RaisedError, raised

__all__ = ["RaisedError", "call", "call_backward", "check_loss"]


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
