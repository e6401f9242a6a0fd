"""Blocks on a node's disk, shared by all runs that name the same directory, and kept after them.

<root>/blocks/<first two letters>/<key>.arrow     see `block`
<root>/sets, uses, lock                           see `sets`
<root>/digests.json                               see `digest`
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raycloud.bounded import expanded
from raycloud.data import eviction, sets
from raycloud.data.block import DamagedBlock, open_block, publish, write_all, write_block
from raycloud.data.eviction import Held, Listing, Removal
from raycloud.data.index import Block
from raycloud.data.sets import DataSet, Use
from raycloud.errors import MachineError, SpecError

if TYPE_CHECKING:
    from io import FileIO

    import pyarrow as pa

    from raycloud.clock import Clock
    from raycloud.spec.sections import CacheSection

__all__ = ["BlockCache", "DamagedBlock", "DataSet", "Held", "Listing", "Removal", "Use"]

_FULL = (
    "`raycloud cache ls` shows what it holds and `raycloud cache rm` makes room; "
    "data.cache.disk_bytes bounds it; data.cache.path moves it"
)
_FILES = "let processes have more files open (`ulimit -n`, or `fs.file-max` of the node)"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: "give the node more memory, or run less beside it",
    errno.EIO: "the disk fails: see the node's log; data.cache.path moves the cache",
}
_ELSE = "set data.cache.path to a directory that can be written"


class BlockCache:
    """A directory of blocks. Cheap to make, picklable, and safe between threads and processes."""

    def __init__(self, root: Path, disk_bytes: int | None = None) -> None:
        """`root` is made when something is written; `disk_bytes` is what `evict` goes down to."""
        self.root = expanded(root).absolute()
        self.disk_bytes = disk_bytes

    @classmethod
    def of(cls, section: CacheSection, default: Path) -> Self:
        """The cache that a job asks for; `default` is the node's own `Environment.cache`.

        Raises:
            SpecError: `data.cache.path` is a URL.
        """
        if section.path is not None and "://" in section.path:
            raise SpecError(
                "data.cache.path",
                section.path,
                "is a URL, and blocks are mapped into memory",
                hint="write a directory on each node's own disk, or null",
            )
        root = default if section.path is None else Path(section.path)
        return cls(root, section.disk_bytes)

    def path_of(self, key: str) -> Path:
        """Where the block is, or would be."""
        return eviction.path_of(self.root, key)

    def has(self, key: str) -> bool:
        """Whether the block's file is there; `open` tells whether it is whole."""
        return self.path_of(key).is_file()

    def open(self, key: str) -> pa.Table:
        """Map a block. Its columns are not copied, and stay valid when the file is removed.

        Raises:
            DamagedBlock: It is missing, cut short or not a block.
            MachineError: It cannot be opened, and may be whole.
        """
        with self._blamed("read"):
            return open_block(self.path_of(key))

    def whole(self, key: str) -> pa.Table | None:
        """The same; None where it has to be made or fetched again. A damaged file is removed.

        Raises:
            MachineError: It cannot be opened, and may be whole; or it cannot be removed.
        """
        try:
            return self.open(key)
        except DamagedBlock:
            with self._blamed("clean"):
                self.path_of(key).unlink(missing_ok=True)
            return None

    def add(
        self, key: str, tables: Iterable[pa.Table], facts: Mapping[str, Any] | None = None
    ) -> Block:
        """Write a block, all of it or nothing. Where several processes do, either's stays.

        Args:
            key: Its name.
            tables: The rows, all of one schema.
            facts: JSON-ready values, found again by `block.facts_of`.

        Raises:
            MachineError: The disk is full or fails.
            pa.ArrowInvalid: The tables' columns differ.
        """
        tables = list(tables)  # what makes them may raise an OSError of its own
        with self._blamed("write to"):
            rows, size = write_block(self.path_of(key), tables, facts)
        return Block(key=key, rows=rows, bytes=size)

    def copy_in(self, key: str, content: Iterable[bytes | memoryview]) -> Block:
        """Keep a copy of a block's file, as another node read it.

        Raises:
            DamagedBlock: What came is not the whole block; nothing is kept.
            MachineError: The disk is full or fails.
        """

        def fill(file: FileIO) -> None:
            for chunk in content:
                write_all(file, chunk)
            open_block(Path(str(file.name)))

        with self._blamed("write to"):
            size = publish(self.path_of(key), fill)
        return Block(key=key, rows=len(self.open(key)), bytes=size)

    def use(self, data_set: DataSet, clock: Clock, who: str) -> Use:
        """Claim a data set, before its blocks are made or read; its record is written.

        Args:
            data_set: What is used. A complete record that is there already is kept.
            clock: For when it was used, now and when the use is closed.
            who: Told to those who would remove it, e.g. `run gpt-3`.

        Raises:
            MachineError: The disk is full or fails.
        """
        with self._blamed("write to"), sets.locked(self.root):
            known = sets.find(self.root, data_set.id)
            record = known if known is not None and known.complete else data_set
            sets.write(self.root, replace(record, used_unix_s=clock.unix_s()))
            return Use(self.root, data_set, clock, who)

    def complete(self, data_set: DataSet) -> None:
        """Record that all blocks are there; `data_set` says how many rows, and which are bad."""
        with self._blamed("write to"), sets.locked(self.root):
            known = sets.find(self.root, data_set.id)
            used = known.used_unix_s if known is not None else data_set.used_unix_s
            sets.write(self.root, replace(data_set, complete=True, used_unix_s=used))

    def find(self, id: str) -> DataSet | None:  # noqa: A002  # it is what it is called
        """The record of a data set."""
        return sets.find(self.root, id)

    def evict(self, *, keep: Collection[str] = (), order: Sequence[str] = ()) -> int:
        """Remove blocks until `disk_bytes` are not exceeded, or nothing more may go.

        First go blocks that no data set has, then what stratified ones were dealt from, then whole
        data sets, the least recently used first; never one in use. Then those in `order`, which may
        be in use.

        Args:
            keep: Keys that stay.
            order: Keys of copies that other nodes have too, first to go first: the one whose next
                use lies farthest.

        Returns:
            Bytes removed.
        """
        if self.disk_bytes is None:
            return 0
        with self._blamed("clean"):
            return eviction.evict(self.root, self.disk_bytes, keep=keep, order=order)

    def ls(self) -> Listing:
        """All that is there."""
        with self._blamed("read"):
            return eviction.listing(self.root)

    def rm(
        self, ids: Collection[str] | None = None, *, used_before_unix_s: float | None = None
    ) -> Removal:
        """Remove data sets, but for those in use, and their blocks that no other data set has.

        Args:
            ids: Which ones: their ids, or the first letters. None: all, and what belongs to none.
            used_before_unix_s: Only those that were last used before this.

        Raises:
            DataError: No data set has such an id, or several begin with it.
        """
        with self._blamed("clean"):
            return eviction.remove(self.root, ids, used_before_unix_s=used_before_unix_s)

    @contextmanager
    def _blamed(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError) as error:
            number = error.errno if isinstance(error, OSError) else errno.ENOMEM
            why = error.strerror if isinstance(error, OSError) else None
            raise MachineError(
                f"cannot {verb} the cache {self.root}: {why or error or 'no memory'}",
                hint=_HINTS.get(number or 0, _ELSE),
            ) from error
