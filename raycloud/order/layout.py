"""Shuffle that keeps reads together: partitions are dealt to lanes and mixed inside windows.

Everything follows from (seed, layout, epoch), nothing from who reads. An epoch's tables take memory
and time in proportion to its partitions; rows are looked up some thousands at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt

from raycloud.order.permutation import ROUNDS, Unsigned, numbers, permute
from raycloud.order.seeds import stream_seed

MOST_LANES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a shuffle must know of a data set to keep its reads together.

    An epoch is a sequence of rounds. A round takes `run` rows of each lane in turn. A lane owns the
    same partitions in every epoch, so whoever computes its rows reads the same part of the data
    set. Each epoch permutes a lane's partitions anew, and mixes the rows of `window` partitions
    that follow each other. Lanes of unequal length drop out of the rounds once they have less than
    a run left; that follows at the end, lane by lane.

    With `lanes_of` lanes and `run = global_batch // lanes`, a round of all lanes is a step, and
    micro-batch k of every step comes from the same lane, until the shortest lane drops out.

    Attributes:
        partitions: The first row of each partition, and one past the last row: P + 1 numbers,
            never falling. A partition may be empty.
        lanes: How many lanes the partitions are dealt to; P is a multiple of it.
        run: Rows that a lane gives at a time.
        window: Partitions of one lane whose rows are mixed with each other.
    """

    partitions: tuple[int, ...]
    lanes: int
    run: int
    window: int

    def __post_init__(self) -> None:
        """Refuse a layout that cannot be dealt.

        Raises:
            ValueError: Names the field, its value and what would do.
        """
        for name in ("lanes", "run", "window"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        starts = self.partitions
        if len(starts) < 2 or starts[0] != 0:  # noqa: PLR2004 (one partition has two ends)
            raise ValueError(
                f"partitions must begin with 0 and end with the number of rows, got {starts[:4]}"
            )
        for p, (start, stop) in enumerate(pairwise(starts)):
            if stop < start:
                raise ValueError(
                    f"partitions must not fall: partition {p} begins at row {start} and the next "
                    f"at {stop}"
                )
        if self.count % self.lanes:
            raise ValueError(
                f"{self.count} partitions cannot be dealt evenly to lanes={self.lanes}: cut the "
                f"data set into a multiple of {self.lanes}"
            )

    @property
    def count(self) -> int:
        """Number of partitions."""
        return len(self.partitions) - 1

    @property
    def samples(self) -> int:
        """Rows of all partitions."""
        return self.partitions[-1]


def lanes_of(global_batch: int, micro_batch: int) -> int:
    """How many lanes a step reads from: the most, up to 64, that share its micro-batches equally.

    >>> lanes_of(128, 16), lanes_of(1024, 8), lanes_of(71, 1)
    (8, 64, 1)

    Raises:
        ValueError: The step is not a whole number of micro-batches.
    """
    if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
        raise ValueError(
            f"global_batch={global_batch} must be a positive multiple of micro_batch={micro_batch}"
        )
    count = global_batch // micro_batch
    return next(n for n in range(min(count, MOST_LANES), 0, -1) if count % n == 0)


Ids = npt.NDArray[np.int64]

# Streams of `stream_seed`, apart from (seed, epoch, round) of the order without a layout by their
# second number, which no epoch reaches, and from each other by its value.
_DEAL, _PARTITIONS, _ROWS = ((1 << 60) + stream for stream in range(3))
_EPOCHS_KEPT = 2
_CHUNK = 4096  # rows of a lane that are looked up at a time: 0.1 us a row instead of 1


@dataclass(frozen=True, slots=True)
class _Epoch:
    """The tables of one epoch; Q partitions and W windows a lane, in the epoch's order.

    Attributes:
        number: Which epoch.
        partitions: Partition numbers, shape (lanes, Q).
        starts: Place in its lane at which each partition begins, and the end, (lanes, Q + 1).
        windows: Place in its lane at which each window begins, and the end, (lanes, W + 1).
        bits: Of the permutation of each window's rows, (2, lanes, W).
        keys: Of the same, (ROUNDS, lanes, W).
        chunks: Rows looked up last, two chunks a lane. Entries are replaced whole, so that threads
            need no lock: at worst two look up the same.
    """

    number: int
    partitions: Ids
    starts: Ids
    windows: Ids
    bits: Unsigned
    keys: Unsigned
    chunks: list[tuple[int, Ids] | None]


@dataclass(frozen=True, slots=True)
class _Turns:
    """Whose turn it is: which lane gives the row at which offset of an epoch.

    A stage is the rounds among lanes that all have a full run left. Each stage ends where lanes
    have no more; after the last one, the remainders follow lane by lane.

    Attributes:
        run: Rows that a lane gives in a round.
        rounds: Full runs that each lane has, (lanes,).
        rest: Rows that each lane has left then, fewer than a run, (lanes,).
        stages: Rounds that stand before each stage, and before the remainders; rising.
        begins: Offset at which each stage begins, and the remainders.
        tail: Offset at which each lane's remainder begins, and the end, (lanes + 1,).
    """

    run: int
    rounds: Ids
    rest: Ids
    stages: list[int]
    begins: list[int]
    tail: Ids

    @classmethod
    def of(cls, rows: Ids, run: int) -> Self:
        """The turns of lanes that have so many rows."""
        rounds, rest = np.divmod(rows, run)
        stages = np.unique(np.append(rounds, 0))
        in_turn = len(rounds) - np.searchsorted(np.sort(rounds), stages[:-1], side="right")
        begins = np.cumsum(np.append(0, np.diff(stages) * in_turn * run))
        return cls(
            run=run,
            rounds=rounds,
            rest=rest,
            stages=stages.tolist(),
            begins=begins.tolist(),
            tail=begins[-1] + np.append(0, np.cumsum(rest)),
        )

    def taken(self, offset: int) -> Ids:
        """Rows of each lane that stand before `offset`."""
        if offset >= self.begins[-1]:
            taken: Ids = self.rounds * self.run + np.clip(offset - self.tail[:-1], 0, self.rest)
            return taken
        stage, lanes = self._stage(offset)
        rounds, into = divmod(offset - self.begins[stage], self.run * len(lanes))
        taken = self.rounds * self.run
        further = np.clip(into - np.arange(len(lanes)) * self.run, 0, self.run)
        taken[lanes] = (self.stages[stage] + rounds) * self.run + further
        return taken

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Offsets [start, stop) as (lane, first place in the lane, number of rows)."""
        run, at = self.run, start
        while at < min(stop, self.begins[-1]):
            stage, found = self._stage(at)
            begin, until, lanes = self.begins[stage], self.begins[stage + 1], found.tolist()
            until = min(stop, until)
            while at < until:
                runs, into = divmod(at - begin, run)
                rounds, turn = divmod(runs, len(lanes))
                count = min(run - into, until - at)
                yield lanes[turn], (self.stages[stage] + rounds) * run + into, count
                at += count
        while at < stop:
            lane = int(np.searchsorted(self.tail, at, side="right")) - 1
            count = min(int(self.tail[lane + 1]), stop) - at
            yield lane, int(self.rounds[lane] * run + at - self.tail[lane]), count
            at += count

    def _stage(self, offset: int) -> tuple[int, Ids]:
        """The stage that `offset` lies in, and its lanes, rising."""
        stage = bisect_right(self.begins, offset) - 1
        return stage, np.flatnonzero(self.rounds > self.stages[stage])


class Lanes:
    """A layout's partitions, dealt to lanes, and the sequence of every epoch.

    Each `lanes` consecutive partitions are dealt one to a lane, so that every lane reads from all
    over the data set, and a partition keeps its lane when others are added behind it.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self._seed = seed
        self._row = np.array(layout.partitions, np.int64)
        self._rows_of = np.diff(self._row)
        keys = numbers(stream_seed(seed, _DEAL), layout.count).reshape(-1, layout.lanes)
        within = np.argsort(keys, axis=1)
        groups = np.arange(0, layout.count, layout.lanes)[:, None]
        self._dealt = np.ascontiguousarray((groups + within).T)
        self._turns = _Turns.of(self._rows_of[self._dealt].sum(axis=1), layout.run)
        self._epochs: list[_Epoch | None] = [None] * _EPOCHS_KEPT

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Row ids at offsets [start, stop) of `epoch`."""
        tables = self._tables(epoch)
        found = [
            part
            for lane, first, count in self._turns.pieces(start, stop)
            for part in self._looked_up(tables, lane, first, first + count)
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def partitions(self, epoch: int, lane: int) -> Ids:
        """The partitions of `lane` in the order of `epoch`."""
        found: Ids = self._tables(epoch).partitions[lane].copy()
        return found

    def ahead(self, epoch: int, start: int, stop: int) -> Ids:
        """The partitions of all windows that offsets [start, stop) lie in, soonest needed first."""
        tables, layout = self._tables(epoch), self.layout
        low, high = self._turns.taken(start)[:, None], self._turns.taken(stop)[:, None]
        begins, ends = tables.windows[:, :-1], tables.windows[:, 1:]
        lane, window = np.nonzero((begins < high) & (ends > low) & (low < high))
        soonest = np.lexsort((lane, np.maximum(begins - low, 0)[lane, window]))
        places = window[soonest, None] * layout.window + np.arange(layout.window)
        lanes = np.broadcast_to(lane[soonest, None], places.shape)
        there = places < tables.partitions.shape[1]
        named = tables.partitions[lanes[there], places[there]]
        found: Ids = named[self._rows_of[named] > 0]
        return found

    def _looked_up(self, tables: _Epoch, lane: int, first: int, last: int) -> Iterator[Ids]:
        """Rows at places [first, last) of `lane`, in parts."""
        while first < last:
            number, into = divmod(first, _CHUNK)
            slot = 2 * lane + number % 2
            chunk = tables.chunks[slot]
            if chunk is None or chunk[0] != number:
                chunk = (number, self._rows(tables, lane, number * _CHUNK))
                tables.chunks[slot] = chunk
            part = chunk[1][into : into + last - first]
            yield part
            first += len(part)

    def _rows(self, tables: _Epoch, lane: int, first: int) -> Ids:
        """Rows at the places of `lane` from `first` on, up to a chunk of them."""
        windows, starts = tables.windows[lane], tables.starts[lane]
        places = np.arange(first, min(first + _CHUNK, starts[-1]))
        which = np.searchsorted(windows, places[[0, -1]], side="right") - 1
        if which[0] == which[1]:
            which = which[:1]
        else:
            which = np.searchsorted(windows, places, side="right") - 1
        begins = windows[which]
        moved = permute(
            (places - begins).astype(np.uint64),
            (windows[which + 1] - begins).astype(np.uint64),
            tables.bits[:, lane, which],
            tables.keys[:, lane, which],
        )
        mixed = begins + moved.astype(np.int64)
        part = np.searchsorted(starts, mixed, side="right") - 1
        rows: Ids = self._row[tables.partitions[lane, part]] + mixed - starts[part]
        return rows

    def _tables(self, epoch: int) -> _Epoch:
        slot = epoch % _EPOCHS_KEPT
        tables = self._epochs[slot]
        if tables is None or tables.number != epoch:
            tables = self._make(epoch)
            self._epochs[slot] = tables
        return tables

    def _make(self, epoch: int) -> _Epoch:
        layout = self.layout
        keys = numbers(stream_seed(self._seed, _PARTITIONS, epoch), layout.count)
        order = np.argsort(keys.reshape(self._dealt.shape), axis=1)
        partitions = np.take_along_axis(self._dealt, order, axis=1)
        rows = self._rows_of[partitions]
        starts = np.concatenate((np.zeros_like(rows[:, :1]), np.cumsum(rows, axis=1)), axis=1)
        windows = np.concatenate((starts[:, : -1 : layout.window], starts[:, -1:]), axis=1)
        sizes = np.diff(windows, axis=1)
        bits = np.maximum(np.frexp(np.maximum(sizes, 1) - 1.0)[1], 2)  # of the last place
        row_keys = numbers(stream_seed(self._seed, _ROWS, epoch), ROUNDS * sizes.size)
        return _Epoch(
            number=epoch,
            partitions=partitions,
            starts=starts,
            windows=windows,
            bits=np.stack((bits // 2, bits - bits // 2)).astype(np.uint64),
            keys=row_keys.reshape(ROUNDS, *sizes.shape),
            chunks=[None] * (2 * layout.lanes),
        )
