"""Stores of checkpoints: flat sets of named files that are complete or absent.

A directory is written with draft, fsync, rename, fsync of the directory. Any other place is one of
fsspec, written atomically in one of two ways:

- Object stores (`ATOMIC_PUT`): an object appears when its upload is completed and not before, so it
  is put under its own name. An upload that failed is aborted; one whose writer was killed stays
  invisible (a bucket rule for incomplete uploads sweeps them).
- Everything else: the file is written as a draft and moved. Where the move is a rename (sftp, HDFS,
  SMB) it is atomic; on `memory://` it is one assignment. A file system whose move is neither is
  still safe for checkpoints: the manifest is written last and carries digests of everything.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.checkpoint.naming import (
    DamagedError,
    StoreError,
    blamed,
    check_final_name,
    check_name,
    draft_name,
    is_draft,
)
from raycloud.errors import CheckpointError, SpecError
from raycloud.threads import THREADS

if TYPE_CHECKING:
    from raycloud.threads import Threads

ATOMIC_PUT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
LEAST_S = 60.0  # without any progress; what libraries try again takes less
_MOST_S = 300.0
# A write ends with making durable all that it was given: a disk, or a link, slower than this fails.
_SLOWEST_BYTES_PER_S = 16e6
_READ_BYTES = 4 * 2**20
_MARK = "mark-"
_SLOW_HINT = "see that the place can be reached and is not overloaded, or set `checkpoint.path`"


class Store:
    """Named files. A name is plain and relative, `a/b.json`; see `naming.check_name`.

    Every method raises `CheckpointError` with the place and a remedy when the store cannot do it,
    and `DamagedError` for a file that is not there. Methods may be called from several threads at
    once, for different names.

    Attributes:
        place: The path or URL, for people; without credentials.
    """

    place: str
    _raises: type[Exception] = OSError

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write `name` from `chunks`, replacing what is there.

        Atomic: whoever reads sees the file as before or complete, also when the writer is killed. A
        chunk may be reused by its owner once the next one is asked for. On return the file survives
        a power cut (local) or is acknowledged by the service (remote). What `chunks` raises passes
        through, and nothing is written.
        """
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        """All bytes of `name`."""
        raise NotImplementedError

    def stream(self, name: str) -> Iterator[bytes]:
        """The bytes of `name`, 4 MiB at a time."""
        raise NotImplementedError

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        raise NotImplementedError

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """All files whose names start with `prefix`, sorted, drafts among them, and their bytes.

        Few calls, however many files there are.
        """
        raise NotImplementedError

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files or drafts, durably, in few calls; some may be gone already."""
        raise NotImplementedError

    def exists(self, name: str) -> bool:
        """Whether `name` is there."""
        try:
            self.size(name)
        except DamagedError:
            return False
        return True

    def names(self, prefix: str = "") -> list[str]:
        """All complete files that start with `prefix`, sorted."""
        return [name for name in self.sizes(prefix) if not is_draft(name)]

    def drafts(self, prefix: str = "") -> list[str]:
        """Unfinished files that start with `prefix`, sorted: of live and killed writers."""
        return [name for name in self.sizes(prefix) if is_draft(name)]

    def remove(self, name: str) -> None:
        """Remove a file or a draft, durably; nothing happens if it is not there."""
        self.remove_all([name])

    @contextlib.contextmanager
    def _blaming(self, action: str, name: str = "") -> Iterator[None]:
        """Turn what the file system raises into a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except self._raises as error:
            raise blamed(action, f"{self.place}/{name}".rstrip("/"), error) from error


class LocalStore(Store):
    """Files below a directory of this machine, or of a file system it has mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.place = str(self._root)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write to a draft beside the target, then rename it over the target."""
        check_final_name(name)
        target, draft = self._root / name, self._root / draft_name(name)
        with self._blaming("write", name):
            _make_directory(target.parent)
            # 0666 less the umask: others who share the run may read it. A fresh file of our own.
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                for chunk in chunks:
                    rest = memoryview(chunk)
                    with self._blaming("write", name):
                        while rest.nbytes:
                            rest = rest[os.write(file, rest) :]
                with self._blaming("write", name):
                    os.fsync(file)
            finally:
                os.close(file)
            with self._blaming("write", name):
                draft.replace(target)
                _sync_directory(target.parent)
        except BaseException:
            with suppress(OSError):  # the first error says more; retention removes the draft
                draft.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> bytes:
        """See `Store.read`."""
        check_final_name(name)
        with self._blaming("read", name):
            return (self._root / name).read_bytes()

    def stream(self, name: str) -> Iterator[bytes]:
        """See `Store.stream`."""
        check_final_name(name)
        with self._blaming("read", name), (self._root / name).open("rb", buffering=0) as file:
            while chunk := file.read(_READ_BYTES):
                yield chunk

    def size(self, name: str) -> int:
        """See `Store.size`."""
        check_final_name(name)
        with self._blaming("read", name):
            found = (self._root / name).stat()
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError
            return found.st_size

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """See `Store.sizes`."""

        def refuse(error: OSError) -> None:
            # A directory may be removed between being listed and being entered.
            if not isinstance(error, FileNotFoundError):
                raise error

        found = {}
        with self._blaming("list"):
            for top, _, files in os.walk(self._root / prefix.rpartition("/")[0], onerror=refuse):
                for path in (Path(top) / file for file in files):
                    name = path.relative_to(self._root).as_posix()
                    if name.startswith(prefix):
                        with suppress(FileNotFoundError):  # removed since it was listed
                            found[name] = path.stat().st_size
        return dict(sorted(found.items()))

    def remove_all(self, names: Sequence[str]) -> None:
        """Unlink; make that durable once for each directory, and drop those that are empty then."""
        for name in names:
            check_name(name)
            with self._blaming("remove", name):
                (self._root / name).unlink(missing_ok=True)
        for parent in {(self._root / name).parent: None for name in names}:
            with self._blaming("remove"):
                try:
                    _sync_directory(parent)
                except FileNotFoundError:
                    continue
            if parent != self._root:
                with suppress(OSError):  # not empty: the usual case
                    parent.rmdir()


