"""Which samples have been committed: the proof that each one counted exactly once.

The ledger is a set of samples per epoch, kept as coalesced ranges, and neighbouring epochs that
look alike are kept as one: it stays as small as the run is regular, however long it gets. In
lockstep the set is a prefix of the canonical sequence; with leases it may have holes for a while.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from raycloud.errors import InternalError
from raycloud.order.commits import Audit, Commit, SampleRange, Skip, skip_of
from raycloud.order.steps import EpochSizes, Position

Ranges = tuple[tuple[int, int], ...]


def union(ranges: Ranges, start: int, stop: int) -> Ranges:
    """`ranges` with [start, stop) added; ranges that touch become one.

    >>> union(((0, 4), (8, 9)), 4, 8)
    ((0, 9),)
    """
    if start >= stop:
        return ranges
    low = tuple(r for r in ranges if r[1] < start)
    high = tuple(r for r in ranges if r[0] > stop)
    touching = ranges[len(low) : len(ranges) - len(high)]
    if touching:
        start, stop = min(start, touching[0][0]), max(stop, touching[-1][1])
    return (*low, (start, stop), *high)


def overlap(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of `ranges` inside [start, stop).

    >>> overlap(((0, 4), (8, 12)), 2, 9)
    ((2, 4), (8, 9))
    """
    inside = ((max(start, low), min(stop, high)) for low, high in ranges)
    return tuple((low, high) for low, high in inside if low < high)


