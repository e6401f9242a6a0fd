"""How the parameters' gradients are laid out for exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(eq=False)
class Bucket:
    """Some parameters whose gradients travel in one message.

    `flat` holds the gradients one after the other, then one number a parameter that says whether it
    was used: summed over members it tells apart a gradient of zero from none at all, so that an
    optimizer skips the same parameters as in a single process.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    flat: torch.Tensor
    slots: tuple[torch.Tensor, ...]
    values: torch.Tensor
    used: torch.Tensor
    missing: set[int] = field(default_factory=set)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one message."""
        return self.flat.numel() * self.flat.element_size()


def lay_out(parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Group parameters into buckets, in the order in which a backward pass tends to finish them.

    That is the reverse of the order of registration. The layout depends on nothing else, so that
    every member, and a resumed run, has the same one.

    Args:
        parameters: Qualified names and parameters that require gradients.
        bucket_bytes: A bucket is closed when it holds at least this much. The one that fills first
            takes a quarter, so that the exchange starts early.
    """
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    filled, limit = 0, bucket_bytes // 4
    for name, parameter in reversed(parameters):
        fits = bool(buckets) and filled < limit
        if fits:
            last = buckets[-1][-1][1]
            fits = (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not fits:
            limit = bucket_bytes if buckets else bucket_bytes // 4
            buckets.append([])
            filled = 0
        buckets[-1].append((name, parameter))
        filled += parameter.numel() * parameter.element_size()
    return [_allocate(group) for group in buckets]


def _allocate(group: list[tuple[str, nn.Parameter]]) -> Bucket:
    first = group[0][1]
    sizes = [parameter.numel() for _, parameter in group]
    total = sum(sizes)
    flat = torch.zeros(total + len(group), dtype=first.dtype, device=first.device)
    slots, at = [], 0
    for (_, parameter), size in zip(group, sizes, strict=True):
        slots.append(flat[at : at + size].view(parameter.shape))
        at += size
    return Bucket(
        names=tuple(name for name, _ in group),
        parameters=tuple(parameter for _, parameter in group),
        flat=flat,
        slots=tuple(slots),
        values=flat[:total],
        used=flat[total:],
    )
