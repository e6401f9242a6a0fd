"""Exchange between members that live in one process: for tests and for the fault scripts to come.

No threads: a member's call returns at once, and the work is complete when the last member has
called. So a single thread can drive many members in lockstep, deterministically. The sum runs in
rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.exchange import reduction_bytes
from raycloud.spec.sizes import ring_bytes
from tests.coded import simulated

if TYPE_CHECKING:
    import torch

    from raycloud.net.transport import Coding


@dataclass
class _Slot:
    """One operation: what each member gave."""

    given: dict[int, torch.Tensor] = field(default_factory=dict)
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    source: int | None = None
    coding: Coding | None = None
    done: bool = False


class Loopback:
    """The meeting place of `size` members in this process."""

    def __init__(self, size: int) -> None:
        """Prepare the transports, one a member."""
        self.size = size
        self._slots: list[_Slot] = []
        self._broken: str | None = None
        self.idle: Callable[[], None] = lambda: None  # called by who waits for others
        self.members = tuple(LoopbackTransport(self, rank) for rank in range(size))

    def cut(self, reason: str) -> None:
        """From now on every exchange that is not complete fails at every member."""
        self._broken = reason

    def _give(
        self, index: int, rank: int, tensor: torch.Tensor, source: int | None
    ) -> LoopbackWork:
        while len(self._slots) <= index:
            self._slots.append(_Slot())
        slot = self._slots[index]
        slot.given[rank] = tensor
        slot.source = source
        return self._look(slot)

    def _encoded(
        self, index: int, rank: int, values: torch.Tensor, total: torch.Tensor, coding: Coding
    ) -> LoopbackWork:
        while len(self._slots) <= index:
            self._slots.append(_Slot())
        slot = self._slots[index]
        slot.given[rank], slot.totals[rank], slot.coding = values, total, coding
        return self._look(slot)

    def _look(self, slot: _Slot) -> LoopbackWork:
        if len(slot.given) == self.size and self._broken is None:
            self._complete(slot)
        return LoopbackWork(self, slot)

    def _complete(self, slot: _Slot) -> None:
        tensors = [slot.given[rank] for rank in range(self.size)]
        shapes = {(tuple(t.shape), t.dtype) for t in tensors}
        if len(shapes) != 1:
            raise TransportError(f"members gave different tensors to one exchange: {shapes}")
        if slot.coding is not None:
            result, left = simulated(tensors, slot.coding)
            for rank in range(self.size):
                slot.given[rank].copy_(left[rank])
                slot.totals[rank].copy_(result)
            slot.given.clear()
            slot.done = True
            return
        if slot.source is None:
            result = tensors[0].clone()
            for tensor in tensors[1:]:
                result += tensor
        else:
            result = tensors[slot.source].clone()
        for tensor in tensors:
            tensor.copy_(result)
        slot.given.clear()
        slot.done = True


class LoopbackTransport:
    """One member's end of a `Loopback`."""

    def __init__(self, hub: Loopback, rank: int) -> None:
        """Made by the hub."""
        self._hub = hub
        self.rank = rank
        self.size = hub.size
        self._calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> LoopbackWork:
        """Sum over members, in place, once the last has called."""
        return self._call(tensor, None)

    def broadcast(self, tensor: torch.Tensor, source: int) -> LoopbackWork:
        """Copy from `source`, in place, once the last has called."""
        return self._call(tensor, source)

    def all_reduce_bytes(self, size: int) -> int:
        """As a ring has it."""
        return ring_bytes(size, self.size)

    def reduce(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> LoopbackWork:
        """Sum over members through a codec, once the last has called."""
        self._calls += 1
        return self._hub._encoded(self._calls - 1, self.rank, values, total, coding)

    def reduce_bytes(self, count: int, coding: Coding) -> int:
        """As direct exchange has it."""
        return reduction_bytes(count, self.rank, self.size, coding)

    def hang_up(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _call(self, tensor: torch.Tensor, source: int | None) -> LoopbackWork:
        self._calls += 1
        return self._hub._give(self._calls - 1, self.rank, tensor, source)


class LoopbackWork:
    """An operation of a `Loopback`."""

    def __init__(self, hub: Loopback, slot: _Slot) -> None:
        """Made by the hub."""
        self._hub = hub
        self._slot = slot

    def wait(self, timeout_s: float) -> bool:
        """True when every member has called."""
        if not self._slot.done and timeout_s > 0.0:
            self._hub.idle()
        if not self._slot.done and self._hub._broken is not None:
            raise TransportError(self._hub._broken)
        return self._slot.done
