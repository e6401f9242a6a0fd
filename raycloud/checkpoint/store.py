"""Stores of checkpoints: flat sets of named files that are complete or absent.

A directory is written with draft, fsync, rename, fsync of the directory. Any other place is one of
fsspec. An object store (`ATOMIC_PUT`) shows an object once its upload is completed, so it is put
under its own name; what a killed writer uploaded stays invisible (a bucket rule sweeps it).
Elsewhere the file is written as a draft and moved: by a rename (sftp, HDFS, SMB), or one assignment
(`memory://`). Where a move is neither, the manifest, written last, still has digests of everything.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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

T = TypeVar("T")

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
        check_final_name(name)
        self._write(name, chunks)

    def read(self, name: str) -> bytes:
        """All bytes of `name`."""
        check_final_name(name)
        with self._blaming("read", name):
            return self._read(name)

    def stream(self, name: str) -> Iterator[bytes]:
        """The bytes of `name`, 4 MiB at a time."""
        check_final_name(name)
        with self._blaming("read", name), self._open(name) as file:
            while chunk := file.read(_READ_BYTES):
                yield bytes(chunk)

    def size(self, name: str) -> int:
        """Bytes of `name`."""
        check_final_name(name)
        with self._blaming("read", name):
            return self._size(name)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of all files whose names start with `prefix`, sorted, drafts among them."""
        with self._blaming("list"):
            found = self._sizes(prefix)
        return {name: found[name] for name in sorted(found) if name.startswith(prefix)}

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove files or drafts, durably, in few calls; some may be gone already."""
        for name in names:
            check_name(name)
        self._remove_all(names)

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

    @contextmanager
    def _blaming(self, action: str, name: str = "") -> Iterator[None]:
        """Turn what the file system raises into a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except self._raises as error:
            raise blamed(action, f"{self.place}/{name}".rstrip("/"), error) from error

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        raise NotImplementedError

    def _read(self, name: str) -> bytes:
        raise NotImplementedError

    def _open(self, name: str) -> Any:
        raise NotImplementedError

    def _size(self, name: str) -> int:
        raise NotImplementedError

    def _sizes(self, prefix: str) -> dict[str, int]:
        """As `sizes`; others may be among them."""
        raise NotImplementedError

    def _remove_all(self, names: Sequence[str]) -> None:
        raise NotImplementedError


