"""torch's optimizers without its compiler, where nothing is compiled.

torch loads all of its compiler as soon as an optimizer is made, and asks for it again in each step,
to tell it what not to trace: 800 modules, a second of processor time and more than 100 MB, on the
way to a worker's first step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

# Private names of torch, which has no public one for this. Where they are others, it loads its
# compiler as it did; a test holds them.
_UNTRACED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
_DISABLED = "__dynamo_disable"
_BREAKS = "_use_grad"


def without_compiler() -> None:
    """Let torch's optimizers do their work, from now on in this process, and nothing beside it.

    The task may compile what it likes; an optimizer's step that is compiled is traced as a whole.
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
