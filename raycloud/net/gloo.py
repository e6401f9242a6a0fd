"""Exchange over TCP with gloo: tensors on the CPU, or on a GPU by way of the CPU."""

from __future__ import annotations

import datetime
import json
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from raycloud.errors import TransportError
from raycloud.net.sockets import (
    Place,
    connecting,
    end_all_if_hung,
    hang_up,
    listening,
    look_once_more,
)
from raycloud.spec.sizes import ring_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

# Only meeting has time-outs: the store's until all have come, and this one for connecting then. An
# exchange has none: members poll, and the driver says when to give up.
_CONNECTING = datetime.timedelta(seconds=30)
_NEVER = datetime.timedelta(days=7)
_CALM_S, _CALMEST_S = 0.1, 3.0  # between two looks: twice as long each time that nothing was found
_SHORTEST_S = 0.001  # torch counts whole milliseconds, and takes none for no limit at all


class GlooTransport:
    """A gloo process group of our own, outside torch's process-global state.

    Members meet at `store`, which is theirs alone, and reach each other at the `address` of each
    one's node; `threads` progress exchanges. They stand in a ring in the `order` of these ranks,
    which is also how `store` counts them; empty: as ranks do.

    Raises:
        TransportError: Members did not meet.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        address: str,
        threads: int = 2,
        order: Sequence[int] = (),
    ) -> None:
        """Meet the other members; blocks until all have come or the store's time-out has passed."""
        self.rank = rank
        self.size = size
        self._order = tuple(order or range(size))
        at = self._order.index(rank)
        gloo: Any = dist.ProcessGroupGloo  # torch's type stub lacks most of it
        options = gloo._Options()  # noqa: SLF001 - torch offers no public name
        self._turn = threading.Lock()
        self._over: threading.Event | None = None  # since it has hung up; set when it is closed
        device, self._own = listening(lambda: gloo.create_device(hostname=address))
        self._others: list[Place] = []
        options._devices = [device]  # noqa: SLF001
        options._threads = threads  # noqa: SLF001
        options._timeout = _CONNECTING  # noqa: SLF001
        try:
            if size > 1:
                store.set(f"listens/{at}", json.dumps(self._own))
                self._others = [
                    (place[0], place[1])
                    for other in range(size)
                    if other != at
                    for place in json.loads(store.get(f"listens/{other}"))
                ]
            with connecting(self._others):
                self._group = gloo(store, at, size, options)
            self._connections = end_all_if_hung(self._own, self._others)
        except RuntimeError as error:
            raise TransportError(
                f"member of rank {rank} could not meet the other {size - 1} at {address}: {error}",
                hint="check that members reach each other's addresses and ports",
            ) from error

    def all_reduce(self, tensor: torch.Tensor) -> GlooWork:
        """Sum over members, in place; `TransportError`: it has hung up."""
        return self._begin("allreduce", tensor, dist.AllreduceOptions())

    def all_reduce_bytes(self, size: int) -> int:
        """See `transport.Transport.all_reduce_bytes`: those of a ring."""
        return ring_bytes(size, self.size)

    def broadcast(self, tensor: torch.Tensor, source: int) -> GlooWork:
        """Copy from the member of rank `source`, in place; `TransportError`: it has hung up."""
        options = dist.BroadcastOptions()
        options.rootRank = self._order.index(source)
        return self._begin("broadcast", tensor, options)

    def hang_up(self) -> None:
        """End all connections, so that who waits here, or for this member, need not any longer.

        Nothing is sent any more, and gloo soon looks at none of them: see `watched`.
        """
        with self._turn:
            if self._over is None:
                self._over = threading.Event()
                hang_up(self._own, self._others)
                calm = threading.Thread(
                    target=self._calm, args=(self._over,), name="calm", daemon=True
                )
                calm.start()

    def close(self) -> None:
        """Drop the group; its sockets close with it.

        Where an exchange is under way its connections are ended first: its end would wait for a
        peer that may be frozen, and for peers that wait for this one.
        """
        self.hang_up()
        del self._group
        if self._over is not None:
            self._over.set()

    def _begin(self, operation: str, tensor: torch.Tensor, options: Any) -> GlooWork:
        if self._over is not None:
            raise TransportError("an exchange with the other members broke: this one has hung up")
        options.timeout = _NEVER
        return GlooWork(getattr(self._group, operation)([tensor], options))

    def _calm(self, over: threading.Event) -> None:
        pause_s = _CALM_S
        while not over.wait(pause_s):  # until then gloo finds out by itself where it can
            told = look_once_more(self._connections)
            pause_s = _CALM_S if told else min(2 * pause_s, _CALMEST_S)


class GlooWork:
    """A gloo operation under way."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> bool:
        """Sleep until complete or `timeout_s` has passed; no processor time is spent waiting."""
        try:
            self._work.wait(datetime.timedelta(seconds=max(timeout_s, _SHORTEST_S)))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            try:
                self._work.wait()  # it may also have completed well just after the time-out
            except RuntimeError as error:
                what = "an exchange with the other members broke"
                raise TransportError(f"{what}: {error}") from error
        return True
