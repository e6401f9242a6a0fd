"""What an optimizer was made with: a run that goes on with other settings goes by those.

A checkpoint has the rates that a schedule has come to, and a task makes its optimizer with those of
its settings. Where these are others than when the run was started, what the schedule has done so
far is kept, as a ratio: a rate that has decayed to a tenth is a tenth of the new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raycloud.step.stateful import Stateful

if TYPE_CHECKING:
    import torch

_RATE, _FIRST = "lr", "initial_lr"  # of a group: the rate now, and where its schedule began
_PLAIN = (int, float)


class Hyperparameters(Stateful):
    """Numbers of the optimizer's groups as they were made; follows the part that has its state.

    Args:
        optimizer: It has not taken a step; its schedule, if any, has begun with it.
        scheduler: That schedule.
    """

    name = "hyperparameters"

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._made = [_plain(group) for group in optimizer.param_groups]

    def values(self) -> dict[str, Any]:
        """See `Stateful.values`."""
        return {"groups": self._made}

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has none
        """See `Stateful.load`: what was made otherwise than in `values` is as it was made here."""
        groups = self._optimizer.param_groups
        for at, (group, was, now) in enumerate(
            zip(groups, values["groups"], self._made, strict=True)
        ):
            for name in now.keys() & was.keys() - {_RATE}:
                if now[name] != was[name] and name in group:
                    kind = type(group[name])
                    group[name] = kind(now[name]) if kind is tuple else now[name]
            if was.get(_RATE) and now.get(_RATE) is not None and now[_RATE] != was[_RATE]:
                self._scale(at, now[_RATE] / was[_RATE])

    def _scale(self, at: int, ratio: float) -> None:
        """The rate of a group, and where its schedules count from."""
        group = self._optimizer.param_groups[at]
        for name in (_RATE, _FIRST):
            if name in group:
                group[name] = group[name] * ratio
        for schedule in _all_of(self._scheduler):
            for name in ("base_lrs", "_last_lr"):
                rates: Any = getattr(schedule, name, ())
                if at < len(rates):
                    rates[at] = rates[at] * ratio


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group; its rate is that which its schedule begins from."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, bool):  # another kind of optimizer, with other state
            continue
        if isinstance(value, _PLAIN):
            found[name] = value
        elif isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value):
            found[name] = list(value)
    if _RATE in group:
        found[_RATE] = float(found.pop(_FIRST, group[_RATE]))
    return found


def _all_of(schedule: Any) -> Iterator[Any]:
    """A schedule, and those that it is made of."""
    if schedule is None:
        return
    yield schedule
    for one in getattr(schedule, "_schedulers", ()):
        yield from _all_of(one)
