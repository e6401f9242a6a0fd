"""What content is called: digests of files, of tables and of whatever else decides about a block.

<root>/digests.json    of local files, by path; worth no more than the time to read them again
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raycloud.bounded import json_value, read_whole
from raycloud.data import sets
from raycloud.data.block import publish, write_all
from raycloud.data.code import code_digest
from raycloud.data.index import Input
from raycloud.data.location import is_local, open_file
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.location import File
    from raycloud.task import Source

__all__ = ["check_unchanged", "code_digest", "combined", "inputs_of", "table_digest"]

FORMAT = 1

_BYTES = 16
_READ_BYTES = 2**20
_SETTLED_S = 2.0  # file systems keep times as coarse as this: a younger file may change unseen
_MOST_THREADS = 8
_LARGEST_BYTES = 2**30  # of the memo, which has a line for each file there ever was
_MOST_VALUES = 2**27


def combined(*parts: Any) -> str:
    """The digest of JSON-ready values, as 32 hex digits.

    >>> combined("a", 1) == combined("a", 1) != combined("a1")
    True
    """
    text = json.dumps(parts, sort_keys=True, allow_nan=False)
    return blake2b(text.encode(), digest_size=_BYTES).hexdigest()


def inputs_of(source: Source, files: Sequence[File], root: Path, clock: Clock) -> tuple[Input, ...]:
    """Each file with a digest: of its content where it is local, else of what its store says.

    What a store says is the path, the size, the time of the last change and the tag of its content
    (S3's ETag). One that says neither time nor tag is read.

    Args:
        source: Of the files.
        files: In order.
        root: The directory of a cache. The digest of a local file is remembered there, until its
            size, time or inode changes.
        clock: To tell files that may have changed since, but show the same time.

    Raises:
        DataError: A file cannot be read.
    """
    memo = _Memo(root, clock.unix_s())

    def digest(file: File) -> str:
        if is_local(file.path):
            return memo.digest(Path(file.path))
        if file.tag is None and file.modified_ns is None:
            with open_file(source, file.path) as stream:
                return _content(stream.read)
        return combined("remote", file.path, file.bytes, file.modified_ns, file.tag)

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(digest, files))
    memo.keep()
    return tuple(
        Input(path=file.path, bytes=file.bytes, digest=digest, modified_ns=file.modified_ns)
        for file, digest in zip(files, digests, strict=True)
    )


def check_unchanged(inputs: Iterable[Input]) -> None:
    """Refuse local files that are others than they were when they were found.

    A file of the same size and time is taken to be the same; any other is read.

    Raises:
        DataError: One has changed, or cannot be read.
    """
    for one in inputs:
        if one.modified_ns is None or not is_local(one.path):
            continue
        path = Path(one.path)
        try:
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) == (one.bytes, one.modified_ns):
                continue
            with path.open("rb", buffering=0) as file:
                digest = _content(file.read)
        except OSError as error:
            raise _unreadable(path, error) from error
        if digest != one.digest:
            raise DataError(
                f"{one.path!r} has changed while it was read",
                hint="leave files as they are while a run reads them",
            )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path} cannot be read: {error.strerror}",
        hint="let the user that runs raycloud read it, or leave it out with Source.select",
    )


def table_digest(parts: Iterable[pa.Table]) -> str:
    """The digest of a table's rows.

    Args:
        parts: The table, cut at the same rows each time; how the parts are chunked does not matter.
    """
    total = blake2b(digest_size=_BYTES)
    for part in parts:
        columns = [_plain(column) for column in part.combine_chunks().columns]
        table = pa.table(columns, names=part.column_names)
        total.update(repr(table.schema.to_string(show_field_metadata=False)).encode())
        for batch in table.to_batches():
            total.update(batch.serialize())
    return total.hexdigest()


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without a dictionary: which number a value has in it follows from chunks."""
    if not pa.types.is_dictionary(column.type):
        return column
    return column.cast(column.type.value_type).combine_chunks()


class _Memo:
    """Digests of local files, remembered with what tells whether they still hold."""

    def __init__(self, root: Path, now_s: float) -> None:
        self._root = root
        self._now_s = now_s
        self._known = _read(root)
        self._new: dict[str, tuple[int, int, int, str]] = {}

    def digest(self, path: Path) -> str:
        """The digest of the file's content."""
        try:
            status = path.stat()
            seen = (status.st_size, status.st_mtime_ns, status.st_ino)
            known = self._known.get(str(path.absolute()))
            if known is not None and tuple(known[:3]) == seen:
                return known[3]
            with path.open("rb", buffering=0) as file:
                digest = _content(file.read)
        except OSError as error:
            raise _unreadable(path, error) from error
        if status.st_mtime_ns / 1e9 + _SETTLED_S < self._now_s:
            self._new[str(path.absolute())] = (*seen, digest)
        return digest

    def keep(self) -> None:
        """Write down what is new. Another process may have added others meanwhile."""
        if not self._new:
            return
        with sets.locked(self._root):
            record = {"format": FORMAT, "files": {**_read(self._root), **self._new}}
            text = json.dumps(record).encode()
            publish(self._root / "digests.json", lambda file: write_all(file, text))


def _read(root: Path) -> dict[str, tuple[int, int, int, str]]:
    try:
        record = json_value(read_whole(root / "digests.json", _LARGEST_BYTES), _MOST_VALUES)
        files: dict[str, tuple[int, int, int, str]] = record["files"]
        return files if record["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none yet, or not whole: the files are read again


def _content(read: Callable[[int], bytes | None]) -> str:
    total = blake2b(digest_size=_BYTES)
    while chunk := read(_READ_BYTES):
        total.update(chunk)
    return total.hexdigest()