def gaps(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The part of [start, stop) that `ranges` leaves open.

    >>> gaps(((0, 4), (8, 12)), 2, 20)
    ((4, 8), (12, 20))
    """
    found: list[tuple[int, int]] = []
    for low, high in overlap(ranges, start, stop):
        if start < low:
            found.append((start, low))
        start = high
    if start < stop:
        found.append((start, stop))
    return tuple(found)


def size(ranges: Ranges) -> int:
    """How many integers `ranges` holds.

    >>> size(((0, 4), (8, 9)))
    5
    """
    return sum(high - low for low, high in ranges)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Epochs [first, last) that look alike."""

    first: int
    last: int
    committed: Ranges = ()
    left_out: Ranges = ()

    def cut(self, first: int, last: int) -> _Stretch:
        if first <= self.first and self.last <= last:
            return self
        first, last = max(self.first, first), min(self.last, last)
        return _Stretch(first, last, self.committed, self.left_out)

    def known(self) -> Ranges:
        """What needs no step any more: committed or left out."""
        known = self.committed
        for low, high in self.left_out:
            known = union(known, low, high)
        return known

    def ranges(self, which: Ranges) -> Iterator[SampleRange]:
        for start, stop in which:
            yield SampleRange(
                epoch=self.first, start=start, stop=stop, epochs=self.last - self.first
            )


class Ledger:
    """Which samples have been committed.

    Args:
        samples: Samples of epoch 0, and of all others until the data grows.

    Attributes:
        sizes: Samples of every epoch.
        next_step: One past the newest committed step; in lockstep the number of steps of the run.
        skips: What steps took and did not count, in order: neither missing nor to be taken again.
        torn: The unfinished last line of the file this ledger was read from; empty if there was
            none. Whoever goes on writing that file cuts this line off first.
    """

    def __init__(self, *, samples: int) -> None:
        self.sizes = EpochSizes(samples)
        self.next_step = 0
        self.skips: tuple[Skip, ...] = ()
        self.torn = ""
        self._stretches: tuple[_Stretch, ...] = ()
        self._doubled: tuple[tuple[int, SampleRange], ...] = ()  # (last step of the commit, range)

    @property
    def samples(self) -> int:
        """Samples of epoch 0."""
        return self.sizes.samples

    def samples_in(self, epoch: int) -> int:
        """Samples of `epoch`."""
        return self.sizes.at(epoch)

    @property
    def newest(self) -> Position:
        """The position right after the newest sample that is committed or left out."""
        if not self._stretches:
            return Position()
        last = self._stretches[-1]
        stop = max(high for _, high in (*last.committed, *last.left_out))
        if stop >= self.samples_in(last.last - 1):
            return Position(epoch=last.last, offset=0)
        return Position(epoch=last.last - 1, offset=stop)

    @property
    def committed_samples(self) -> int:
        """Samples that counted."""
        taken = sum(size(s.committed) * (s.last - s.first) for s in self._stretches)
        return taken - sum(skip.range.samples for skip in self.skips)

    def skip(self, skip: Skip) -> None:
        """Samples that a committed step took did not count in it.

        Raises:
            InternalError: No step has taken them, or they were skipped before: nothing changes.
        """
        at = bisect_right(self._stretches, skip.epoch, key=attrgetter("first")) - 1
        there = self._stretches[at] if at >= 0 else None
        taken = () if there is None or there.last <= skip.epoch else there.committed
        whole = overlap(taken, skip.start, skip.stop) == ((skip.start, skip.stop),)
        if not whole or skip.step >= self.next_step:
            raise InternalError(f"no step has taken what is to be skipped: {skip}")
        place = attrgetter("epoch", "start")
        after = bisect_right(self.skips, place(skip), key=place)
        for other in self.skips[max(0, after - 1) : after + 1]:
            if skip.epoch == other.epoch and skip.start < other.stop and other.start < skip.stop:
                raise InternalError(f"skipped twice: {skip}")
        self.skips = (*self.skips[:after], skip, *self.skips[after:])

    def grow(self, epoch: int, samples: int) -> None:
        """From `epoch` on, an epoch has `samples` samples.

        Raises:
            InternalError: Something of `epoch` or a later one is committed, or there would be fewer
                samples than before: nothing changes.
        """
        if self._stretches and self._stretches[-1].last > epoch:
            raise InternalError(
                f"the data cannot grow from epoch {epoch} on: the ledger ends at {self.newest}"
            )
        try:
            self.sizes = self.sizes.grown(epoch, samples)
        except ValueError as error:
            raise InternalError(str(error)) from error

    def commit(self, commit: Commit) -> None:
        """Count a range.

        Raises:
            InternalError: The range is not inside the epoch, or some of it counted before: nothing
                changes.
        """
        if doubled := self._count(commit, refuse=True):
            steps = f"steps [{commit.first_step}, {commit.last_step})"
            named = ", ".join(str(r) for r in doubled)
            raise InternalError(f"{steps} would count samples twice: {named}")

    def replay(self, commit: Commit) -> tuple[SampleRange, ...]:
        """Count a range of a file, and return what of it counted before: the audit names that.

        Raises:
            InternalError: The range is not inside the epoch.
        """
        doubled = self._count(commit, refuse=False)
        self._doubled += tuple((commit.last_step, r) for r in doubled)
        return tuple(doubled)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to an older state: what was committed or grown after it is taken back.

        Raises:
            InternalError: The state is of another data set, or of no ledger: nothing changes.
        """
        if state["samples"] != self.samples:
            raise InternalError(
                f"this ledger counts {self.samples} samples per epoch, the restored one "
                f"{state['samples']}"
            )
        new = Ledger(samples=self.samples)
        sizes = new.sizes = EpochSizes.from_state(state)
        next_step = new.next_step = state["next_step"]
        new._stretches = tuple(
            _Stretch(
                s["epoch"], s["epoch"] + s["epochs"], _pairs(s["committed"]), _pairs(s["left_out"])
            )
            for s in state["ranges"]
        )
        growths = (number for growth in sizes.later for number in growth)
        if not _are_numbers(next_step, sizes.samples, *growths) or next_step < 0:
            raise InternalError(
                f"not numbers of a ledger: next_step={next_step!r:.80}, sizes {sizes!r:.80}"
            )
        _check(new._stretches, sizes)
        try:
            for record in state.get("skips", ()):
                new.skip(skip_of(record))
        except ValueError as error:
            raise InternalError(str(error)) from error
        self.sizes, self.next_step, self.skips = sizes, next_step, new.skips
        self._stretches = new._stretches
        self._doubled = tuple(d for d in self._doubled if d[0] <= next_step)

    def state(self) -> dict[str, Any]:
        """Everything committed, as plain JSON values."""
        later = self.sizes.later
        return {
            "samples": self.samples,
            **({"later": [list(growth) for growth in later]} if later else {}),
            "next_step": self.next_step,
            "ranges": [
                {
                    "epoch": s.first,
                    "epochs": s.last - s.first,
                    "committed": [list(r) for r in s.committed],
                    "left_out": [list(r) for r in s.left_out],
                }
                for s in self._stretches
            ],
            **({"skips": [skip.to_record() for skip in self.skips]} if self.skips else {}),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The ledger whose `state()` this is."""
        ledger = cls(samples=state["samples"])
        ledger.restore(state)
        return ledger

    def audit(self, through: Position | None = None) -> Audit:
        """Name what is missing, doubled and left out, of the samples before `through`.

        By default before `newest`, so that a run that still goes on misses nothing.
        """
        through = self.newest if through is None else through
        missing: list[SampleRange] = []
        for first, last, stop in (
            *self.sizes.alike(0, through.epoch),
            (through.epoch, through.epoch + 1, through.offset),
        ):
            for s in _cover(self._stretches, first, last):
                missing += s.ranges(gaps(s.known(), 0, stop))
        return Audit(
            through=through,
            committed_samples=self.committed_samples,
            missing=tuple(missing),
            doubled=tuple(r for _, r in self._doubled),
            left_out=tuple(r for s in self._stretches for r in s.ranges(s.left_out)),
            skips=self.skips,
        )

    def _count(self, commit: Commit, *, refuse: bool) -> list[SampleRange]:
        """Add a range and return what of it counted before; if `refuse`, then add nothing."""
        end, samples = commit.stop + commit.left_out, self.samples_in(commit.epoch)
        if not (0 <= commit.start <= commit.stop <= end <= samples) or commit.epochs < 1:
            raise InternalError(f"not a range of an epoch of {samples} samples: {commit}")
        first, last = commit.epoch, commit.epoch + commit.epochs
        low = bisect_left(self._stretches, first, key=attrgetter("last"))
        high = bisect_right(self._stretches, last, key=attrgetter("first"))
        near = self._stretches[low:high]
        doubled: list[SampleRange] = []
        inside: list[_Stretch] = []
        for s in _cover(near, first, last):
            doubled += s.ranges(overlap(s.known(), commit.start, end))
            committed = union(s.committed, commit.start, commit.stop)
            left_out = union(s.left_out, commit.stop, end)
            inside.append(_Stretch(s.first, s.last, committed, left_out))
        if doubled and refuse:
            return doubled
        before = [s.cut(0, first) for s in near if s.first < first]
        after = [s.cut(last, s.last) for s in near if s.last > last]
        merged = _merge([*before, *inside, *after])
        self._stretches = (*self._stretches[:low], *merged, *self._stretches[high:])
        self.next_step = max(self.next_step, commit.last_step)
        return doubled


def _pairs(values: Sequence[Sequence[int]]) -> Ranges:
    return tuple((low, high) for low, high in values)


def _are_numbers(*values: object) -> bool:
    return all(type(value) is int for value in values)


def _check(stretches: tuple[_Stretch, ...], sizes: EpochSizes) -> None:
    """Refuse what no ledger comes to: epochs that do not rise, ranges outside of them or twice."""
    before = 0
    for s in stretches:
        known = sorted((*s.committed, *s.left_out))
        right = _are_numbers(s.first, s.last) and before <= s.first < s.last and bool(known)
        at, samples = 0, sizes.at(s.first) if right else 0
        for low, high in known:
            right = right and _are_numbers(low, high) and at <= low < high <= samples
            at = high
        if not right or any(list(which) != sorted(which) for which in (s.committed, s.left_out)):
            raise InternalError(f"not what a ledger comes to, after epoch {before}: {s!r:.200}")
        before = s.last


def _cover(stretches: tuple[_Stretch, ...], first: int, last: int) -> Iterator[_Stretch]:
    """Stretches that together are the epochs [first, last); empty ones where nothing is known."""
    for s in stretches:
        if s.last > first and s.first < last:
            piece = s.cut(first, last)
            if first < piece.first:
                yield _Stretch(first, piece.first)
            yield piece
            first = piece.last
    if first < last:
        yield _Stretch(first, last)


def _merge(stretches: list[_Stretch]) -> tuple[_Stretch, ...]:
    merged: list[_Stretch] = []
    for s in stretches:
        if not s.committed and not s.left_out:
            continue
        before = merged[-1] if merged else None
        alike = before and (before.committed, before.left_out) == (s.committed, s.left_out)
        if before and alike and before.last == s.first:
            merged[-1] = _Stretch(before.first, s.last, s.committed, s.left_out)
        else:
            merged.append(s)
    return tuple(merged)
