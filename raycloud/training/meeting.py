"""Meeting the other members of a generation."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.sync.gloo import GlooTransport
from raycloud.sync.nccl import NcclTransport

if TYPE_CHECKING:
    import torch

    from raycloud.sync.transport import Transport

_MEETING_S = 120.0
# Buckets that travel at the same time: in a ring of slow processors each waits more than it moves.
_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Where and as what to meet the other members of a generation.

    `nodes` are the ids of the nodes that the members run on, by rank; empty where unknown.
    """

    host: str
    port: int
    generation: int
    rank: int
    members: tuple[int, ...]
    shares: tuple[int, ...]
    nodes: tuple[str, ...] = ()


def meet(meeting: Meeting, address: str, device: torch.device) -> tuple[Transport, Transport]:
    """What carries the gradients, and what carries the control lane.

    Args:
        meeting: Where.
        address: This node's, that peers can reach.
        device: Where gradients are.

    Raises:
        TransportError: The meeting place or a peer cannot be reached.
    """
    size = len(meeting.shares)
    try:
        store = dist.TCPStore(
            meeting.host,
            meeting.port,
            is_master=False,
            timeout=datetime.timedelta(seconds=_MEETING_S),
        )
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"the meeting place at {meeting.host}:{meeting.port} cannot be reached: {error}"
        ) from error

    def gloo(purpose: str, threads: int) -> Transport:
        prefix = dist.PrefixStore(f"generation-{meeting.generation}/{purpose}", store)
        return GlooTransport(prefix, rank=meeting.rank, size=size, address=address, threads=threads)

    lane = gloo("lane", 1)
    if device.type == "cuda":
        prefix = dist.PrefixStore(f"generation-{meeting.generation}/gradients", store)
        return NcclTransport(prefix, rank=meeting.rank, size=size), lane
    return gloo("gradients", _THREADS), lane