class LocalStore(Store):
    """Files below a directory of this machine, or of a file system it has mounted."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.place = str(self._root)

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write to a draft beside the target, then rename it over the target."""
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

    def _read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def _open(self, name: str) -> Any:
        return (self._root / name).open("rb", buffering=0)

    def _size(self, name: str) -> int:
        found = (self._root / name).stat()
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError
        return found.st_size

    def _sizes(self, prefix: str) -> dict[str, int]:
        def refuse(error: OSError) -> None:
            # A directory may be removed between being listed and being entered.
            if not isinstance(error, FileNotFoundError):
                raise error

        found = {}
        for top, _, files in os.walk(self._root / prefix.rpartition("/")[0], onerror=refuse):
            for path in (Path(top) / file for file in files):
                name = path.relative_to(self._root).as_posix()
                if name.startswith(prefix):  # others' files are not touched
                    with suppress(FileNotFoundError):  # removed since it was listed
                        found[name] = path.stat().st_size
        return found

    def _remove_all(self, names: Sequence[str]) -> None:
        """Unlink; make that durable once for each directory, and drop those that are empty then."""
        for name in names:
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
    """Files below an fsspec URL; credentials come from where the URL's package takes them."""

    _raises = Exception  # each file system raises its own library's errors

    def __init__(self, url: str) -> None:
        # Only paid for by those who use it: a driver counts milliseconds to its first step.
        import fsspec  # noqa: PLC0415

        self.place = re.sub(r"://[^/@]*@", "://", url).rstrip("/")
        protocol = url.partition("://")[0]
        try:
            system, root = fsspec.core.url_to_fs(url)
        except (ImportError, TypeError, ValueError) as error:
            hint = f"install fsspec's package for {protocol}:// on every node, or use a shared path"
            what = f"checkpoint.path = {self.place!r} cannot be opened: {error}"
            raise CheckpointError(what, hint=hint) from error
        self._system: Any = system
        self._root = str(root).rstrip("/")
        self._direct = protocol in ATOMIC_PUT

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Put the object, or write a draft and move it; see the module."""
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

    def _read(self, name: str) -> bytes:
        return bytes(self._system.cat_file(self._path(name)))

    def _open(self, name: str) -> Any:
        return self._system.open(self._path(name), "rb")

    def _size(self, name: str) -> int:
        self._system.invalidate_cache()
        found = self._system.info(self._path(name))
        if found["type"] != "file":
            raise FileNotFoundError
        return int(found["size"])

    def _sizes(self, prefix: str) -> dict[str, int]:
        self._system.invalidate_cache()
        below = self._path(prefix.rpartition("/")[0]).rstrip("/")
        try:
            found = self._system.find(below, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {path[start:]: int(about.get("size") or 0) for path, about in found.items()}

    def _remove_all(self, names: Sequence[str]) -> None:
        """Object stores take a thousand in one call."""
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
        except OSError:  # some renames (sftp, HDFS) refuse to replace a file
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

    def __init__(self, threads: Threads) -> None:
        self._threads, self._turn = threads, threads.condition()
        self._abandoned = False
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

    def result(self, work: Callable[[], T], least_s: float, what: str) -> T:
        """What `work` returns or raises; a `StoreError` where it comes no further for too long."""
        over: Future[T] = Future()
        self._threads.thread(self._run, work, over, name="store").start()
        with self._turn:
            while not over.done():
                limit_s = min(least_s + self._given_bytes / _SLOWEST_BYTES_PER_S, _MOST_S)
                moved = partial(lambda before: over.done() or self._pieces != before, self._pieces)
                if not self._turn.wait_for(moved, limit_s):
                    self._abandoned = True
                    raise StoreError(f"{what}: no answer for {limit_s:.0f} s", hint=_SLOW_HINT)
        return over.result()

    def _run(self, work: Callable[[], T], over: Future[T]) -> None:
        try:
            over.set_result(work())
        except BaseException as raised:  # noqa: BLE001 - raised to who waits
            over.set_exception(raised)
        with self._turn:
            self._turn.notify_all()


class LimitedStore(Store):
    """Another store, with time limits on all but reading: a call that hangs has failed.

    A library may wait for an answer for as long as a connection stands, and nothing ends a thread
    from outside. So each call is made in a thread of its own, which is abandoned where it comes no
    further for `least_s`, or longer where many bytes were given to it. What it wrote by then is a
    draft, or an upload that is not completed: nobody reads it.
    """

    def __init__(
        self, store: Store, *, least_s: float = LEAST_S, threads: Threads = THREADS
    ) -> None:
        self._store, self._least_s, self._threads = store, least_s, threads
        self.place = store.place

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write, as long as it comes further."""
        call = _Call(self._threads)
        work = partial(self._store.write, name, call.counted(chunks))
        call.result(work, self._least_s, f"cannot write {self.place}/{name}")

    def read(self, name: str) -> bytes:
        """Read, however long it takes."""
        return self._store.read(name)

    def stream(self, name: str) -> Iterator[bytes]:
        """Read, however long it takes."""
        return self._store.stream(name)

    def size(self, name: str) -> int:
        """See `Store.size`."""
        return self._limited(f"read {self.place}/{name}", partial(self._store.size, name))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """See `Store.sizes`."""
        return self._limited(f"list {self.place}", partial(self._store.sizes, prefix))

    def remove_all(self, names: Sequence[str]) -> None:
        """See `Store.remove_all`."""
        what = f"remove {len(names)} files of {self.place}"
        self._limited(what, partial(self._store.remove_all, names))

    def _limited(self, what: str, work: Callable[[], T]) -> T:
        return _Call(self._threads).result(work, self._least_s, f"cannot {what}")


@contextmanager
def marked(store: Store) -> Iterator[str]:
    """Write a mark that whoever sees this store can see, until the block is left; its name."""
    store.remove_all(store.names(_MARK))  # left by a driver that was killed
    name = f"{_MARK}{secrets.token_hex(8)}"
    store.write(name, [b""])
    try:
        yield name
    finally:
        with suppress(CheckpointError):  # the store is gone: nobody is misled
            store.remove_all([name])


def check_shared(store: Store, mark: str, node: str) -> None:
    """Look for a mark from another machine: a path may name another disk on this `node`.

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