def _make_directory(path: Path) -> None:
    """Create `path` and its parents, each made durable in the one above it."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class RemoteStore(Store):
    """Files below an fsspec URL; credentials come from where the URL's package takes them.

    Raises:
        CheckpointError: The protocol is unknown, or its package is not installed.
    """

    _raises = Exception  # each file system raises its own library's errors

    def __init__(self, url: str) -> None:
        # Only paid for by those who use it: a driver counts milliseconds to its first step.
        import fsspec  # noqa: PLC0415

        self.place = re.sub(r"://[^/@]*@", "://", url).rstrip("/")
        protocol = url.partition("://")[0]
        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ImportError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint.path = {self.place!r} cannot be opened: {error}",
                hint=f"install the fsspec package for {protocol}:// on every node, "
                "or use a path that all nodes share",
            ) from error
        self._system: Any = system
        self._root = str(root).rstrip("/")
        self._direct = protocol in ATOMIC_PUT

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
            with suppress(Exception):  # the first error is on its way and says more
                self._system.rm_file(draft)
            raise

    def read(self, name: str) -> bytes:
        """See `Store.read`."""
        check_final_name(name)
        with self._blaming("read", name):
            return bytes(self._system.cat_file(self._path(name)))

    def stream(self, name: str) -> Iterator[bytes]:
        """See `Store.stream`."""
        check_final_name(name)
        with self._blaming("read", name), self._system.open(self._path(name), "rb") as file:
            while chunk := file.read(_READ_BYTES):
                yield bytes(chunk)

    def size(self, name: str) -> int:
        """See `Store.size`."""
        check_final_name(name)
        with self._blaming("read", name):
            self._system.invalidate_cache()
            found = self._system.info(self._path(name))
            if found["type"] != "file":
                raise FileNotFoundError
            return int(found["size"])

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """See `Store.sizes`: one listing, page by page."""
        below = f"{self._root}/{prefix.rpartition('/')[0]}".rstrip("/")
        with self._blaming("list"):
            self._system.invalidate_cache()
            try:
                found = self._system.find(below, detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._root) + 1
            sizes = {path[start:]: int(about.get("size") or 0) for path, about in found.items()}
        return {name: sizes[name] for name in sorted(sizes) if name.startswith(prefix)}

    def remove_all(self, names: Sequence[str]) -> None:
        """See `Store.remove_all`: object stores take a thousand in one call."""
        for name in names:
            check_name(name)
        if not names:
            return
        with self._blaming("remove", names[0]):
            paths = [self._path(name) for name in names]
            try:
                self._system.rm(paths)
            except FileNotFoundError:  # one of them is gone, and the others may not be
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._system.rm_file(path)

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
            with suppress(Exception):  # the first error is on its way and says more
                if self._direct:  # where closing would complete an upload, abort it
                    file.discard()
                    file.closed = True
                else:
                    file.close()
            raise
        with self._blaming("write", name):
            file.close()

    def _move(self, draft: str, target: str) -> None:
        try:
            self._system.mv(draft, target)
        except OSError:
            # Some renames (sftp, HDFS) refuse to replace a file.
            if not self._system.exists(target):
                raise
            self._system.rm_file(target)
            self._system.mv(draft, target)


def open_store(url_or_path: str | Path) -> Store:
    """The store at a local path or an fsspec URL (`memory://`, `s3://bucket/key`, ...).

    Nothing is created before the first write.

    Raises:
        CheckpointError: The URL's protocol is unknown, or its package is not installed.
    """
    text = str(url_or_path)
    protocol, found, rest = text.partition("://")
    if "::" in text:
        raise CheckpointError(
            f"checkpoint.path = {text!r} chains file systems",
            hint="give the URL of the place itself: a cache in between would hide what is written",
        )
    if not found:
        return LocalStore(Path(text))
    return LocalStore(Path(rest)) if protocol in {"file", "local"} else RemoteStore(text)


class _Call:
    """One call under way in a thread of its own, and how far it has come."""

    def __init__(self, work: Callable[[], Any], threads: Threads) -> None:
        self._work, self._threads = work, threads
        self._turn = threads.condition()
        self._result: Any = None
        self._error: BaseException | None = None
        self._over = self._abandoned = False
        self._pieces, self._given_bytes = 0, 0

    def counted(self, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The chunks; each one asked for is progress, and none comes once nobody waits."""
        for chunk in chunks:
            with self._turn:
                if self._abandoned:
                    raise StoreError("the write was given up", hint=_SLOW_HINT)
                self._pieces += 1
                self._given_bytes += memoryview(chunk).nbytes
                self._turn.notify_all()
            yield chunk

    def result(self, least_s: float, what: str) -> Any:
        """What the call returns or raises.

        Raises:
            StoreError: It has come no further for too long.
        """
        self._threads.thread(self._run, name="store").start()
        with self._turn:
            while not self._over:
                limit_s = min(least_s + self._given_bytes / _SLOWEST_BYTES_PER_S, _MOST_S)
                if not self._turn.wait_for(partial(self._moved, self._pieces), limit_s):
                    self._abandoned = True
                    raise StoreError(f"{what}: no answer for {limit_s:.0f} s", hint=_SLOW_HINT)
        if self._error is not None:
            raise self._error
        return self._result

    def _moved(self, pieces: int) -> bool:
        return self._over or self._pieces != pieces

    def _run(self) -> None:
        result, error = None, None
        try:
            result = self._work()
        except BaseException as raised:  # noqa: BLE001 - raised to who waits
            error = raised
        with self._turn:
            self._result, self._error, self._over = result, error, True
            self._turn.notify_all()


