"""Samples handed out where workers do not move in lockstep.

A lease is a range of the canonical sequence that one worker may compute until a deadline. What is
lost is handed out again, first. What is exact is each exchange: a lease counts in the ledger once,
when it is committed, whoever computed it. No clock here: the caller says what time it is.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from raycloud.errors import InternalError
from raycloud.order.commits import Commit
from raycloud.order.ledger import Ranges, overlap, union
from raycloud.order.steps import Position

if TYPE_CHECKING:
    from raycloud.order.ledger import Ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Samples [start, stop) of `epoch`, handed to `worker` until `deadline_s`."""

    lease: int
    worker: int
    epoch: int
    start: int
    stop: int
    deadline_s: float

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


class Settled(StrEnum):
    """What became of a commit."""

    COMMITTED = "committed"  # it counts
    DUPLICATE = "duplicate"  # it counted before; nothing changed
    VOID = "void"  # its samples went back when its worker was lost or its time was up


class LeaseBook:
    """Who holds which samples.

    Leases are numbered from 0. One that was lost or has expired is void for good: another may hold
    its samples by the time that its worker sends something.

    Args:
        ledger: Counts what is committed: here alone, from its end on, its holes first.
        lease_s: Seconds until a lease expires.
        epochs: Hand out this many epochs; None: without end.
    """

    def __init__(self, *, ledger: Ledger, lease_s: float, epochs: int | None = None) -> None:
        if not lease_s > 0:
            raise ValueError(f"lease_s must be positive, got {lease_s}")
        self.ledger = ledger
        self._lease_s = lease_s
        self._epochs = epochs
        self._fresh = ledger.newest
        self._live: dict[int, Lease] = {}
        self._next = 0
        self._committed: Ranges = ()  # numbers of committed leases
        self._back: list[tuple[int, int, int]] = []  # heap of (epoch, start, stop), to hand out
        for missing in ledger.audit().missing:
            for epoch in range(missing.epoch, missing.epoch + missing.epochs):
                heapq.heappush(self._back, (epoch, missing.start, missing.stop))

    @property
    def live(self) -> tuple[Lease, ...]:
        """Leases that are out, oldest first."""
        return tuple(self._live.values())

    @property
    def done(self) -> bool:
        """Every sample of every epoch is committed."""
        return self._exhausted() and not self._back and not self._live

    def take(self, worker: int, samples: int, now_s: float) -> Lease | None:
        """Hand out up to `samples` samples: what came back first, else the next of the sequence.

        Returns:
            The lease; None if nothing is left to hand out (what is out may still come back).
        """
        if samples < 1:
            raise ValueError(f"a lease needs at least one sample, got samples={samples}")
        if self._back:
            epoch, start, stop = heapq.heappop(self._back)
            if stop - start > samples:
                heapq.heappush(self._back, (epoch, start + samples, stop))
                stop = start + samples
        elif self._exhausted():
            return None
        else:
            epoch, start = self._fresh.epoch, self._fresh.offset
            whole = self.ledger.samples_in(epoch)
            stop = min(start + samples, whole)
            ends = stop == whole
            self._fresh = Position(epoch=epoch + ends, offset=0 if ends else stop)
        lease = Lease(
            lease=self._next,
            worker=worker,
            epoch=epoch,
            start=start,
            stop=stop,
            deadline_s=now_s + self._lease_s,
        )
        self._next += 1
        self._live[lease.lease] = lease
        return lease

    def commit(self, lease: int, *, step: int, generation: int) -> Settled:
        """The update that contains this lease's effect has committed, as part of `step`.

        Returns:
            `COMMITTED` once per lease; otherwise why the ledger stayed as it was.

        Raises:
            InternalError: No lease of this number was ever handed out.
        """
        if not 0 <= lease < self._next:
            raise InternalError(f"lease {lease} was never handed out; the next is {self._next}")
        held = self._live.get(lease)
        if held is None:
            known = overlap(self._committed, lease, lease + 1)
            return Settled.DUPLICATE if known else Settled.VOID
        taken = Commit(
            first_step=step,
            last_step=step + 1,
            epoch=held.epoch,
            start=held.start,
            stop=held.stop,
            generation=generation,
        )
        self.ledger.commit(taken)
        del self._live[lease]
        self._committed = union(self._committed, lease, lease + 1)
        return Settled.COMMITTED

    def lose(self, worker: int) -> tuple[Lease, ...]:
        """`worker` is gone: its leases are void and their samples are handed out again."""
        return self._take_back([held for held in self._live.values() if held.worker == worker])

    def expire(self, now_s: float) -> tuple[Lease, ...]:
        """Take back the leases whose deadline has come."""
        return self._take_back([held for held in self._live.values() if held.deadline_s <= now_s])

    def _take_back(self, leases: list[Lease]) -> tuple[Lease, ...]:
        for held in leases:
            del self._live[held.lease]
            heapq.heappush(self._back, (held.epoch, held.start, held.stop))
        return tuple(leases)

    def _exhausted(self) -> bool:
        return self._epochs is not None and self._fresh.epoch >= self._epochs
