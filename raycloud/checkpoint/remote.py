"""Any fsspec file system as a store.

Two ways to write atomically:

- Object stores (`ATOMIC_PUT`): an object appears when its upload is completed and not before, so it
  is put under its own name. An upload that failed is aborted; one whose writer was killed stays
  invisible (a bucket rule for incomplete uploads sweeps them).
- Everything else: the file is written as a draft and moved. Where the move is a rename (sftp, HDFS,
  SMB) it is atomic; on `memory://` it is one assignment. A file system whose move is neither is
  still safe for checkpoints: the manifest is written last and carries digests of everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec

from raycloud.checkpoint.naming import (
    blamed,
    check_final_name,
    check_name,
    draft_name,
    is_draft,
)
from raycloud.errors import CheckpointError

ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})

_READ_BYTES = 4 * 2**20


class RemoteStore:
    """Files below an fsspec URL."""

    def __init__(self, url: str) -> None:
        """Open the file system; credentials come from where its package takes them.

        Raises:
            CheckpointError: The protocol is unknown, or its package is not installed.
        """
        self._place = re.sub(r"://[^/@]*@", "://", url).rstrip("/")
        protocol = url.partition("://")[0]
        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ImportError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint.path = {self._place!r} cannot be opened: {error}",
                hint=f"install the fsspec package for {protocol}:// on every node, "
                "or use a path that all nodes share",
            ) from error
        self._system: Any = system
        self._root = str(root).rstrip("/")
        self._direct = protocol in ATOMIC_PUT

    @property
    def place(self) -> str:
        """The URL, without user and password."""
        return self._place

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Put the object, or write a draft and move it; see the module."""
        check_final_name(name)
        target = self._path(name)
        if self._direct:
            self._put(name, target, chunks)
            return
        draft = self._path(draft_name(name))
        with self._blaming("write", name):
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            self._put(name, draft, chunks)
            with self._blaming("write", name):
                self._move(draft, target)
        except BaseException:
            self._forget(draft)
            raise

    def read(self, name: str) -> bytes:
        """All bytes of `name`."""
        check_final_name(name)
        with self._blaming("read", name):
            return bytes(self._system.cat_file(self._path(name)))

    def stream(self, name: str) -> Iterator[bytes]:
        """The bytes of `name`, 4 MiB at a time."""
        check_final_name(name)
        with self._blaming("read", name), self._system.open(self._path(name), "rb") as file:
            while chunk := file.read(_READ_BYTES):
                yield bytes(chunk)

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        check_final_name(name)
        with self._blaming("read", name):
            self._system.invalidate_cache()
            return int(self._system.info(self._path(name))["size"])

    def exists(self, name: str) -> bool:
        """Whether `name` is a file."""
        check_final_name(name)
        with self._blaming("read", name):
            self._system.invalidate_cache()
            return bool(self._system.isfile(self._path(name)))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Complete and unfinished files, and their bytes: one listing, page by page."""
        with self._blaming("list", ""):
            self._system.invalidate_cache()
            below = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")
            try:
                found = self._system.find(below, detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._root) + 1
            sizes = {path[start:]: int(about.get("size") or 0) for path, about in found.items()}
        return {name: sizes[name] for name in sorted(sizes) if name.startswith(prefix)}

    def names(self, prefix: str = "") -> list[str]:
        """Complete files."""
        return [name for name in self.sizes(prefix) if not is_draft(name)]

    def drafts(self, prefix: str = "") -> list[str]:
        """Unfinished files."""
        return [name for name in self.sizes(prefix) if is_draft(name)]

    def remove(self, name: str) -> None:
        """Remove one file or draft."""
        check_name(name)
        with self._blaming("remove", name):
            try:
                self._system.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove several: object stores take a thousand in one call."""
        for name in names:
            check_name(name)
        if not names:
            return
        with self._blaming("remove", names[0]):
            try:
                self._system.rm([self._path(name) for name in names])
            except FileNotFoundError:  # one of them is gone, and the others may not be
                self._remove_each(names)

    def _remove_each(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, name: str, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        with self._blaming("write", name):
            file = self._system.open(path, "wb")
        try:
            for chunk in chunks:
                with self._blaming("write", name):
                    file.write(chunk)
        except BaseException:
            self._give_up(file)
            raise
        with self._blaming("write", name):
            file.close()

    def _give_up(self, file: Any) -> None:
        """End a write that failed; where closing would complete an upload, abort it."""
        try:
            if self._direct:
                file.discard()
                file.closed = True
            else:
                file.close()
        except Exception:  # noqa: BLE001 the first error is on its way and says more
            return

    def _move(self, draft: str, target: str) -> None:
        try:
            self._system.mv(draft, target)
        except OSError:
            # Some renames (sftp, HDFS) refuse to replace a file.
            if not self._system.exists(target):
                raise
            self._system.rm_file(target)
            self._system.mv(draft, target)

    def _forget(self, draft: str) -> None:
        try:
            self._system.rm_file(draft)
        except Exception:  # noqa: BLE001 the first error is on its way and says more
            return

    @contextmanager
    def _blaming(self, action: str, name: str) -> Iterator[None]:
        """Turn what the file system raises into a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each file system raises its own library's errors
            raise blamed(action, f"{self._place}/{name}".rstrip("/"), error) from error
