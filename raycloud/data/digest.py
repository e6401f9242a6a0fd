"""Digests of files, of tables, and of whatever else decides what a block holds.

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

from raycloud.bounded import json_value, read_whole
from raycloud.data.block import publish
from raycloud.data.cache import locked
from raycloud.data.clean import plain_table
from raycloud.data.index import Input
from raycloud.data.location import is_local, open_file
from raycloud.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.clock import Clock
    from raycloud.data.location import File
    from raycloud.task import Source

__all__ = ["check_unchanged", "combined", "inputs_of", "table_digest"]

FORMAT = 1

_BYTES = 16
_READ_BYTES = 2**20
_SETTLED_S = 2.0  # file systems keep times as coarse as this: a younger file may change unseen
_MOST_THREADS = 8
_LARGEST_BYTES = 2**30  # of the memo, which has a line for each file there ever was
_MOST_VALUES = 2**27

_Known = tuple[int, int, int, str]  # size, time, inode; digest


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
    known = _remembered(root)
    fresh: dict[str, _Known] = {}
    settled_ns = int((clock.unix_s() - _SETTLED_S) * 1e9)

    def digest(file: File) -> str:
        if is_local(file.path):
            return local(Path(file.path))
        if file.tag is None and file.modified_ns is None:
            with open_file(source, file.path) as stream:
                return _content(stream.read)
        return combined("remote", file.path, file.bytes, file.modified_ns, file.tag)

    def local(path: Path) -> str:
        name = str(path.absolute())
        try:
            status = path.stat()
            seen = (status.st_size, status.st_mtime_ns, status.st_ino)
            if name in known and tuple(known[name][:3]) == seen:
                return known[name][3]
            with path.open("rb", buffering=0) as file:
                content = _content(file.read)
        except OSError as error:
            raise _unreadable(path, error) from error
        if status.st_mtime_ns < settled_ns:
            fresh[name] = (*seen, content)
        return content

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(digest, files))
    if fresh:
        with locked(root):  # another process may have added others meanwhile
            record = {"format": FORMAT, "files": {**_remembered(root), **fresh}}
            text = json.dumps(record).encode()
            publish(root / "digests.json", text)
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
        table = plain_table(part.combine_chunks()).combine_chunks()
        total.update(repr(table.schema.to_string(show_field_metadata=False)).encode())
        for batch in table.to_batches():
            total.update(batch.serialize())
    return total.hexdigest()


def _remembered(root: Path) -> dict[str, _Known]:
    try:
        record = json_value(read_whole(root / "digests.json", _LARGEST_BYTES), _MOST_VALUES)
        files: dict[str, _Known] = record["files"]
        return files if record["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none yet, or not whole: the files are read again


def _content(read: Callable[[int], bytes | None]) -> str:
    total = blake2b(digest_size=_BYTES)
    while chunk := read(_READ_BYTES):
        total.update(chunk)
    return total.hexdigest()
