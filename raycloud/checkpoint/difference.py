"""How far two checkpoints are apart: the largest difference over all of their tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from raycloud.checkpoint.payload import load_tensors
from raycloud.checkpoint.published import latest
from raycloud.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from raycloud.checkpoint.manifest import Manifest
    from raycloud.checkpoint.store import Store

_MODEL = "model/"
_HINT = "compare two runs of one job, each to its end"


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What was found.

    Attributes:
        step: Of both checkpoints.
        tensors: How many were compared.
        largest: max |a - b| over all of them; infinite where one is not a number.
        tensor: The name of the tensor that has it.
        parameters: The same over the model's own alone.
        precision: The least precise number type of the model's parameters, such as `float64`.
    """

    step: int
    tensors: int
    largest: float
    tensor: str
    parameters: float
    precision: str


def difference(one: Store, other: Store) -> Difference:
    """Compare the newest checkpoints of two runs.

    Raises:
        CheckpointError: One has none, or they are not of the same step and tensors.
    """
    a, b = _newest(one), _newest(other)
    if a.step != b.step:
        raise CheckpointError(
            f"{one.place} ends at step {a.step}, {other.place} at step {b.step}", hint=_HINT
        )
    return compared(load_tensors(one, a), load_tensors(other, b), step=a.step)


def compared(
    a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], *, step: int
) -> Difference:
    """Compare tensors by name.

    Raises:
        CheckpointError: Not both have the same names and shapes.
    """
    for name in sorted(a.keys() ^ b.keys()):
        raise CheckpointError(f"only one of the two checkpoints has {name!r}", hint=_HINT)
    largest, worst, parameters = 0.0, "", 0.0
    types = {t.dtype for n, t in a.items() if n.startswith(_MODEL) and t.is_floating_point()}
    for name in sorted(a):
        if a[name].shape != b[name].shape:
            raise CheckpointError(f"{name!r} has two shapes", hint=_HINT)
        apart = _apart(a[name], b[name])
        if apart > largest or not worst:
            largest, worst = apart, name
        if name.startswith(_MODEL):
            parameters = max(parameters, apart)
    least = max(types, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)
    return Difference(
        step=step,
        tensors=len(a),
        largest=largest,
        tensor=worst,
        parameters=parameters,
        precision=str(least).removeprefix("torch."),
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel() or torch.equal(a, b):
        return 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    largest = float((a.to(wide) - b.to(wide)).abs().max())
    return math.inf if math.isnan(largest) else largest


def _newest(store: Store) -> Manifest:
    found = latest(store).manifest
    if found is None:
        raise CheckpointError(f"{store.place} has no checkpoint", hint=_HINT)
    return found
