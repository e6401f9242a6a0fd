"""Replicas that back each other up, in one thread: who computes while another one is at what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycloud.errors import TransportError
from raycloud.net.lane import LaneReport
from raycloud.order import assign
from raycloud.spec import Job
from raycloud.step.collate import Making, StepWork
from raycloud.step.commit import collect, commit
from raycloud.step.speculation import Backing, Kind, Note, ring
from tests.lockstep import Fleet, NetTask, exchange, never


class Ticking:
    """A clock that goes on by `pace_s` whenever it is looked at."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self._now_s = 0.0

    def monotonic_s(self) -> float:
        self._now_s += self.pace_s
        return self._now_s

    unix_s = cpu_s = monotonic_s

    def thread_cpu_s(self, thread: int) -> float:
        del thread
        return self.monotonic_s()


class Died(Exception):
    """A member of this process is no more."""


class Line:
    """Between a member and its backup; what is said arrives at once.

    Attributes:
        loses: Nothing arrives any more once the backup has said that it is done.
    """

    def __init__(self, fleet: Backed, primary: int, backup: int) -> None:
        self.primary, self.backup = primary, backup
        self.loses = self.lost = False
        self._fleet = fleet
        self._told: list[Note] = []
        fleet.backings[primary].backup = Downwards(self)
        fleet.backings[backup].primary = self

    def say(self, *notes: Note) -> None:
        """The backup does."""
        if self.lost:
            raise TransportError("the line is cut")
        self.lost = self.loses and any(note.kind is Kind.DONE for note in notes)
        self._fleet.backings[self.primary].answer(notes)

    def hear(self, timeout_s: float = 0.0) -> list[Note]:
        """The backup does."""
        del timeout_s
        if self.lost:
            raise TransportError("the line is cut")
        told, self._told = self._told, []
        return told

    def tell(self, notes: Sequence[Note]) -> None:
        """The primary does."""
        self._told += notes
        if any(note.kind is Kind.BEGUN for note in notes):
            self._fleet.begun(self.primary, self.backup)


class Downwards:
    """The primary's end of a line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def say(self, *notes: Note) -> None:
        self._line.tell(notes)

    def hear(self, timeout_s: float = 0.0) -> list[Note]:
        raise AssertionError("what a backup says is heard in a thread of its own")


class Backed(Fleet):
    """A fleet whose members back each other up.

    Args:
        most: Micro-batches of a tail.
        paces_s: How slow each is.
    """

    def __init__(
        self,
        job: Job,
        task: NetTask,
        shares: Sequence[int],
        *,
        most: int,
        paces_s: Sequence[float],
        **more: Any,
    ) -> None:
        super().__init__(job, task, shares, **more)
        self.most, self.paces_s = most, tuple(paces_s)
        self.collate.making = Making(apart=most)
        self.moved = 0  # micro-batches that counted where they were backed up
        self.broke = False  # the newest step: somebody died, or does not know what counts
        self.back_up()

    def back_up(self) -> None:
        """A generation begins."""
        size = len(self.replicas)
        self.backings = [
            Backing(most=self.most, clock=Ticking(self.paces_s[rank]), abandoned=never)
            for rank in range(size)
        ]
        for replica, backing in zip(self.replicas, self.backings, strict=True):
            replica.backing = backing
        primaries = enumerate(ring((), size) if size > 1 else ())
        self.lines = {primary: Line(self, primary, backup) for backup, primary in primaries}

    def backed_step(self, number: int, first: int, meets: Mapping[int, int]) -> None:
        """Compute and commit a step; see `backed`."""
        self.finish(number, self.backed(number, first, meets))

    def finish(self, number: int, works: Sequence[StepWork]) -> None:
        """All have computed their parts: commit the step."""
        for replica in self.replicas:
            collect(replica, number, never)
        for replica, work in zip(self.replicas, works, strict=True):
            commit(replica, work)
        self.position = self.steps.after(works[0].span)

    def backed(
        self, number: int, first: int, meets: Mapping[int, int], dies: tuple[int, int] = (-1, -1)
    ) -> list[StepWork]:
        """Compute a step; returns each member's work.

        Args:
            number: Which step.
            first: The rank that begins.
            meets: When a rank begins so many passes its backup computes its own part, and perhaps
                more, in that moment; by rank. All others compute one after the other.
            dies: A rank, and at which of its passes it does.
        """
        span = self.span(number, self.position)
        works = self.works(number)
        for work, lane in zip(works, self.lanes, strict=True):
            lane.send(LaneReport(weight=work.weight))
        self._meets, self._dies, self._works = meets, dies, works
        self._counts, self._done = dict.fromkeys(range(len(works)), 0), dict[int, StepWork]()
        self._at: set[int] = set()
        for rank in (first, *range(len(works))):
            self._compute(rank)
        found = [self._done.get(rank, work) for rank, work in enumerate(works)]
        self.broke = len(self._done) < len(works) or any(r.broken for r in self.replicas)
        if not self.broke:
            kept = sorted(k for work in found for k in work.indices)
            assert kept == list(range(len(span.micro_batches)))  # each of them, and each once
            for replica, work in zip(self.replicas, found, strict=True):
                assert replica.kept is not None
                assert replica.kept.micro_batches == tuple(sorted(work.indices))
        mine = [set(work.indices) for work in works]
        self.moved += sum(len(set(w.indices) - m) for w, m in zip(found, mine, strict=True))
        return found

    def works(self, number: int) -> list[StepWork]:
        """Each member's own part of a step."""
        span = self.span(number, self.position)
        every = span.micro_batches
        dealt = assign(self.shares, len(every))
        return [
            StepWork(
                span=span,
                passes=self.collate.passes([every[k] for k in dealt.of(rank)], self.fuse),
            )
            for rank in range(len(self.shares))
        ]

    def begun(self, rank: int, backup: int) -> None:
        """A rank has begun a pass."""
        self._counts[rank] += 1
        if self._meets.get(rank) == self._counts[rank]:
            self._compute(backup)
        if self._dies == (rank, self._counts[rank]):
            raise Died

    def _compute(self, rank: int) -> None:
        if rank in self._at:
            return
        self._at.add(rank)
        lane = self.lanes[rank]
        try:
            self._done[rank] = exchange(self.replicas[rank], self._works[rank], self.collate, lane)
        except Died:
            assert rank == self._dies[0]