class LimitedStore(Store):
    """Another store, with time limits on all but reading: a call that hangs has failed.

    A library may wait for an answer for as long as a connection stands, and nothing ends a thread
    from outside. So each call is made in a thread of its own, which is abandoned where it comes no
    further. What it wrote by then is a draft, or an upload that is not completed: nobody reads it.

    Args:
        store: The other one.
        least_s: How long a call may come no further; longer where many bytes were given to it.
        threads: Where calls are made.
    """

    def __init__(
        self, store: Store, *, least_s: float = LEAST_S, threads: Threads = THREADS
    ) -> None:
        self._store, self._least_s, self._threads = store, least_s, threads
        self.place = store.place

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write, as long as it comes further."""
        call = _Call(lambda: self._store.write(name, counted), self._threads)
        counted = call.counted(chunks)
        call.result(self._least_s, f"cannot write {self.place}/{name}")

    def read(self, name: str) -> bytes:
        """Read, however long it takes."""
        return self._store.read(name)

    def stream(self, name: str) -> Iterator[bytes]:
        """Read, however long it takes."""
        return self._store.stream(name)

    def size(self, name: str) -> int:
        """See `Store.size`."""
        call = _Call(partial(self._store.size, name), self._threads)
        return int(call.result(self._least_s, f"cannot read {self.place}/{name}"))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """See `Store.sizes`."""
        call = _Call(partial(self._store.sizes, prefix), self._threads)
        return dict(call.result(self._least_s, f"cannot list {self.place}"))

    def remove_all(self, names: Sequence[str]) -> None:
        """See `Store.remove_all`."""
        call = _Call(partial(self._store.remove_all, names), self._threads)
        call.result(self._least_s, f"cannot remove {len(names)} files of {self.place}")


@contextlib.contextmanager
def marked(store: Store) -> Iterator[str]:
    """Write a mark that whoever sees this store can see, until the block is left; its name.

    Raises:
        CheckpointError: The store cannot be written.
    """
    store.remove_all(store.names(_MARK))  # left by a driver that was killed
    name = f"{_MARK}{secrets.token_hex(8)}"
    store.write(name, [b""])
    try:
        yield name
    finally:
        with suppress(CheckpointError):  # the store is gone: nobody is misled
            store.remove(name)


def check_shared(store: Store, mark: str, node: str) -> None:
    """Look for a mark from another machine: a path may name another disk on each of them.

    Args:
        store: As it is opened here.
        mark: What `marked` has written.
        node: The machine, for people.

    Raises:
        SpecError: It is not there, so this is another place.
    """
    if not store.exists(mark):
        raise SpecError(
            "checkpoint.path",
            store.place,
            f"is another place on node {node} than where the driver runs",
            hint="each member writes its own part: give a URL, such as s3://BUCKET/NAME, or a "
            "directory on a file system that all nodes share",
        )
