"""Cache of blocks on a node's disk, shared by all runs that name its directory, kept after them.

<root>/blocks/<first two letters>/<key>.arrow     see `block`
<root>/sets/<id>.json           a record per data set: which blocks belong together
<root>/uses/<id>/<any>.json     a file per process that uses it, locked as long as it does
<root>/lock                     held while records and uses are looked at together
<root>/digests.json             see `digest`
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter

from raycloud.bounded import expanded, json_value, read_whole
from raycloud.data.block import DRAFT, DamagedBlock, open_block, publish, write_block
from raycloud.data.index import BadRow, Block
from raycloud.errors import DataError, InternalError, MachineError, SpecError

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.clock import Clock
    from raycloud.spec.sections import CacheSection

__all__ = ["BlockCache", "DamagedBlock", "DataSet", "Held", "Listing", "Removal", "Use", "locked"]

FORMAT = 1  # of records

_KEY = "[A-Za-z0-9][A-Za-z0-9_-]*"  # no name that leads out of the cache
_LARGEST_BYTES = 2**28  # of a record: a key for each of some million blocks

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
_Key = Annotated[str, Field(pattern=f"^{_KEY}$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """The blocks of one version of a split.

    Attributes:
        id: Digest of what the blocks are made from.
        source: Where the rows came from, without user names, passwords and tokens.
        keys: Names of its blocks, in order; of a stratified one that is complete, the dealt ones.
        parts: Of a stratified one, the blocks that `keys` were dealt from: needed only to make one
            of them again, and the first to be evicted.
        sizes: Of a stratified one that is complete, the rows of each partition, in order; `keys`
            are those of the partitions that have any.
        rows: Rows of all blocks; 0 until it is complete.
        bad: The first of the `bad_rows` that were left out.
        columns: Their names and types, as text; empty until it is complete, or not known.
        used_unix_s: When a run last began or ended to use it.
    """

    id: str
    task: str
    split: str
    source: str
    keys: tuple[_Key, ...]
    parts: tuple[_Key, ...] = ()
    sizes: tuple[int, ...] = ()
    rows: int = 0
    bad_rows: int = 0
    bad: tuple[BadRow, ...] = ()
    columns: str = ""
    complete: bool = False
    used_unix_s: float = 0.0

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of all its blocks."""
        return (*self.keys, *self.parts)


_RECORD = TypeAdapter(DataSet)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A data set in a cache: how many of its blocks are there, and their bytes.

    Data sets may have blocks in common. `users` use it now: `run gpt-3 (process 4711)`.
    """

    data_set: DataSet
    blocks: int
    bytes: int
    users: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """All that is in a cache: its data sets, the most recently used first.

    `bytes` counts each block once. Loose blocks belong to no data set.
    """

    root: Path
    sets: tuple[Held, ...] = ()
    bytes: int = 0
    loose_blocks: int = 0
    loose_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What was removed from a cache; and what was refused, as it is in use."""

    removed: tuple[DataSet, ...] = ()
    refused: tuple[Held, ...] = ()
    blocks: int = 0
    bytes: int = 0


