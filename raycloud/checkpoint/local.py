"""A directory as a store: draft, fsync, rename, fsync the directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from raycloud.checkpoint.naming import (
    blamed,
    check_final_name,
    check_name,
    draft_name,
    is_draft,
)

_READ_BYTES = 4 * 2**20


class LocalStore:
    """Files below a directory of this machine, or of a file system it has mounted."""

    def __init__(self, root: Path) -> None:
        """`root` need not exist yet."""
        self._root = root.absolute()

    @property
    def place(self) -> str:
        """The absolute path."""
        return str(self._root)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write to a draft beside the target, then rename it over the target."""
        check_final_name(name)
        target = self._root / name
        draft = self._root / draft_name(name)
        try:
            _make_directory(target.parent)
            # 0666 less the umask: others who share the run may read it. A fresh file of our own.
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise blamed("write", str(target), error) from error
        try:
            try:
                for chunk in chunks:
                    _write_all(file, chunk, target)
                _sync(file, target)
            finally:
                os.close(file)
            try:
                draft.replace(target)
                _sync_directory(target.parent)
            except OSError as error:
                raise blamed("write", str(target), error) from error
        except BaseException:
            with suppress(OSError):  # the first error says more; retention removes the draft
                draft.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> bytes:
        """All bytes of `name`."""
        check_final_name(name)
        try:
            return (self._root / name).read_bytes()
        except OSError as error:
            raise blamed("read", str(self._root / name), error) from error

    def stream(self, name: str) -> Iterator[bytes]:
        """The bytes of `name`, 4 MiB at a time."""
        check_final_name(name)
        try:
            with (self._root / name).open("rb", buffering=0) as file:
                while chunk := file.read(_READ_BYTES):
                    yield chunk
        except OSError as error:
            raise blamed("read", str(self._root / name), error) from error

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        check_final_name(name)
        try:
            return (self._root / name).stat().st_size
        except OSError as error:
            raise blamed("read", str(self._root / name), error) from error

    def exists(self, name: str) -> bool:
        """Whether `name` is a file."""
        check_final_name(name)
        try:
            return (self._root / name).is_file()
        except OSError as error:
            raise blamed("read", str(self._root / name), error) from error

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Complete and unfinished files, and their bytes."""
        found = {}
        for name in self._all(prefix):
            with suppress(FileNotFoundError):  # removed since it was listed
                found[name] = self._size(name)
        return found

    def names(self, prefix: str = "") -> list[str]:
        """Complete files."""
        return [name for name in self._all(prefix) if not is_draft(name)]

    def drafts(self, prefix: str = "") -> list[str]:
        """Unfinished files."""
        return [name for name in self._all(prefix) if is_draft(name)]

    def remove(self, name: str) -> None:
        """Unlink, make that durable, and drop the directory when it was the last file in it."""
        self.remove_all([name])

    def remove_all(self, names: Sequence[str]) -> None:
        """The same for several: a directory is made durable once."""
        paths = []
        for name in names:
            check_name(name)
            paths.append(path := self._root / name)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise blamed("remove", str(path), error) from error
        for parent in {path.parent: None for path in paths}:
            try:
                _sync_directory(parent)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise blamed("remove", str(parent), error) from error
            if parent != self._root:
                with suppress(OSError):  # not empty: the usual case
                    parent.rmdir()

    def _size(self, name: str) -> int:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            raise
        except OSError as error:
            raise blamed("list", str(self._root / name), error) from error

    def _all(self, prefix: str) -> list[str]:
        def refuse(error: OSError) -> None:
            # A directory may be removed between being listed and being entered.
            if not isinstance(error, FileNotFoundError):
                raise error

        found = []
        try:
            for top, _, files in os.walk(self._root / prefix.rpartition("/")[0], onerror=refuse):
                inside = Path(top).relative_to(self._root)
                found += [(inside / file).as_posix() for file in files]
        except OSError as error:
            raise blamed("list", self.place, error) from error
        return sorted(name for name in found if name.startswith(prefix))


def _write_all(file: int, chunk: bytes | memoryview, target: Path) -> None:
    rest = memoryview(chunk)
    try:
        while rest.nbytes:
            rest = rest[os.write(file, rest) :]
    except OSError as error:
        raise blamed("write", str(target), error) from error


def _sync(file: int, target: Path) -> None:
    try:
        os.fsync(file)
    except OSError as error:
        raise blamed("write", str(target), error) from error


def _make_directory(path: Path) -> None:
    """Create `path` and its parents, each made durable in the one above it."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
