"""Rows of a data set by id, read from blocks: what a worker trains on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raycloud.errors import InternalError
from raycloud.rows import Rows

if TYPE_CHECKING:
    from raycloud.data.index import Block, Index

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
_Kind = tuple[np.dtype[Any], tuple[int, ...]]
_Kinds = dict[str, _Kind]
"""By column of fixed width, the type of its values and the shape of one."""

_OPEN_BLOCKS = 1024  # maps cost next to nothing, but the kernel counts them (65530)
_WANTED_BLOCKS = 256  # a block is not read ahead again while it is one of the last so many
_PAGE_BYTES = 4096


class BlockSamples:
    """Samples of an `Index`: row r of its blocks, in order, is the sample with id r. Thread-safe.

    Blocks are opened when a row of theirs is first needed, or wanted, and kept open.
    """

    def __init__(self, index: Index, table_of: Callable[[Block], pa.Table]) -> None:
        """Take the index, and what finds a block's rows.

        Args:
            index: Blocks in order.
            table_of: Called from any thread, and again for a block that was not used for long; it
                may block. The table is kept, and with it the memory that it is a view of.
        """
        self.index = index
        self._table_of = table_of
        self._starts = np.array(index.starts, dtype=np.int64)
        self._open: dict[int, _Opened] = {}
        self._kinds: list[_Kinds] = []  # each that a block has, once
        self._opening: dict[int, Future[_Opened]] = {}
        self._wanted: dict[int, None] = {}
        self._ahead: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

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
        picks = [
            _Pick(self._opened(int(blocks[start])), local[start:stop], order[start:stop])
            for start, stop in pairwise(edges)
        ]
        first, kinds = picks[0].opened, _kinds_of(picks)
        return Rows(
            {
                name: _copied(name, kinds[name], picks, len(ids))
                if name in kinds
                else _taken(name, picks, order)
                for name in first.names
            }
        )

    def want(self, ids: Ids) -> None:
        """Say that these will be gathered soon: their blocks are opened and read ahead.

        Returns at once; a thread does it. What fails there is tried again by `gather`, which raises
        what stays wrong.
        """
        numbers = set(self._blocks_of(np.asarray(ids, dtype=np.int64)).tolist())
        if numbers <= self._wanted.keys():  # nearly always
            return
        with self._lock:
            new = sorted(numbers - self._wanted.keys())
            self._wanted.update(dict.fromkeys(new))
            while len(self._wanted) > _WANTED_BLOCKS:
                del self._wanted[next(iter(self._wanted))]
            if self._ahead is None:
                self._ahead = ThreadPoolExecutor(1, thread_name_prefix="raycloud-read-ahead")
        for number in new:
            assert self._ahead is not None  # noqa: S101
            self._ahead.submit(self._read_ahead, number)

    def _read_ahead(self, number: int) -> None:
        for column in self._opened(number).table.columns:
            for chunk in column.chunks:
                for buffer in chunk.buffers():
                    if buffer is not None and buffer.size:
                        # One byte of each page: the kernel reads what is not in memory yet.
                        np.frombuffer(buffer, dtype=np.uint8)[::_PAGE_BYTES].sum()

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
            there = self._open.get(number)
            if there is not None:
                return there
            future = self._opening.get(number)
            first = future is None
            if future is None:
                future = self._opening[number] = Future()
        if first:
            self._open_first(number, future)
        return future.result()

    def _open_first(self, number: int, future: Future[_Opened]) -> None:
        block = self.index.blocks[number]
        try:
            opened = _Opened(_checked(self._table_of(block), block))
        except BaseException as error:  # noqa: BLE001  # raised by `result`, in each who waits
            with self._lock:
                del self._opening[number]
            future.set_exception(error)
            return
        with self._lock:
            for kinds in self._kinds:
                if kinds == opened.kinds:
                    opened.kinds = kinds
                    break
            else:
                self._kinds.append(opened.kinds)
            del self._opening[number]
            self._open[number] = opened
            while len(self._open) > _OPEN_BLOCKS:  # an epoch leaves the one opened first
                del self._open[next(iter(self._open))]
        future.set_result(opened)


def _checked(table: pa.Table, block: Block) -> pa.Table:
    if len(table) != block.rows:
        raise InternalError(
            f"the block {block.key} has {len(table)} rows where the index of the data set says "
            f"{block.rows}"
        )
    return table


class _Opened:
    """A block's table, and of its columns of fixed width a view with one item a row."""

    __slots__ = ("items", "kinds", "names", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.names: tuple[str, ...] = tuple(table.column_names)
        self.items: dict[str, Array] = {}  # of opaque bytes: copying those is the quickest
        self.kinds: _Kinds = {}
        rows = Rows.from_table(table)
        for name, column in zip(self.names, table.columns, strict=True):
            if not len(column) or not _is_fixed(column.type) or _missing(column):
                continue
            array = np.ascontiguousarray(rows[name])
            if array.dtype.kind == "O":
                continue
            self.kinds[name] = (array.dtype, array.shape[1:])
            row_bytes = array.nbytes // len(array)
            self.items[name] = array.reshape(len(array), -1).view(f"V{row_bytes}").reshape(-1)


class _Pick:
    """Rows of one block, and where they stand in the result."""

    __slots__ = ("at", "local", "opened")

    def __init__(self, opened: _Opened, local: Ids, at: Ids) -> None:
        self.opened = opened
        self.local = local
        self.at = at


def _kinds_of(picks: Sequence[_Pick]) -> _Kinds:
    """The columns that can be copied: of the same fixed width in all blocks."""
    first = picks[0].opened.kinds
    if all(pick.opened.kinds is first for pick in picks):
        return first
    return {
        name: kind
        for name, kind in first.items()
        if all(pick.opened.kinds.get(name) == kind for pick in picks)
    }


def _copied(name: str, kind: _Kind, picks: Sequence[_Pick], count: int) -> Array:
    dtype, shape = kind
    items = np.empty(count, dtype=picks[0].opened.items[name].dtype)
    for pick in picks:
        items[pick.at] = pick.opened.items[name][pick.local]
    return items.view(dtype).reshape(count, *shape)


def _taken(name: str, picks: Sequence[_Pick], order: Ids) -> pa.Array:
    """A column of any type, by Arrow: taken from each block, put together, and put in order."""
    parts = [
        chunk
        for pick in picks
        for chunk in pick.opened.table.column(name).take(pa.array(pick.local)).chunks
    ]
    back = np.empty(len(order), dtype=np.int64)
    back[order] = np.arange(len(order))
    return pa.chunked_array(parts).combine_chunks().take(pa.array(back))


def _is_fixed(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_fixed(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    return bool(pa.types.is_primitive(kind))


def _missing(column: pa.ChunkedArray) -> bool:
    """Whether any value is missing, also inside of lists of a fixed size."""
    return any(_missing_in(chunk) for chunk in column.chunks)


def _missing_in(array: pa.Array) -> bool:
    if isinstance(array.type, pa.BaseExtensionType):
        return _missing_in(array.storage)
    if array.null_count:
        return True
    return pa.types.is_fixed_size_list(array.type) and _missing_in(array.flatten())
