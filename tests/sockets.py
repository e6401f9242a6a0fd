"""Members of one generation in threads of this process, joined by real sockets."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from raycloud.sync.gloo import GlooDevice, GlooTransport


@contextmanager
def gloo_members(size: int, *, meeting_s: float = 20.0) -> Iterator[list[GlooTransport]]:
    """Transports that have met over this machine's loopback interface."""
    host, limit = "127.0.0.1", datetime.timedelta(seconds=meeting_s)
    meeting = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)

    def meet(rank: int) -> GlooTransport:
        store = dist.TCPStore(host, meeting.port, is_master=False, timeout=limit)
        return GlooTransport(store, rank=rank, size=size, device=GlooDevice(host))

    yield together(partial(meet, rank) for rank in range(size))


def together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """What the calls return, each made in a thread of its own; raises what the first raised."""
    todo = list(calls)
    with ThreadPoolExecutor(len(todo)) as threads:
        return [future.result() for future in [threads.submit(call) for call in todo]]


def alike(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether they have the same names, in any order, with the same tensors of the same types."""
    return one.keys() == other.keys() and all(
        t.dtype == other[name].dtype and torch.equal(t, other[name]) for name, t in one.items()
    )
