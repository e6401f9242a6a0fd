"""Shuffle that keeps reads together: partitions are dealt to lanes and mixed inside windows.

Everything follows from (seed, layout, epoch), nothing from who reads. An epoch's tables take memory
and time in proportion to its partitions; rows are looked up some thousands at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from raycloud.order.permutation import ROUNDS, Unsigned, numbers, permute
from raycloud.order.seeds import stream_seed

MOST_LANES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a shuffle must know of a data set to keep its reads together.

    A round takes `run` rows of each lane in turn. A lane owns the same partitions in every epoch,
    so whoever computes its rows reads the same part of the data set. Each epoch permutes a lane's
    partitions anew, and mixes the rows of `window` partitions that follow each other.

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
        """Refuse a layout that cannot be dealt, with a `ValueError`."""
        for name in ("lanes", "run", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
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


class Lanes:
    """A layout's partitions, dealt to lanes, and the sequence of every epoch.

    Each `lanes` consecutive partitions are dealt one to a lane, so that every lane reads from all
    over the data set, and a partition keeps its lane when others are added behind it.

    Lanes take turns. A stage is the rounds among lanes that all have a full run left: it ends where
    one has no more. After the last stage, the remainders follow lane by lane.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout, self.samples = layout, layout.samples
        self._seed = seed
        self._row = np.array(layout.partitions, np.int64)
        self._rows_of = np.diff(self._row)
        keys = numbers(stream_seed(seed, _DEAL), layout.count).reshape(-1, layout.lanes)
        groups = np.arange(0, layout.count, layout.lanes)[:, None]
        self._dealt = np.ascontiguousarray((groups + np.argsort(keys, axis=1)).T)
        self._epochs: list[_Epoch | None] = [None] * _EPOCHS_KEPT
        rows = self._rows_of[self._dealt].sum(axis=1)
        self._rounds, rest = np.divmod(rows, layout.run)  # full runs of each lane
        stages = np.unique(np.append(self._rounds, 0))
        in_turn = (self._rounds[:, None] > stages[:-1]).sum(axis=0)
        begins = np.cumsum(np.append(0, np.diff(stages) * in_turn * layout.run))
        # Rounds before each stage, and the offset at which it begins; of the remainders last.
        self._stages, self._begins = stages.tolist(), begins.tolist()
        self._tail = begins[-1] + np.append(0, np.cumsum(rest))  # where each remainder begins

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """Row ids at offsets [start, stop) of `epoch`."""
        tables = self._tables(epoch)
        found = [
            part
            for lane, first, count in self._pieces(start, stop)
            for part in self._looked_up(tables, lane, first, first + count)
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def lane(self, epoch: int, lane: int) -> Ids:
        """The partitions of `lane` in the order of `epoch`."""
        found: Ids = self._tables(epoch).partitions[lane].copy()
        return found

    def partitions(self, epoch: int) -> Ids:
        """The partitions of all lanes that have rows, by when their windows are reached."""
        tables, window = self._tables(epoch), self.layout.window
        begins = np.repeat(tables.windows[:, :-1], window, axis=1)
        begins = begins[:, : tables.partitions.shape[1]]
        found = tables.partitions.ravel()[np.argsort(begins, axis=None, kind="stable")]
        read: Ids = found[self._rows_of[found] > 0]
        return read

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Offsets [start, stop) as (lane, first place in the lane, number of rows)."""
        run, at = self.layout.run, start
        while at < min(stop, self._begins[-1]):
            stage = bisect_right(self._begins, at) - 1
            lanes = np.flatnonzero(self._rounds > self._stages[stage]).tolist()
            begin, until = self._begins[stage], min(stop, self._begins[stage + 1])
            while at < until:
                runs, into = divmod(at - begin, run)
                rounds, turn = divmod(runs, len(lanes))
                count = min(run - into, until - at)
                yield lanes[turn], (self._stages[stage] + rounds) * run + into, count
                at += count
        while at < stop:
            lane = int(np.searchsorted(self._tail, at, side="right")) - 1
            count = min(int(self._tail[lane + 1]), stop) - at
            yield lane, int(self._rounds[lane] * run + at - self._tail[lane]), count
            at += count

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
