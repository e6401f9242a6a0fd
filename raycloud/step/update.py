"""The update: the optimizer's step by the mean gradients, and which parameters it moves.

What is exchanged, cleared and checkpointed are the parameters of the model that require a gradient
and that a group of the optimizer has, laid out once before the first step. What it would move
beside these would be moved by each member with its own gradient, and is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from raycloud.errors import TaskError
from raycloud.order import stream_seed
from raycloud.step.contract import call
from raycloud.step.randomness import Randomness, others_state

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

    from raycloud.task import Task

_UPDATE_STREAM = 4
_NAMED = 3  # of many
_UNFREEZE = (
    "let it require a gradient from the start: until it is to move, compute its part of the model "
    "under torch.no_grad() (what has no gradient is left as it is), or give its group lr=0"
)


class TrainedParameters:
    """Finds what is trained, and sees that it stays that.

    `parameters`, by name in the model's order, are exchanged. Those that are `idle` require a
    gradient, but no group has them: their gradients are neither exchanged nor part of the
    gradient's norm. `TaskError`: the optimizer has parameters that the model has not, or nothing is
    trained.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._count = _count(optimizer)
        moved = [p for group in optimizer.param_groups for p in group["params"]]
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
        """`TaskError` for what is trained since the start, before the update that would move it.

        Only parameters that were frozen at the start are looked at, two attributes of each.
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
        """`TaskError` for what was added to the optimizer since the start."""
        count = _count(self.optimizer)
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


def _count(optimizer: Optimizer) -> int:
    return sum([len(group["params"]) for group in optimizer.param_groups])


def _refused(task: Task, outside: list[torch.Tensor]) -> TaskError:
    held = [found for name, value in vars(task).items() for found in _inside(name, value)]
    found = {id(p): f"the task's {where}" for where, p in held}
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


def _inside(where: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that an attribute of the task holds, by where they stand."""
    if isinstance(value, torch.Tensor):
        yield where, value
    elif isinstance(value, nn.Module):
        for name, parameter in value.named_parameters():
            yield f"{where}.{name}", parameter
    elif isinstance(value, dict | list | tuple):
        pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, held in pairs:
            if isinstance(held, torch.Tensor | nn.Module):
                yield from _inside(f"{where}[{key!r}]", held)


class Update:
    """Steps optimizer and schedule by the gradients that are there, seeded alike everywhere.

    The first one shows whether numpy's and Python's generators have to be seeded, too. The
    `scheduler` is None where it is not stepped once per step.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        scheduler: LRScheduler | None,
        randomness: Randomness,
        seed: int,
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._trained, self._scheduler = trained, scheduler
        self._randomness, self._seed, self._notice = randomness, seed, notice
        self._draws = True  # from numpy's or Python's generator; or none was made yet

    def apply(self, step: int) -> None:
        """Move the parameters; `TaskError`: the task's code raised, or others are trained."""
        self._trained.check(step)
        randomness, everything = self._randomness, self._draws
        randomness.seed(stream_seed(self._seed, _UPDATE_STREAM, step), everything=everything)
        before = others_state()
        try:
            call("Task.optimizer", self._trained.optimizer.step)
            if self._scheduler is not None:
                call("Task.scheduler", self._scheduler.step)
            self._draws = others_state() != before
        finally:
            randomness.release()
        if self._draws and not everything:
            what = "the optimizer began to draw from numpy's or Python's generator: in this step "
            what += "replicas may have drawn unlike numbers, from now on they draw the same"
            self._notice(what, {"step": step})
        self._trained.check_groups(step + 1)
        self._trained.clear()


# Private names of torch, which has no public one for this. Where they are others, it loads its
# compiler as it did; a test holds them.
_UNTRACED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_DISABLED = "__dynamo_disable"
_BREAKS = "_use_grad"


def without_compiler() -> None:
    """Let torch's optimizers do their work, from now on in this process, without its compiler.

    torch loads all of its compiler as soon as an optimizer is made, and asks for it again in each
    step, to tell it what not to trace: 800 modules, a second of processor time and more than 100 MB
    on the way to a worker's first step. The task may compile what it likes; an optimizer's step
    that is compiled is traced as a whole.
    """
    for name in _UNTRACED:
        plain = getattr(getattr(Optimizer, name, None), "__wrapped__", None)
        if plain is not None and not hasattr(plain, _DISABLED):
            setattr(plain, _DISABLED, plain)
    found = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds: list[Any] = [kind for kind in found if issubclass(kind, Optimizer)]
    for kind in kinds:
        step = vars(kind).get("step")
        if getattr(getattr(step, "__code__", None), "co_name", "") == _BREAKS:
            kind.step = _stepping(step.__wrapped__)


def _stepping(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose gradients are recorded where they were before."""

    @functools.wraps(step)
    def plain(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return plain
