"""A replica's state, from one member to others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from raycloud.checkpoint import decode, encode
from raycloud.sync.transport import finish

if TYPE_CHECKING:
    from raycloud.sync.transport import Transport
    from raycloud.training.state import ReplicaState

_MOST_VALUES = 2**22  # of a message of several tensors


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
    for dtype, some in messages(told["tensors"]):
        if gives:
            flat = torch.cat([own[name].to("cpu").reshape(-1) for name, _ in some])
        else:
            count = sum(math.prod(shape) for _, shape in some)
            flat = torch.empty(count, dtype=getattr(torch, dtype))
        if flat.numel():
            finish(transport.broadcast(flat, source), abandoned)
        if takes:
            parts = flat.split([math.prod(shape) for _, shape in some])
            for (name, shape), part in zip(some, parts, strict=True):
                alone = len(some) == 1  # each has memory of its own
                taken[name] = part.view(shape) if alone else part.view(shape).clone()
    if takes:
        state.load(taken, decode(told["values"]))
    values: dict[str, Any] = decode(told["beside"])
    return values


def messages(
    tensors: Iterable[tuple[str, str, list[int]]],
) -> Iterator[tuple[str, list[tuple[str, list[int]]]]]:
    """Types, and names and shapes of those that travel in one message: each takes a while."""
    dtype, some, count = "", list[tuple[str, list[int]]](), 0
    for name, kind, shape in tensors:
        if some and (kind != dtype or count + math.prod(shape) > _MOST_VALUES):
            yield dtype, some
            some, count = [], 0
        dtype, count = kind, count + math.prod(shape)
        some.append((name, shape))
    if some:
        yield dtype, some


def _bytes(own: bytes, source: int, transport: Transport, abandoned: Callable[[], bool]) -> bytes:
    """The source's bytes, at every member."""
    size = torch.tensor([float(len(own))], dtype=torch.float64)
    finish(transport.broadcast(size, source), abandoned)
    flat = torch.zeros(int(size.item()), dtype=torch.uint8)
    if transport.rank == source:
        flat = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    finish(transport.broadcast(flat, source), abandoned)
    return flat.numpy().tobytes()
