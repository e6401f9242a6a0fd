"""Samples of a data set by id: rows of blocks that are mapped into memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raycloud.clock import SystemClock
from raycloud.errors import InternalError
from raycloud.rows import Rows

if TYPE_CHECKING:
    from raycloud.data.index import Block, Index

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
_Kind = tuple[np.dtype[Any], tuple[int, ...]]
_Kinds = dict[str, _Kind]
"""By column of fixed width, the type of its values and the shape of one."""
Wanted = Sequence[tuple["Block", Ids]]
"""Blocks, and the numbers of the rows of each that are asked for."""

_OPEN_BLOCKS = 1024  # maps cost next to nothing, but the kernel counts them (65530)
_PREFETCHED_BLOCKS = 256  # a block is not read ahead again while it is one of the last so many
_PAGE_BYTES = 4096
_MUCH = 8  # of a block that nobody has said will be read this part is asked for row by row
_GIVES_WAY, _GIVES_WAY_S = 2, 1.0  # answers with rows, and to each: a block that is read ahead
_QUIET_S = 0.05  # without another question no more rows are asked for
_SMALL_BYTES = 256 * 2**20  # so much is copied to a node that has nothing else to do
_LOOK_S = 0.5  # between two looks whether a link is idle
_COPIERS = 4  # blocks at a time: over a long link one alone waits more than it travels
_COPIED_BYTES = 4 * 2**20  # of them together: what is on its way is not given up


class BlockSamples:
    """Samples of an `Index`: row r of its blocks, in order, is the sample with id r. Thread-safe.

    Blocks are opened when a row of theirs is first needed or prefetched, and kept open. Of one that
    is on another node some rows are asked for alone, while all of it is on its way.

    Args:
        index: Of the blocks.
        table_of: The rows of a block. It is called from any thread, and again for a block that was
            not used for long; it may block. The table is kept, and with it the memory that it is a
            view of.
        rows_of: By key, those rows of blocks that are asked for, without those of blocks that are
            on this node; None: all blocks are.
    """

    def __init__(
        self,
        index: Index,
        table_of: Callable[[Block], pa.Table],
        rows_of: Callable[[Wanted], Mapping[str, pa.Table]] | None = None,
    ) -> None:
        self.index = index
        self._table_of, self._rows_of = table_of, rows_of
        self._starts = np.array(index.starts, dtype=np.int64)
        self._open: dict[int, _Opened] = {}
        self._opening: dict[int, threading.Lock] = {}
        self._kinds: dict[Any, _Kinds] = {}  # each that a block has, once
        self._prefetched: dict[int, None] = {}
        self._coming: dict[int, int] = {}  # being read ahead, or to be: rows asked for meanwhile
        self._few: dict[int, int] = {}  # rows asked for of others that are not here
        self._ahead: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._asking = 0  # threads that wait for rows of other nodes
        self._lately = False  # some have begun to since a block has given way
        self._asked = threading.Condition(self._lock)

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._starts[-1])

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """The row with id `index`, 0 <= index < len."""
        return self.gather(np.array([index]))[0]

    def gather(self, ids: Ids) -> Rows:
        """The rows with these ids, in their order; ids may repeat.

        A column is what `Rows.from_table` makes of these rows' values. Those of fixed width, with
        no value missing in the blocks they lie in, are copied once, from the map to the result.

        Raises:
            IndexError: An id that no row has.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if not len(ids):
            return Rows.from_table(self._opened(0).table.slice(0, 0))
        blocks = self._blocks_of(ids)
        order = np.argsort(blocks, kind="stable")
        blocks = blocks[order]
        edges = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(ids)]
        local = ids[order] - self._starts[blocks]
        numbers = [int(blocks[start]) for start in edges[:-1]]
        of_each = [local[start:stop] for start, stop in pairwise(edges)]
        far = self._far(numbers, of_each)
        picks = [
            (far[n], np.arange(stop - start), order[start:stop])
            if n in far
            else (self._opened(n), local[start:stop], order[start:stop])
            for n, (start, stop) in zip(numbers, pairwise(edges), strict=True)
        ]
        first, kinds = picks[0][0], _kinds_of([opened for opened, _, _ in picks])
        columns = {}
        for name in first.table.column_names:
            if name in kinds:
                columns[name] = _copied(name, kinds[name], picks, len(ids))
            else:
                columns[name] = _taken(name, picks, order)
        return Rows(columns)

    def prefetch(self, ids: Ids) -> None:
        """Say that these will be gathered soon: their blocks are opened and read ahead.

        Returns at once; a thread does it. What fails there is tried again by `gather`, which raises
        what stays wrong.
        """
        numbers = set(self._blocks_of(np.asarray(ids, dtype=np.int64)).tolist())
        if numbers <= self._prefetched.keys():  # nearly always
            return
        self._begin_reading(numbers)

    @property
    def opened(self) -> frozenset[int]:
        """Numbers of the blocks that are open by now."""
        return frozenset(self._open.copy())

    def copy_while(
        self, idle: Callable[[], bool | None], partitions: Ids, *, gently: bool = False
    ) -> None:
        """Copy blocks of other nodes to this one, in threads, while it, or its link, is idle.

        Only of a small data set: there any block may be needed here soon, where shares change.

        Args:
            idle: Asked before each block: False: not now; None: never again. What is on its way is
                not given up.
            partitions: Whose blocks come, in this order.
            gently: One at a time, and half of the time none.
        """
        if self._rows_of is None or self.index.bytes > _SMALL_BYTES:
            return
        edges = np.asarray(self.index.partitions, dtype=np.int64)
        wanted: dict[int, None] = {}
        for partition in partitions.tolist():
            start, stop = edges[partition], edges[partition + 1]
            if start < stop:
                first, last = self._blocks_of(np.array([start, stop - 1])).tolist()
                wanted.update(dict.fromkeys(range(first, last + 1)))
        args = (idle, iter(wanted))
        largest = max((block.bytes for block in self.index.blocks), default=0)
        for _ in range(1 if gently else max(1, min(_COPIERS, _COPIED_BYTES // max(1, largest)))):
            threading.Thread(
                target=self._copy, args=args, kwargs={"gently": gently}, name="copy", daemon=True
            ).start()

    def _copy(
        self, idle: Callable[[], bool | None], numbers: Iterator[int], *, gently: bool
    ) -> None:
        clock, pause = SystemClock(), threading.Event()
        while (now := idle()) is not None:
            if not now or (gently and self._coming):  # what will be read comes first
                pause.wait(_LOOK_S)
                continue
            self._give_way()
            with self._lock:
                number = next((n for n in numbers if n not in self._open), None)
            if number is None:
                return
            began_s = clock.monotonic_s()
            with suppress(Exception):  # who needs it meets it again, and says so
                self._opened(number)
            if gently:
                pause.wait(clock.monotonic_s() - began_s)

    def _begin_reading(self, numbers: set[int]) -> None:
        with self._lock:
            new = sorted(numbers - self._prefetched.keys() - self._coming.keys())
            self._prefetched.update(dict.fromkeys(new))
            while len(self._prefetched) > _PREFETCHED_BLOCKS:
                del self._prefetched[next(iter(self._prefetched))]
            self._coming.update({number: self._few.pop(number, 0) for number in new})
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(1, thread_name_prefix="raycloud-read-ahead")
        for number in new:
            self._ahead.submit(self._read_ahead, number)

    def _read_ahead(self, number: int) -> None:
        try:
            self._give_way()
            table = self._opened(number).table
        finally:
            with self._lock:
                self._coming.pop(number, None)
        for column in table.columns:
            for chunk in column.chunks:
                for buffer in chunk.buffers():
                    if buffer is not None and buffer.size:
                        # One byte of each page: the kernel reads what is not in memory yet.
                        np.frombuffer(buffer, dtype=np.uint8)[::_PAGE_BYTES].sum()

    def _give_way(self) -> None:
        """Wait until no rows are asked for, a few answers at most: over a thin link they are late.

        A feed that is behind asks for the next ones at once.
        """
        with self._asked:
            for _ in range(_GIVES_WAY):
                if not self._lately:
                    return
                self._asked.wait_for(lambda: not self._asking, _GIVES_WAY_S)
                self._lately = False
                self._asked.wait_for(lambda: self._lately, _QUIET_S)

    def _far(self, numbers: Sequence[int], rows: Sequence[Ids]) -> dict[int, _Opened]:
        """By block, the rows asked for, of those that another node has and that are still coming.

        One that nobody has said will be read is begun to come once an eighth of its rows is asked
        for. Who has asked for as many rows as a block has waits for all of it: no more travels
        twice.
        """
        if self._rows_of is None or all(number in self._open for number in numbers):
            return {}
        with self._waiting():
            away = [
                (n, local) for n, local in zip(numbers, rows, strict=True) if n not in self._open
            ]
            if much := {n for n, local in away if self._is_much(n, len(local))}:
                self._begin_reading(much)
            wanted: dict[str, tuple[int, Block, Ids]] = {}  # blocks of equal content have one key
            for number, local in away:
                block, begun = self.index.blocks[number], number in self._prefetched
                asked = self._coming.get(number, None if begun else self._few.get(number, 0))
                if asked is None or block.key in wanted:  # it is here, or reading it has failed
                    continue
                if asked + len(local) <= block.rows:
                    wanted[block.key] = number, block, local
            if not wanted:
                return {}
            found = self._rows_of([(block, local) for _, block, local in wanted.values()])
        far = {}
        for key, (number, _, local) in wanted.items():
            if key in found and len(found[key]) == len(local):
                far[number] = _Opened(found[key])
                with self._lock:
                    if number in self._coming:
                        self._coming[number] += len(local)
                    elif number not in self._prefetched:
                        self._few[number] = self._few.get(number, 0) + len(local)
        return far

    def _is_much(self, number: int, rows: int) -> bool:
        """Whether with so many more rows enough of a block is asked for to have all of it come."""
        return _MUCH * (self._few.get(number, 0) + rows) >= self.index.blocks[number].rows

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Rows are waited for: blocks that are read ahead give way."""
        with self._asked:
            self._asking, self._lately = self._asking + 1, True
            self._asked.notify_all()
        try:
            yield
        finally:
            with self._asked:
                self._asking -= 1
                self._asked.notify_all()

    def _blocks_of(self, ids: Ids) -> Ids:
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            wrong = ids[(ids < 0) | (ids >= len(self))][0]
            raise IndexError(f"sample {wrong} of {len(self)}")
        blocks: Ids = np.searchsorted(self._starts, ids, side="right") - 1
        return blocks

    def _opened(self, number: int) -> _Opened:
        """A block, opened by whoever comes first; the others wait for that."""
        there = self._open.get(number)  # no lock: this is asked some ten times a micro-batch
        if there is not None:
            return there
        with self._lock:
            opening = self._opening.setdefault(number, threading.Lock())
        with opening:
            there = self._open.get(number)
            if there is not None:
                return there
            block = self.index.blocks[number]
            table = self._table_of(block)
            if len(table) != block.rows:
                raise InternalError(
                    f"the block {block.key} has {len(table)} rows where the index of the data set "
                    f"says {block.rows}"
                )
            opened = _Opened(table)
            with self._lock:
                opened.kinds = self._kinds.setdefault(tuple(opened.kinds.items()), opened.kinds)
                self._open[number] = opened
                while len(self._open) > _OPEN_BLOCKS:  # an epoch leaves the one opened first
                    del self._open[next(iter(self._open))]
                self._opening.pop(number, None)
            return opened


class _Opened:
    """A block's table, and of its columns of fixed width a view with one item a row."""

    __slots__ = ("items", "kinds", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.items: dict[str, Array] = {}  # of opaque bytes: copying those is the quickest
        self.kinds: _Kinds = {}
        rows = Rows.from_table(table)
        for name, column in zip(table.column_names, table.columns, strict=True):
            if not len(column) or not _is_fixed(column.type) or any(map(_missing, column.chunks)):
                continue
            array = np.ascontiguousarray(rows[name])
            if array.dtype.kind == "O":
                continue
            self.kinds[name] = (array.dtype, array.shape[1:])
            row_bytes = array.nbytes // len(array)
            self.items[name] = array.reshape(len(array), -1).view(f"V{row_bytes}").reshape(-1)


_Pick = tuple[_Opened, Ids, Ids]
"""Rows of one block: the block, their numbers in it, and where they stand in the result."""


def _kinds_of(blocks: Sequence[_Opened]) -> _Kinds:
    """The columns that can be copied: of the same fixed width in all blocks."""
    first = blocks[0].kinds
    if all(opened.kinds is first for opened in blocks):
        return first
    return dict(kind for kind in first.items() if all(kind in o.kinds.items() for o in blocks))


def _copied(name: str, kind: _Kind, picks: Sequence[_Pick], count: int) -> Array:
    dtype, shape = kind
    items = np.empty(count, dtype=picks[0][0].items[name].dtype)
    for opened, local, at in picks:
        items[at] = opened.items[name][local]
    return items.view(dtype).reshape(count, *shape)


def _taken(name: str, picks: Sequence[_Pick], order: Ids) -> pa.Array:
    """A column of any type, by Arrow: taken from each block, put together, and put in order."""
    parts = [
        chunk
        for opened, local, _ in picks
        for chunk in opened.table.column(name).take(pa.array(local)).chunks
    ]
    return pa.chunked_array(parts).combine_chunks().take(pa.array(np.argsort(order)))


def _is_fixed(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_fixed(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    return bool(pa.types.is_primitive(kind))


def _missing(array: pa.Array) -> bool:
    """Whether any value is missing, also inside of lists of a fixed size."""
    if isinstance(array.type, pa.BaseExtensionType):
        return _missing(array.storage)
    if array.null_count:
        return True
    return pa.types.is_fixed_size_list(array.type) and _missing(array.flatten())
