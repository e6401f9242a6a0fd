"""What holds files: pyarrow's file systems and fsspec's, behind one small face.

pyarrow can wrap fsspec itself, but its wrapper takes a server that answers 503 for a missing file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import fs

from raycloud.data.patience import status_of

_TAGS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "checksum", "Last-Modified", "updated")
_NOT_THERE = frozenset({None, 404, 410})
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "created")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file or a directory, by its path in its tree."""

    path: str
    is_directory: bool
    bytes: int | None = None
    modified_ns: int | None = None
    tag: str | None = None


class Tree(Protocol):
    """A file system, as far as reading needs it."""

    @property
    def scheme(self) -> str:
        """What stands before `://` in the names of its files; empty for this machine's own."""
        ...

    def info(self, path: str) -> Entry | None:
        """What is there; None: nothing."""
        ...

    def below(self, path: str, *, deep: bool) -> list[Entry]:
        """What is in a directory: directly, or to its depths."""
        ...

    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading at any place."""
        ...

    def refresh(self) -> None:
        """Forget listings."""
        ...


class ArrowTree:
    """A `pyarrow.fs.FileSystem`."""

    def __init__(self, system: Any) -> None:
        """Take the file system."""
        self._system = system

    @property
    def scheme(self) -> str:
        """Its type, as pyarrow calls it."""
        name = str(self._system.type_name)
        return "" if name == "local" else name

    def info(self, path: str) -> Entry | None:
        """See `Tree`."""
        return self._entry(self._system.get_file_info(path))

    def below(self, path: str, *, deep: bool) -> list[Entry]:
        """See `Tree`."""
        infos = self._system.get_file_info(fs.FileSelector(path, recursive=deep))
        return [entry for entry in map(self._entry, infos) if entry is not None]

    def open(self, path: str) -> pa.NativeFile:
        """See `Tree`."""
        return self._system.open_input_file(path)

    def refresh(self) -> None:
        """It remembers nothing."""

    def _entry(self, info: Any) -> Entry | None:
        if info.type == fs.FileType.NotFound:
            return None
        directory = info.type == fs.FileType.Directory
        return Entry(
            path=info.path,
            is_directory=directory,
            bytes=info.size if info.type == fs.FileType.File else None,
            modified_ns=info.mtime_ns,
        )


class LocalTree(ArrowTree):
    """This machine's own file system."""

    def __init__(self) -> None:
        """Take pyarrow's."""
        super().__init__(fs.LocalFileSystem())

    def below(self, path: str, *, deep: bool) -> list[Entry]:
        """See `Tree`. A link to nothing, which pyarrow leaves out, is a file of no size."""
        entries: list[Entry] = []
        seen = {os.path.realpath(path)}
        for folder, folders, names in os.walk(path, onerror=_raise, followlinks=True):
            inner = {name: os.path.join(folder, name) for name in folders}  # noqa: PTH118
            entries += [Entry(path=place, is_directory=True) for place in inner.values()]
            entries += [_local(os.path.join(folder, name)) for name in names]  # noqa: PTH118
            real = {name: os.path.realpath(place) for name, place in inner.items()}
            folders[:] = [n for n in folders if deep and real[n] not in seen]  # links may go round
            seen.update(real.values())
        return entries


class FsspecTree:
    """An fsspec file system."""

    def __init__(self, system: Any) -> None:
        """Take the file system."""
        self._system = system

    @property
    def scheme(self) -> str:
        """Its first protocol."""
        protocol = self._system.protocol
        name = protocol if isinstance(protocol, str) else protocol[0]
        return "" if name in {"file", "local"} else str(name)

    def info(self, path: str) -> Entry | None:
        """See `Tree`. Of HTTP, what ends in `/` is a directory: its page lists links."""
        if path.endswith("/") and self.scheme in {"http", "https"}:
            return Entry(path=path, is_directory=True)
        try:
            return self._entry(self._system.info(path))
        except FileNotFoundError as error:  # which any other answer is dressed as, too
            if status_of(error) in _NOT_THERE:
                return None
            raise

    def below(self, path: str, *, deep: bool) -> list[Entry]:
        """See `Tree`."""
        found = self._system.find(
            path, maxdepth=None if deep else 1, withdirs=not deep, detail=True
        )
        here = path.rstrip("/")
        entries = [self._entry(info) for info in found.values()]
        return [entry for entry in entries if entry.path.rstrip("/") != here]

    def open(self, path: str) -> pa.NativeFile:
        """See `Tree`. What cannot be read at any place is read whole."""
        file = self._system.open(path, "rb")
        if file.seekable():
            return pa.PythonFile(file, mode="r")
        with file:
            return pa.BufferReader(file.read())

    def refresh(self) -> None:
        """It remembers listings."""
        self._system.invalidate_cache()

    def _entry(self, info: Mapping[str, Any]) -> Entry:
        size = info.get("size")
        tag = next((info[name] for name in _TAGS if info.get(name)), None)
        moment = next((info[name] for name in _TIMES if info.get(name)), None)
        return Entry(
            path=str(info["name"]),
            is_directory=info.get("type") == "directory",
            bytes=None if size is None else int(size),
            modified_ns=_ns(moment),
            tag=None if tag is None else str(tag),
        )


def _raise(error: OSError) -> None:
    raise error


def _local(path: str) -> Entry:
    try:
        found = os.stat(path)  # noqa: PTH116 - of very many files
    except FileNotFoundError:
        return Entry(path=path, is_directory=False)
    if not stat.S_ISREG(found.st_mode):  # a pipe or a device: reading it may wait for ever
        return Entry(path=path, is_directory=False)
    return Entry(path=path, is_directory=False, bytes=found.st_size, modified_ns=found.st_mtime_ns)


def _ns(moment: Any) -> int | None:
    if isinstance(moment, datetime):
        moment = moment.timestamp()
    return int(moment * 1e9) if isinstance(moment, int | float) else None