class BlockCache:
    """A directory of blocks. Cheap to make, picklable, and safe between threads and processes.

    `root` is made when something is written; `disk_bytes` is what `evict` goes down to. Where the
    disk is full or fails, methods raise a `MachineError`.
    """

    def __init__(self, root: Path, disk_bytes: int | None = None) -> None:
        self.root = expanded(root).absolute()
        self.disk_bytes = disk_bytes

    @classmethod
    def of(cls, section: CacheSection, default: Path) -> Self:
        """The cache that a job asks for, or `default`; a URL is a `SpecError`."""
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
        """Where a block is, or would be."""
        if re.fullmatch(_KEY, key) is None:
            raise InternalError(f"{key[:80]!r} is no key of a block")
        return self.root / "blocks" / key[:2] / f"{key}.arrow"

    def has(self, key: str) -> bool:
        """Whether the block's file is there; `open` tells whether it is whole."""
        return self.path_of(key).is_file()

    def open(self, key: str) -> pa.Table:
        """`open_block`, but a `MachineError` where it cannot be opened, and may be whole."""
        with self._blamed("read"):
            return open_block(self.path_of(key))

    def open_whole(self, key: str) -> pa.Table | None:
        """`open`, but None where it has to be made or fetched again. A damaged file is removed."""
        try:
            return self.open(key)
        except DamagedBlock:
            with self._blamed("clean"):
                self.path_of(key).unlink(missing_ok=True)
            return None

    def block(self, key: str, table: pa.Table, node: str) -> Block:
        """The description of a block that was opened as `table` on a node."""
        size = self.path_of(key).stat().st_size
        return Block(key=key, rows=len(table), bytes=size, nodes=(node,))

    def add(
        self, key: str, tables: Iterable[pa.Table], facts: Mapping[str, Any] | None = None
    ) -> Block:
        """Write a block as `write_block` does. Where several processes do, either's stays."""
        tables = list(tables)  # what makes them may raise an OSError of its own
        with self._blamed("write to"):
            rows, size = write_block(self.path_of(key), tables, facts)
        return Block(key=key, rows=rows, bytes=size)

    def copy_in(self, key: str, content: Iterable[bytes | memoryview]) -> Block:
        """Keep a copy of a block's file, as another node read it, unless it is a `DamagedBlock`."""

        def fill(file: BinaryIO) -> None:
            for chunk in content:
                file.write(chunk)
            file.flush()
            open_block(Path(file.name))

        with self._blamed("write to"):
            size = publish(self.path_of(key), fill)
        return Block(key=key, rows=len(self.open(key)), bytes=size)

    def use(self, data_set: DataSet, clock: Clock, who: str) -> Use:
        """Claim a data set, before its blocks are made or read; `who` is told to other users.

        Its record is written; a complete one that is there already is kept.
        """
        with self._blamed("write to"), locked(self.root):
            known = self.find(data_set.id)
            record = known if known is not None and known.complete else data_set
            _write(self.root, replace(record, used_unix_s=clock.unix_s()))
            return Use(self, data_set, clock, who)

    def complete(self, data_set: DataSet) -> None:
        """Record that all blocks are there; `data_set` says how many rows, and which are bad."""
        with self._blamed("write to"), locked(self.root):
            known = self.find(data_set.id)
            used = known.used_unix_s if known is not None else data_set.used_unix_s
            _write(self.root, replace(data_set, complete=True, used_unix_s=used))

    def find(self, id: str) -> DataSet | None:  # noqa: A002  # it is what it is called
        """The record of a data set; None where there is none that this version can read."""
        try:
            record = json_value(read_whole(_record_path(self.root, id), _LARGEST_BYTES))
            if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
                return None
            return _RECORD.validate_python(record)
        except (FileNotFoundError, ValueError):
            return None

    def evict(self, *, keep: Collection[str] = (), order: Sequence[str] = ()) -> int:
        """Remove blocks until `disk_bytes` are not exceeded, or nothing more may go; their bytes.

        First go blocks that no data set has, then what stratified ones were dealt from, then whole
        data sets, the least recently used first; never one in use. Then copies in `order`, which
        other nodes have too and may be in use. What is in `keep` stays.
        """
        if self.disk_bytes is None or not self.root.is_dir():
            return 0
        with self._blamed("clean"), locked(self.root):
            _remove_dead_drafts(self.root)
            blocks = self._sizes()
            before = sum(blocks.values())
            excess = before - self.disk_bytes
            going = self._evictable(blocks, set(keep), order)
            while excess > 0 and (group := next(going, None)) is not None:
                excess -= self._unlink(blocks, group)
            return before - sum(blocks.values())

    def ls(self) -> Listing:
        """All that is there. A directory without a cache is an empty one."""
        if not self.root.is_dir():
            return Listing(root=self.root)
        with self._blamed("read"), locked(self.root):
            blocks, records = self._sizes(), self._records()
            held = [self._held(record, blocks) for record in reversed(records)]
        loose = _loose(blocks, records)
        return Listing(
            root=self.root,
            sets=tuple(held),
            bytes=sum(blocks.values()),
            loose_blocks=len(loose),
            loose_bytes=sum(blocks[key] for key in loose),
        )

    def rm(
        self, ids: Collection[str] | None = None, *, used_before_unix_s: float | None = None
    ) -> Removal:
        """Remove data sets, but for those in use, and their blocks that no other data set has.

        Those with these ids, or first letters of them; None: all, and what belongs to none.

        Raises:
            DataError: No data set has such an id, or several begin with it.
        """
        if not self.root.is_dir():
            _chosen(self.root, [], ids)
            return Removal()
        with self._blamed("clean"), locked(self.root):
            blocks, records = self._sizes(), self._records()
            chosen = _chosen(self.root, records, ids)
            if used_before_unix_s is not None:
                chosen = [record for record in chosen if record.used_unix_s < used_before_unix_s]
            held = [self._held(record, blocks) for record in chosen]
            gone = [one.data_set for one in held if not one.users]
            for record in gone:
                _record_path(self.root, record.id).unlink(missing_ok=True)
            dead = _loose(blocks, [record for record in records if record not in gone])
            if ids is None and used_before_unix_s is None:
                _remove_dead_drafts(self.root)
                (self.root / "digests.json").unlink(missing_ok=True)
            else:
                dead -= _loose(blocks, records)
            freed = self._unlink(blocks, dead)
        refused = tuple(one for one in held if one.users)
        return Removal(removed=tuple(gone), refused=refused, blocks=len(dead), bytes=freed)

    def _evictable(
        self, blocks: dict[str, int], keep: set[str], order: Sequence[str]
    ) -> Iterator[set[str]]:
        """What may go, in this order, and what goes together; `blocks` shrinks in between."""
        records = self._records()
        for key in sorted(_loose(blocks, records) - keep):
            yield {key}
        whole = {key for record in records for key in record.keys}
        parts = {key for record in records if record.complete for key in record.parts}
        making = {key for record in records if not record.complete for key in record.parts}
        for key in sorted((parts - whole - making - keep) & blocks.keys()):
            yield {key}
        left = list(records)
        for record in records:
            if not self._users(record.id):
                before = _loose(blocks, left)
                left.remove(record)
                _record_path(self.root, record.id).unlink(missing_ok=True)
                yield _loose(blocks, left) - before - keep
        for key in order:
            if key in blocks and key not in keep:
                yield {key}

    def _sizes(self) -> dict[str, int]:
        """Bytes of each block, by key."""
        found = {}
        for path in (self.root / "blocks").glob("*/*.arrow"):
            with suppress(FileNotFoundError):
                found[path.stem] = path.stat().st_size
        return found

    def _records(self) -> list[DataSet]:
        """All records, the least recently used first."""
        found = [self.find(path.stem) for path in (self.root / "sets").glob("*.json")]
        return sorted((r for r in found if r is not None), key=lambda r: (r.used_unix_s, r.id))

    def _held(self, record: DataSet, blocks: Mapping[str, int]) -> Held:
        sizes = [blocks[key] for key in blocks.keys() & set(record.blocks)]
        users = self._users(record.id)
        return Held(data_set=record, blocks=len(sizes), bytes=sum(sizes), users=users)

    def _users(self, id: str) -> tuple[str, ...]:  # noqa: A002
        """Who uses a data set, under the lock. What killed processes have left is removed."""
        found = []
        folder = self.root / "uses" / id
        for path in sorted(folder.glob("*.json")):
            with suppress(FileNotFoundError), path.open("rb") as file:
                if _is_locked(file.fileno()):
                    found.append(_user(file.read()))
                else:
                    path.unlink()
        if not found:
            with suppress(OSError):  # not there
                folder.rmdir()
        return tuple(found)

    def _unlink(self, blocks: dict[str, int], keys: Iterable[str]) -> int:
        freed = 0
        for key in sorted(keys):
            self.path_of(key).unlink(missing_ok=True)
            freed += blocks.pop(key)
        return freed

    @contextmanager
    def _blamed(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError) as error:
            number = getattr(error, "errno", errno.ENOMEM)
            why = getattr(error, "strerror", None) or error or "no memory"
            raise MachineError(
                f"cannot {verb} the cache {self.root}: {why}", hint=_HINTS.get(number or 0, _ELSE)
            ) from error


