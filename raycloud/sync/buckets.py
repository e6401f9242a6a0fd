"""How the parameters' gradients are laid out for exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(eq=False, init=False)
class Bucket:
    """Some parameters whose gradients travel in one message.

    Args:
        group: Qualified names and parameters, of one type and device.
        last: Whether it is the last of a step.

    Attributes:
        flat: The message: gradients, then `used`, `behind`, `astray` and `late`.
        values: The gradients one after the other, as one tensor.
        slots: The same, in the shapes of the parameters.
        used: For each parameter, whether it was used. Summed over members it tells apart a gradient
            of zero from none at all, so that an optimizer skips the same parameters as in a single
            process.
        behind: In the last bucket one number: 0 where the next change is at hand, else 1. Empty in
            the others.
        astray: The same: 0 where what this member sends is its part of the step.
        late: The same: 0 unless this member has told that it takes far longer than usual.
        missing: Indices of parameters whose gradients are not yet in place.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    flat: torch.Tensor
    values: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    used: torch.Tensor
    behind: torch.Tensor
    astray: torch.Tensor
    late: torch.Tensor
    missing: set[int] = field(default_factory=set)

    def __init__(self, group: Sequence[tuple[str, nn.Parameter]], *, last: bool) -> None:
        """Take memory for it."""
        self.names = tuple(name for name, _ in group)
        self.parameters = tuple(parameter for _, parameter in group)
        self.missing = set()
        self._sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        length = sum(self._sizes) + len(group) + (3 if last else 0)
        self._hold(torch.zeros(length, dtype=first.dtype, device=first.device))

    @property
    def payload_bytes(self) -> int:
        """Bytes of one message."""
        return self.flat.numel() * self.flat.element_size()

    def renew(self) -> None:
        """Take other memory: a broken exchange may still write to what there was."""
        self._hold(torch.zeros_like(self.flat))

    def _hold(self, flat: torch.Tensor) -> None:
        self.flat = flat
        total, count = sum(self._sizes), len(self._sizes)
        self.behind, self.astray, self.late = flat[total + count :].tensor_split(3)
        self.values, self.used, self.slots = self.cut(flat)

    def cut(
        self, flat: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """`values`, `used` and `slots` of a message that is laid out as this one."""
        total, count = sum(self._sizes), len(self._sizes)
        values, used, _ = flat.tensor_split((total, total + count))
        slots = tuple(
            part.view(parameter.shape)
            for part, parameter in zip(values.split(self._sizes), self.parameters, strict=True)
        )
        return values, used, slots


def lay_out(parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Group parameters into buckets, in the order in which a backward pass tends to finish them.

    That is the reverse of the order of registration. The layout depends on nothing else, so that
    every member, and a resumed run, has the same one.

    Args:
        parameters: Qualified names and parameters that require gradients.
        bucket_bytes: A bucket is closed when it holds at least this much. The one that fills first
            takes a quarter, so that the exchange starts early.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = []
    filled, limit = 0, bucket_bytes // 4
    for name, parameter in reversed(parameters):
        fits = bool(groups) and filled < limit
        if fits:
            last = groups[-1][-1][1]
            fits = (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not fits:
            limit = bucket_bytes if groups else bucket_bytes // 4
            groups.append([])
            filled = 0
        groups[-1].append((name, parameter))
        filled += parameter.numel() * parameter.element_size()
    return [Bucket(group, last=i == len(groups) - 1) for i, group in enumerate(groups)]
