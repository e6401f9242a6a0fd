"""A replica's state, from one member to others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from raycloud.checkpoint import decode, encode
from raycloud.sync.transport import finish

if TYPE_CHECKING:
    from raycloud.sync.transport import Transport
    from raycloud.training.state import ReplicaState


def hand_over(
    state: ReplicaState,
    beside: dict[str, Any],
    *,
    source: int,
    takes: bool,
    transport: Transport,
    abandoned: Callable[[], bool],
) -> dict[str, Any]:
    """Give the state of the member of rank `source` to those who take it; all members call this.

    Args:
        state: This member's.
        beside: Plain values that travel with it; only the source's matter.
        source: Whose it is.
        takes: Whether this member's state becomes the source's.
        transport: Any of the generation, for tensors on the CPU.
        abandoned: Says that the generation is over.

    Returns:
        The source's `beside`.

    Raises:
        TransportError: The meeting broke, or was abandoned; this member's state is as it was.
    """
    gives = transport.rank == source
    own = state.tensors() if gives else {}
    shapes = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in own.items()]
    told = {"tensors": shapes, "values": encode(state.values()), "beside": encode(beside)}
    header = _bytes(json.dumps(told).encode() if gives else b"", source, transport, abandoned)
    told = json.loads(header)
    taken: dict[str, torch.Tensor] = {}
    for name, dtype, shape in told["tensors"]:
        if gives:
            flat = own[name].to("cpu", copy=True).contiguous().reshape(-1)
        else:
            flat = torch.empty(shape, dtype=getattr(torch, dtype)).reshape(-1)
        if flat.numel():
            finish(transport.broadcast(flat, source), abandoned)
        if takes:
            taken[name] = flat.view(shape)
    if takes:
        state.load(taken, decode(told["values"]))
    values: dict[str, Any] = decode(told["beside"])
    return values


def _bytes(own: bytes, source: int, transport: Transport, abandoned: Callable[[], bool]) -> bytes:
    """The source's bytes, at every member."""
    size = torch.tensor([float(len(own))], dtype=torch.float64)
    finish(transport.broadcast(size, source), abandoned)
    flat = torch.zeros(int(size.item()), dtype=torch.uint8)
    if transport.rank == source:
        flat = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    finish(transport.broadcast(flat, source), abandoned)
    return flat.numpy().tobytes()