class Use:
    """That a process uses a data set: until `close`, or its own end, nobody else removes it."""

    def __init__(self, cache: BlockCache, data_set: DataSet, clock: Clock, who: str) -> None:
        """Under the lock of the cache: see `BlockCache.use`."""
        self._cache = cache
        self._id = data_set.id
        self._clock = clock
        folder = cache.root / "uses" / data_set.id
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(file, fcntl.LOCK_EX)
        text = {"format": FORMAT, "who": who, "pid": os.getpid(), "since_unix_s": clock.unix_s()}
        os.write(file, json.dumps(text).encode())
        self._release = weakref.finalize(self, _release, file, path, os.getpid())

    def close(self) -> None:
        """No longer in use. Closing again does nothing."""
        if not self._release.alive:
            return
        with locked(self._cache.root):
            self._release()
            record = self._cache.find(self._id)
            if record is not None:
                used = replace(record, used_unix_s=self._clock.unix_s())
                _write(self._cache.root, used)


def _release(file: int, path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a child that was forked has the file too, and not the use
        path.unlink(missing_ok=True)
    os.close(file)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Alone with the records of this cache, among all processes that share it."""
    root.mkdir(parents=True, exist_ok=True)
    file = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _is_locked(file: int) -> bool:
    """Whether another process holds the file; else this one does, until it closes it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _record_path(root: Path, id: str) -> Path:  # noqa: A002
    return root / "sets" / f"{id}.json"


def _write(root: Path, data_set: DataSet) -> None:
    text = json.dumps({"format": FORMAT, **asdict(data_set)}).encode()
    publish(_record_path(root, data_set.id), text)


def _user(text: bytes) -> str:
    try:
        record = json_value(text)
        return f"{record['who']} (process {record['pid']})"
    except (ValueError, KeyError, TypeError):
        return "a process"  # of another version, or its disk is full


def _loose(blocks: Iterable[str], records: Iterable[DataSet]) -> set[str]:
    """The blocks that none of these data sets has."""
    return set(blocks).difference(*(record.blocks for record in records))


def _chosen(root: Path, records: Sequence[DataSet], ids: Collection[str] | None) -> list[DataSet]:
    if ids is None:
        return list(records)
    chosen = []
    for asked in ids:
        found = [record for record in records if asked and record.id.startswith(asked)]
        if len(found) != 1:
            number = "no data set" if not found else f"{len(found)} data sets"
            raise DataError(
                f"{number} in {root} with an id that begins with {asked!r}",
                hint="`raycloud cache ls` shows what is there",
            )
        chosen += found
    return [record for record in records if record in chosen]


def _remove_dead_drafts(root: Path) -> None:
    """Remove drafts whose writers were killed."""
    for path in (root / "blocks").glob(f"*/*{DRAFT}"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            if not _is_locked(file.fileno()):
                path.unlink()
