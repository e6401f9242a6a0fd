"""Sums through a codec, directly or by zones, in one process and in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from raycloud.net.exchange import parts_of
from raycloud.net.zones import pieces_of
from raycloud.sync.codecs import CODECS, TopK

if TYPE_CHECKING:
    from raycloud.net.transport import Coding
    from raycloud.net.zones import Zones
    from raycloud.sync.codecs import Codec

EVERY: dict[str, Codec] = {
    **CODECS,
    "int4-128": CODECS["int4"].for_pair,
    "topk": TopK(32),
}


def simulated(rows: list[torch.Tensor], codec: Coding) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The algorithm in one process, in plain words: the sum, and each member's residual."""
    if len(rows) == 2:
        return _simulated_pair(rows, codec.for_pair)
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


def simulated_by_zones(
    rows: list[torch.Tensor], codec: Coding, zones: Zones
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same by zones: members add as it is inside them, and owners encode between them."""
    if len(zones.groups) == 2:
        return _simulated_pair_of_zones(rows, codec.for_pair, zones)
    residuals, total = [row.clone() for row in rows], torch.zeros_like(rows[0])
    for piece in sorted({piece for own in pieces_of(len(total), zones) for piece in own}):
        into, whole = piece.of(total), torch.zeros_like(piece.of(total))
        codes = torch.empty(codec.bound(into.numel()), dtype=torch.uint8)
        for zone, (group, owner) in enumerate(zip(zones.groups, piece.owners, strict=True)):
            summed = torch.zeros_like(into)
            for rank in group:
                summed += piece.of(residuals[rank])
                piece.of(residuals[rank]).zero_()
            if zone == piece.home:
                whole += summed
                continue
            codec.encode(summed, codes)
            codec.add(codes, whole)
            codec.subtract(codes, summed)
            piece.of(residuals[owner]).copy_(summed)
        codec.encode(whole, codes)
        codec.add(codes, into)
        codec.subtract(codes, whole)
        piece.of(residuals[piece.collector]).copy_(whole)
    return total, residuals


def _simulated_pair(
    rows: list[torch.Tensor], codec: Coding
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of two: each encodes all it has, and the sum is that of both codes."""
    residuals, total = [row.clone() for row in rows], torch.zeros_like(rows[0])
    codes = torch.empty(codec.bound(len(total)), dtype=torch.uint8)
    for row in residuals:
        codec.encode(row, codes)
        codec.add(codes, total)
        codec.subtract(codes, row)
    return total, residuals


def _simulated_pair_of_zones(
    rows: list[torch.Tensor], codec: Coding, zones: Zones
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Of two zones: each owner encodes its zone's sum, and the sum is that of both codes."""
    residuals, total = [torch.zeros_like(row) for row in rows], torch.zeros_like(rows[0])
    for piece in sorted({piece for own in pieces_of(len(total), zones) for piece in own}):
        codes = torch.empty(codec.bound(piece.stop - piece.start), dtype=torch.uint8)
        for group, owner in zip(zones.groups, piece.owners, strict=True):
            left = piece.of(residuals[owner])
            for rank in group:
                left += piece.of(rows[rank])
            codec.encode(left, codes)
            codec.add(codes, piece.of(total))
            codec.subtract(codes, left)
    return total, residuals
