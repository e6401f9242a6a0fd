"""Exchange between NVIDIA GPUs with NCCL."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.spec.environment import set_defaults
from raycloud.spec.sizes import ring_bytes

_POLL_S = 0.0002
_CONNECTING_S = 30.0
# Else torch ends the process of a member that survives, where an exchange breaks or hangs: what
# becomes of one is decided here. Who has set these knows why.
_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_IDLE = threading.Event()  # never set: a wait that lets other threads run


class NcclTransport:
    """An NCCL process group of our own, outside torch's process-global state.

    Members meet at `store`, which is theirs alone; each needs a GPU of its own, `device`.

    Raises:
        TransportError: The members do not connect to each other.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int, device: torch.device) -> None:
        """Connect to the others, by a first exchange: here one that hangs keeps nobody."""
        self.rank = rank
        self.size = size
        set_defaults(_SETTINGS)
        group: Any = dist.ProcessGroupNCCL  # torch's type stub lacks its methods
        with _told():
            self._group = group(store, rank, size)
        try:
            self._connect(device)
        except BaseException:
            self.close()
            raise

    def _connect(self, device: torch.device) -> None:
        if not self.all_reduce(torch.zeros(1, device=device)).wait(_CONNECTING_S):
            raise TransportError(f"NCCL has not connected the members in {_CONNECTING_S:g} s")

    def all_reduce(self, tensor: torch.Tensor) -> NcclWork:
        """Sum over members, in place, on NCCL's own stream after the current one."""
        with _told():
            return NcclWork(self._group.allreduce([tensor], dist.AllreduceOptions()))

    def all_reduce_bytes(self, size: int) -> int:
        """See `transport.Transport.all_reduce_bytes`: those of a ring."""
        return ring_bytes(size, self.size)

    def broadcast(self, tensor: torch.Tensor, source: int) -> NcclWork:
        """Copy from the member of rank `source`, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        with _told():
            return NcclWork(self._group.broadcast([tensor], options))

    def hang_up(self) -> None:
        """Nothing: what is pending is aborted by `close`, in the thread that has asked for it."""

    def close(self) -> None:
        """Abort what is pending and drop the group."""
        self._group.abort()
        del self._group


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What torch raises of other members is told as the exchange's end, and ends no survivor."""
    try:
        yield
    except dist.DistError as error:
        raise TransportError(f"an exchange with the other members broke: {error}") from error


class NcclWork:
    """An NCCL operation under way."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> bool:
        """Let the host confirm completion, so that an optimizer never runs on half an exchange."""
        polls = max(1, int(timeout_s / _POLL_S))
        for _ in range(polls):
            if self._work.is_completed():
                break
            _IDLE.wait(_POLL_S)
        else:
            return False
        try:  # `Work.exception` has no conversion to Python; `wait` raises it
            self._work.wait()  # the current stream joins NCCL's; nothing is left to wait for
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "NCCL" not in str(error):
                raise  # this member's own fault
            raise TransportError(f"an exchange with the other members broke: {error}") from error
        return True
