"""Which blocks in a cache belong together, when they were last used, and who uses them now.

<root>/sets/<id>.json           a record per data set
<root>/uses/<id>/<any>.json     a file per process that uses it, locked as long as it does
<root>/lock                     held while records and uses are looked at together
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raycloud.bounded import json_value, read_whole
from raycloud.data.block import publish, write_all
from raycloud.data.index import BadRow

if TYPE_CHECKING:
    from raycloud.clock import Clock

FORMAT = 1

KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""What a block may be called: no name that leads out of the cache."""

_LARGEST_BYTES = 2**28  # a key for each of some million blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """The blocks of one version of a split.

    Attributes:
        id: Digest of what the blocks are made from.
        task: Name of the task.
        split: Which of its splits.
        source: Where the rows came from, without user names, passwords and tokens.
        keys: Names of its blocks, in order; of a stratified one that is complete, the dealt ones.
        parts: Of a stratified one, the blocks that `keys` were dealt from: needed only to make one
            of them again, and the first to be evicted.
        sizes: Of a stratified one that is complete, the rows of each partition, in order; `keys`
            are those of the partitions that have any.
        rows: Rows of all blocks; 0 until it is complete.
        bad_rows: Rows that were left out.
        bad: The first of them.
        columns: Their names and types, as text; empty until it is complete, or not known.
        complete: Whether all blocks were made.
        used_unix_s: When a run last began or ended to use it.
    """

    id: str
    task: str
    split: str
    source: str
    keys: tuple[str, ...]
    parts: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    rows: int = 0
    bad_rows: int = 0
    bad: tuple[BadRow, ...] = ()
    columns: str = ""
    complete: bool = False
    used_unix_s: float = 0.0

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild from `to_record`'s values.

        Raises:
            ValueError: Another format, or a value missing.
        """
        try:
            values = dict(record)
            found = values.pop("format")
            if found != FORMAT:
                raise ValueError(f"a data set of format {found!r}, not {FORMAT}")
            lists = {name: tuple(values[name]) for name in ("keys", "parts", "sizes")}
            for key in (*lists["keys"], *lists["parts"]):
                if not isinstance(key, str) or KEY.fullmatch(key) is None:
                    raise ValueError(f"{key!r:.80} is no key of a block")
            bad = tuple(BadRow(**row) for row in values["bad"])
            return cls(**{**values, **lists, "bad": bad})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no data set of format {FORMAT}: {error}") from error


class Use:
    """That a process uses a data set: until `close`, or its own end, nobody else removes it."""

    def __init__(self, root: Path, data_set: DataSet, clock: Clock, who: str) -> None:
        """Under the lock of `root`: see `BlockCache.use`."""
        self._root = root
        self._id = data_set.id
        self._clock = clock
        folder = root / "uses" / data_set.id
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
        with locked(self._root):
            self._release()
            record = find(self._root, self._id)
            if record is not None:
                write(self._root, replace(record, used_unix_s=self._clock.unix_s()))


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


def users(root: Path, id: str) -> tuple[str, ...]:  # noqa: A002  # it is what it is called
    """Who uses a data set, under the lock. What killed processes have left is removed.

    Returns:
        Such as `run gpt-3 (process 4711)`.
    """
    found = []
    folder = root / "uses" / id
    for path in sorted(folder.glob("*.json")):
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(_user(file.read()))
            else:
                path.unlink()
    if not found:
        with suppress(OSError):  # not there
            folder.rmdir()
    return tuple(found)


def _user(text: bytes) -> str:
    try:
        record = json_value(text)
        return f"{record['who']} (process {record['pid']})"
    except (ValueError, KeyError, TypeError):
        return "a process"  # of another version, or its disk is full


def write(root: Path, data_set: DataSet) -> None:
    """Write a record, under the lock."""
    text = json.dumps(data_set.to_record()).encode()
    publish(_path(root, data_set.id), lambda file: write_all(file, text))


def find(root: Path, id: str) -> DataSet | None:  # noqa: A002
    """The record of a data set; None where there is none that this version can read."""
    try:
        return DataSet.from_record(json_value(read_whole(_path(root, id), _LARGEST_BYTES)))
    except (FileNotFoundError, ValueError):
        return None


def records(root: Path) -> list[DataSet]:
    """All records, the least recently used first."""
    found = [find(root, path.stem) for path in (root / "sets").glob("*.json")]
    return sorted((r for r in found if r is not None), key=lambda r: (r.used_unix_s, r.id))


def forget(root: Path, id: str) -> None:  # noqa: A002
    """Remove a record, under the lock."""
    _path(root, id).unlink(missing_ok=True)


def _path(root: Path, id: str) -> Path:  # noqa: A002
    return root / "sets" / f"{id}.json"
