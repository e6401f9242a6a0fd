"""Sums through a codec by direct exchange, in one process and in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from raycloud.net.exchange import parts_of

if TYPE_CHECKING:
    from raycloud.net.transport import Coding


def simulated(rows: list[torch.Tensor], codec: Coding) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The algorithm in one process, in plain words: the sum, and each member's residual."""
    residuals, total = [row.clone() for row in rows], torch.zeros_like(rows[0])
    cut = [parts_of(residual, len(rows)) for residual in residuals]
    for owner, into in enumerate(parts_of(total, len(rows))):
        if not into.numel():
            continue
        codes = torch.empty(codec.bound(into.numel()), dtype=torch.uint8)
        summed = torch.zeros_like(into)
        for rank in range(len(rows)):
            part = cut[rank][owner]
            if rank == owner:
                summed += part
                continue
            codec.encode(part, codes)
            codec.add(codes, summed)
            codec.subtract(codes, part)
        codec.encode(summed, codes)
        codec.add(codes, into)
        codec.subtract(codes, summed)
        cut[owner][owner].copy_(summed)
    return total, residuals
