"""Backup tasks within a step, in virtual time: when a step ends whose tails others compute, too.

What a backup does next is decided by the `Primary` of a run. Here its passes begin and end as
speeds say, words arrive at once, and each pass is one micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raycloud.step.speculation import Kind, Note, Primary

if TYPE_CHECKING:
    from raycloud.planner.speed import Speed

_STEP = 0


@dataclass(frozen=True, slots=True)
class BackedUp:
    """A step with backups: its seconds of computing, and micro-batches that counted elsewhere."""

    seconds: float
    elsewhere: int


@dataclass(eq=False, slots=True)
class _Worker:
    """One worker in the step; `far` is what it knows of the one that it backs up."""

    micro_batch_s: float
    left: list[int]  # of its own micro-batches, the next one last
    primary: int
    far: Primary = field(default_factory=Primary)
    open: set[int] = field(default_factory=set)  # of its tail: not begun here, nor done elsewhere
    started: dict[int, float] = field(default_factory=dict)  # elsewhere, and likely done then
    elsewhere: set[int] = field(default_factory=set)
    waits_for: int | None = None
    end_s: float = 0.0


class _Step:
    def __init__(
        self, speeds: Sequence[Speed], shares: Sequence[int], backs_up: Sequence[int], most: int
    ) -> None:
        self._workers = [
            _Worker(speed.micro_batch_s, [*range(share - 1, -1, -1)], primary)
            for speed, share, primary in zip(speeds, shares, backs_up, strict=True)
        ]
        self._backup_of = {worker.primary: worker for worker in self._workers}
        # When, in which order, whose, and which micro-batch it has computed for another.
        self._due: list[tuple[float, int, int, int | None]] = []
        self._count = 0
        for at, (worker, speed) in enumerate(zip(self._workers, speeds, strict=True)):
            worker.open = set(worker.left[:most]) if worker.primary != at else set()
            backup = self._backup_of[at]
            for index in worker.open:
                backup.far.heard(Note(Kind.OFFERED, _STEP, index, 1), 0.0)
            self._later(speed.fixed_s if worker.left else 0.0, at)

    def run(self) -> BackedUp:
        """To its end."""
        while self._due:
            now_s, _, at, extra = heapq.heappop(self._due)
            if extra is not None:
                self._done(self._workers[at], extra, now_s)
            self._go_on(at, now_s)
        return BackedUp(
            max(worker.end_s for worker in self._workers),
            sum(len(worker.elsewhere) for worker in self._workers),
        )

    def _later(self, at_s: float, worker: int, extra: int | None = None) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_s, self._count, worker, extra))

    def _go_on(self, at: int, now_s: float) -> None:
        """What a worker does that is free."""
        worker = self._workers[at]
        worker.end_s = now_s
        while worker.left:
            index, own_s = worker.left[-1], worker.micro_batch_s
            done_s = worker.started.get(index)
            if done_s is not None and done_s < now_s + own_s:  # the backup is there before
                worker.waits_for = index
                return
            worker.left.pop()
            if index not in worker.elsewhere:
                worker.open.discard(index)
                begun = Note(Kind.BEGUN, _STEP, index, 1, own_s)
                self._backup_of[at].far.heard(begun, now_s)
                self._later(now_s + own_s, at)
                return
        late = worker.far.next(_STEP, worker.micro_batch_s, now_s)
        if late is not None:
            index, _ = late
            worker.far.started(index)
            done_s = now_s + worker.micro_batch_s
            self._workers[worker.primary].started[index] = done_s
            self._later(done_s, at, index)

    def _done(self, backup: _Worker, index: int, now_s: float) -> None:
        """The first result counts: the backup's, unless the primary has begun it, too."""
        primary = self._workers[backup.primary]
        primary.started.pop(index, None)
        if index in primary.open:
            primary.open.discard(index)
            primary.elsewhere.add(index)
        if primary.waits_for == index:
            primary.waits_for = None
            self._later(now_s, backup.primary)


def backed_up(
    speeds: Sequence[Speed], shares: Sequence[int], backs_up: Sequence[int], *, most: int
) -> BackedUp:
    """A step of which each worker's last `most` micro-batches are offered to the one behind it.

    Args:
        speeds: Of the workers, by rank.
        shares: Their micro-batches.
        backs_up: For each rank the one that it backs up, as `step.speculation.ring` has it.
        most: `elastic.backup_micro_batches`.

    A worker that is four times as slow as the other one keeps four of eight:

    >>> from raycloud.planner.speed import Speed
    >>> slow, fast = Speed(fixed_s=0, micro_batch_s=4), Speed(fixed_s=0, micro_batch_s=1)
    >>> backed_up([slow, fast], [8, 8], [1, 0], most=0)
    BackedUp(seconds=32, elsewhere=0)
    >>> backed_up([slow, fast], [8, 8], [1, 0], most=8)
    BackedUp(seconds=16, elsewhere=4)
    """
    return _Step(speeds, shares, backs_up, most).run()
