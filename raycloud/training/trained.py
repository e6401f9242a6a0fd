"""Trained parameters: what the optimizer moves is what is exchanged, cleared and checkpointed.

The three are laid out once, before the first step: the parameters of the model that require a
gradient and that a group of the optimizer has. What the optimizer would move beside these, from
whichever step on, would be moved by each member with its own gradient, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from raycloud.errors import TaskError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from raycloud.task import Task

_NAMED = 3  # of many
_UNFREEZE = (
    "let it require a gradient from the start: until it is to move, compute its part of the model "
    "under torch.no_grad() (what has no gradient is left as it is), or give its group lr=0"
)


class Trained:
    """Finds what is trained, and sees that it stays that.

    Args:
        task: The user's, to say where a parameter comes from.
        model: Its model.
        optimizer: Its optimizer.

    Attributes:
        parameters: Names and parameters that are exchanged, in the model's order.
        idle: Those that require a gradient, but no group has them: they stay as they are, so their
            gradients are neither exchanged nor part of the gradient's norm.

    Raises:
        TaskError: The optimizer has parameters that the model has not, or nothing is trained.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        """Look at each parameter once."""
        self._optimizer = optimizer
        self._count = _count(optimizer)
        moved = list(_moved(optimizer))
        known = {id(p) for p in model.parameters()}
        if outside := [p for p in moved if id(p) not in known]:
            raise _refused(task, outside)
        mine = {id(p) for p in moved}
        every = list(model.named_parameters())
        self.parameters = [(n, p) for n, p in every if p.requires_grad and id(p) in mine]
        self.idle = [(n, p) for n, p in every if p.requires_grad and id(p) not in mine]
        self._frozen = [(n, p) for n, p in every if not p.requires_grad and id(p) in mine]
        if not self.parameters:
            raise TaskError(
                "the optimizer has no parameter that requires a gradient"
                if self.idle
                else "the model has no parameter that requires a gradient",
                hint="check Task.optimizer" if self.idle else "check Task.model",
            )

    def check(self, step: int) -> None:
        """Refuse what is trained since the start, before the update that would move it.

        Only parameters that were frozen at the start are looked at, two attributes of each.

        Raises:
            TaskError: Names the parameter.
        """
        self.check_groups(step)
        for name, parameter in self._frozen:
            if parameter.requires_grad or parameter.grad is not None:
                raise TaskError(
                    f"parameter {name!r} was frozen at the start and requires a gradient at step "
                    f"{step}: what is unfrozen on the way is not exchanged",
                    hint=_UNFREEZE,
                )

    def check_groups(self, step: int) -> None:
        """Refuse what was added to the optimizer since the start.

        Raises:
            TaskError: Says how much it has.
        """
        count = _count(self._optimizer)
        if count != self._count:
            raise TaskError(
                f"the optimizer has {count} parameters at step {step}, and had {self._count} at "
                "the start: what is added on the way is not exchanged",
                hint="give the optimizer all of its groups in Task.optimizer; " + _UNFREEZE,
            )

    def clear(self) -> None:
        """Forget the gradients that nobody asks for."""
        for _, parameter in self.idle:
            parameter.grad = None


def _moved(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _count(optimizer: Optimizer) -> int:
    return sum([len(group["params"]) for group in optimizer.param_groups])


def _refused(task: Task, outside: list[torch.Tensor]) -> TaskError:
    found = {id(p): where for where, p in _of_task(task)}
    names = [
        found.get(id(p), f"one of shape {tuple(p.shape)} that no attribute of the task holds")
        for p in outside
    ]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    many = "a parameter that is" if len(names) == 1 else f"{len(names)} parameters that are"
    return TaskError(
        f"the optimizer has {many} not the model's: {', '.join(names[:_NAMED])}{more}; "
        "only the model's are exchanged and kept in checkpoints",
        hint="make them part of what Task.model returns, such as an nn.ModuleDict of the model and "
        "the criterion, and use them from there in Task.loss",
    )


def _of_task(task: Task) -> Iterator[tuple[str, torch.Tensor]]:
    """What the task itself holds, by where it stands."""
    for attribute, value in vars(task).items():
        yield from _inside(f"the task's {attribute}", value)


def _inside(where: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            yield f"{where}.{name}", parameter
    elif isinstance(value, dict | list | tuple):
        pairs: Iterable[tuple[object, object]]
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            if isinstance(held, torch.Tensor | nn.Module):
                yield from _inside(f"{where}[{key!r}]", held)
