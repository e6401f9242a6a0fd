"""Exchange between NVIDIA GPUs with NCCL."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import Any

import torch
from torch import distributed as dist

from raycloud.errors import PlacementError, TransportError
from raycloud.spec.environment import set_defaults
from raycloud.spec.sizes import ring_bytes

_POLL_S = 0.0002
_CONNECTING_S = 30.0
_BEGINNING_S = 1.0
# As with gloo an exchange has no time-out: members poll, and the driver says when to give up.
_NEVER = datetime.timedelta(days=7)
# Else torch ends the process of a member that survives, where an exchange breaks or hangs: what
# becomes of one is decided here. And else its watchdog gives others a minute to write down what
# they do, for which a broken group keeps its memory. Who has set these knows why.
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_BROKE = "an exchange with the other members broke"
_IDLE = threading.Event()  # never set: a wait that lets other threads run


class NcclTransport:
    """An NCCL process group of our own, outside torch's process-global state.

    Members meet at `store`, which is theirs alone; each needs a GPU of its own, `device`.

    Raises:
        PlacementError: Two of them have the same GPU.
        TransportError: The members do not connect to each other.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int, device: torch.device) -> None:
        """Connect to the others, by a first exchange: here one that hangs keeps nobody."""
        self.rank = rank
        self.size = size
        self._beginning = threading.Lock()  # held while an exchange is begun
        self._ending = threading.Lock()
        self._abort: threading.Thread | None = None
        self._over = threading.Event()  # set before the abort: what completes later is garbage
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
        """Make the first exchange, in a thread: beginning it waits for all others, without end."""
        connected: Future[bool] = Future()

        def connect() -> None:
            try:
                first = self.all_reduce(torch.zeros(1, device=device))
                connected.set_result(first.wait(_CONNECTING_S))
            except BaseException as error:  # noqa: BLE001 - raised to who waits
                connected.set_exception(error)

        threading.Thread(target=connect, name="connect", daemon=True).start()
        done = False
        with contextlib.suppress(NotYetError):
            done = connected.result(_CONNECTING_S)
        if not done:
            raise TransportError(f"NCCL has not connected the members in {_CONNECTING_S:g} s")

    def all_reduce(self, tensor: torch.Tensor) -> NcclWork:
        """Sum over members, in place, on NCCL's own stream after the current one."""
        return self._begin("allreduce", tensor, dist.AllreduceOptions())

    def all_reduce_bytes(self, size: int) -> int:
        """See `transport.Transport.all_reduce_bytes`: those of a ring."""
        return ring_bytes(size, self.size)

    def broadcast(self, tensor: torch.Tensor, source: int) -> NcclWork:
        """Copy from the member of rank `source`, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._begin("broadcast", tensor, options)

    def _begin(self, operation: str, tensor: torch.Tensor, options: Any) -> NcclWork:
        options.timeout = _NEVER
        with self._beginning:
            if self._over.is_set():
                raise _hung_up()
            with _told():
                return NcclWork(getattr(self._group, operation)([tensor], options), self._over)

    def hang_up(self) -> None:
        """Abort what is under way, in a thread of its own.

        The kernel of an exchange runs until all members take part in it. For as long as one of them
        is silent the GPU may load no other kernel, give or take memory, or form another group.
        """
        with self._ending:
            if self._abort is None:
                self._over.set()
                self._abort = threading.Thread(target=self._end, name="abort", daemon=True)
                self._abort.start()

    def _end(self) -> None:
        # NCCL is not made for an abort while an exchange is begun, unless that hangs.
        begun = self._beginning.acquire(timeout=_BEGINNING_S)
        try:
            self._group.abort()
        finally:
            if begun:
                self._beginning.release()

    def close(self) -> None:
        """Abort what is pending and drop the group."""
        self.hang_up()
        if self._abort is not None:
            self._abort.join()
        del self._group


def _hung_up() -> TransportError:
    return TransportError(f"{_BROKE}: this one has hung up")


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What torch raises of other members is told as the exchange's end, and ends no survivor."""
    try:
        yield
    except dist.DistError as error:
        if "Duplicate GPU" in str(error):
            raise PlacementError(
                f"two workers have the same GPU: {str(error).splitlines()[-1]}",
                hint="on that node Ray has to show each worker its own: do not set "
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES there",
            ) from error
        raise TransportError(f"{_BROKE}: {error}") from error


class NcclWork:
    """An NCCL operation under way; once its transport is `over` it only can fail."""

    def __init__(self, work: dist.Work, over: threading.Event) -> None:
        self._work, self._over = work, over

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
            raise TransportError(f"{_BROKE}: {error}") from error
        if self._over.is_set():  # an abort ends it as if it were complete
            raise _hung_up()
        return True
