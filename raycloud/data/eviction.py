"""What a cache holds, and what of it may go: when its disk is full, or when a person asks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.data import sets
from raycloud.data.block import DRAFT
from raycloud.errors import DataError, InternalError

if TYPE_CHECKING:
    from raycloud.data.sets import DataSet

SUFFIX = ".arrow"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A data set in a cache.

    Attributes:
        data_set: Its record.
        blocks: How many of its blocks are there.
        bytes: Their size. Data sets may have blocks in common.
        users: Who uses it now.
    """

    data_set: DataSet
    blocks: int
    bytes: int
    users: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """All that is in a cache.

    Attributes:
        root: Its directory.
        sets: The data sets, the most recently used first.
        bytes: Size of all blocks, each counted once.
        loose_blocks: Blocks that belong to no data set.
        loose_bytes: Their size.
    """

    root: Path
    sets: tuple[Held, ...]
    bytes: int
    loose_blocks: int
    loose_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """What was removed from a cache, and what was not.

    Attributes:
        removed: Data sets that are gone.
        refused: Those that are in use.
        blocks: Blocks that are gone.
        bytes: Their size.
    """

    removed: tuple[DataSet, ...]
    refused: tuple[Held, ...]
    blocks: int
    bytes: int


def path_of(root: Path, key: str) -> Path:
    """Where a block is, or would be.

    Raises:
        InternalError: The key is no name: it could lead out of the cache.
    """
    if sets.KEY.fullmatch(key) is None:
        raise InternalError(f"{key[:80]!r} is no key of a block")
    return root / "blocks" / key[:2] / f"{key}{SUFFIX}"


def listing(root: Path) -> Listing:
    """Everything that is there. A directory without a cache is an empty one."""
    if not root.is_dir():
        return Listing(root=root, sets=(), bytes=0, loose_blocks=0, loose_bytes=0)
    with sets.locked(root):
        blocks = _blocks(root)
        records = sets.records(root)
        held = [_held(root, record, blocks) for record in reversed(records)]
    loose = _loose(blocks, records)
    return Listing(
        root=root,
        sets=tuple(held),
        bytes=sum(blocks.values()),
        loose_blocks=len(loose),
        loose_bytes=sum(blocks[key] for key in loose),
    )


def remove(
    root: Path, ids: Collection[str] | None = None, *, used_before_unix_s: float | None = None
) -> Removal:
    """Remove data sets, and their blocks that no other data set has.

    Args:
        root: The directory of the cache.
        ids: Which ones: their ids, or the first letters. None: all, and what belongs to none.
        used_before_unix_s: Only those that were last used before this.

    Raises:
        DataError: No data set has such an id, or several begin with it.
    """
    if not root.is_dir():
        _chosen(root, [], ids)
        return Removal(removed=(), refused=(), blocks=0, bytes=0)
    with sets.locked(root):
        blocks = _blocks(root)
        records = sets.records(root)
        chosen = _chosen(root, records, ids)
        if used_before_unix_s is not None:
            chosen = [record for record in chosen if record.used_unix_s < used_before_unix_s]
        held = [_held(root, record, blocks) for record in chosen]
        gone = [one.data_set for one in held if not one.users]
        _forget(root, gone)
        left = [record for record in records if record not in gone]
        dead = _loose(blocks, left) - _loose(blocks, records)
        if ids is None and used_before_unix_s is None:
            dead = _loose(blocks, left)
            _drop_drafts(root)
            (root / "digests.json").unlink(missing_ok=True)
        freed = _unlink(root, blocks, sorted(dead))
    return Removal(
        removed=tuple(gone),
        refused=tuple(one for one in held if one.users),
        blocks=len(dead),
        bytes=freed,
    )


def evict(
    root: Path, disk_bytes: int, *, keep: Collection[str] = (), order: Sequence[str] = ()
) -> int:
    """Remove blocks until the rest has at most `disk_bytes`, or nothing more may go.

    See `BlockCache.evict`.

    Returns:
        Bytes removed.
    """
    if not root.is_dir():
        return 0
    with sets.locked(root):
        _drop_drafts(root)
        blocks = _blocks(root)
        before = sum(blocks.values())
        excess = before - disk_bytes
        going = _going(root, blocks, keep, order)
        while excess > 0 and (group := next(going, None)) is not None:
            excess -= _unlink(root, blocks, group)
        return before - sum(blocks.values())


def _going(
    root: Path, blocks: dict[str, int], keep: Collection[str], order: Sequence[str]
) -> Iterator[list[str]]:
    """What may go, in this order, and what goes together; `blocks` shrinks in between."""
    records = sets.records(root)
    kept = set(keep)
    for key in sorted(_loose(blocks, records) - kept):
        yield [key]
    whole = {key for record in records for key in record.keys}
    parts = {key for record in records if record.complete for key in record.parts}
    making = {key for record in records if not record.complete for key in record.parts}
    for key in sorted((parts - whole - making - kept) & blocks.keys()):
        yield [key]
    left = list(records)
    for record in records:
        if sets.users(root, record.id):
            continue
        left.remove(record)
        before = _loose(blocks, [*left, record])
        _forget(root, [record])
        yield sorted(_loose(blocks, left) - before - kept)
    for key in order:
        if key in blocks and key not in kept:
            yield [key]


def _blocks(root: Path) -> dict[str, int]:
    """Bytes of each block, by key."""
    found = {}
    for folder in _entries(root / "blocks"):
        for entry in _entries(Path(folder.path)):
            if entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    found[entry.name.removesuffix(SUFFIX)] = entry.stat().st_size
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _held(root: Path, record: DataSet, blocks: dict[str, int]) -> Held:
    there = {key for key in (*record.keys, *record.parts) if key in blocks}
    return Held(
        data_set=record,
        blocks=len(there),
        bytes=sum(blocks[key] for key in there),
        users=sets.users(root, record.id),
    )


def _loose(blocks: Iterable[str], records: Iterable[DataSet]) -> set[str]:
    owned = {key for record in records for key in (*record.keys, *record.parts)}
    return set(blocks) - owned


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


def _forget(root: Path, gone: Iterable[DataSet]) -> None:
    for record in gone:
        sets.forget(root, record.id)


def _unlink(root: Path, blocks: dict[str, int], keys: Iterable[str]) -> int:
    freed = 0
    for key in keys:
        path_of(root, key).unlink(missing_ok=True)
        freed += blocks.pop(key)
    return freed


def _drop_drafts(root: Path) -> None:
    """Remove drafts whose writers were killed."""
    for path in (root / "blocks").glob(f"*/*{DRAFT}"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink()
