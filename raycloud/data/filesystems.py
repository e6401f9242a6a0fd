"""File systems behind a `Source`'s path: this machine's, pyarrow's and fsspec's, by their URLs.

pyarrow can wrap fsspec itself, but its wrapper takes a server that answers 503 for a missing file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, unquote_plus

import fsspec
import pyarrow as pa
from pyarrow import fs

from raycloud.bounded import expanded
from raycloud.data.retry import status_of
from raycloud.errors import DataError
from raycloud.redact import GONE

if TYPE_CHECKING:
    from raycloud.task import Source

_ARROW_SCHEMES = {scheme: scheme for scheme in ("s3", "gs", "hdfs", "viewfs", "abfs", "abfss")}
_ARROW_SCHEMES |= {"s3a": "s3", "gcs": "gs"}
_TAGS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "checksum", "Last-Modified", "updated")
_NOT_THERE = frozenset({None, 404, 410})
_BUFFERED = frozenset({"http", "https", "s3", "s3a", "gs", "gcs", "abfs", "az"})
_CACHES = frozenset({"cache_type", "cache_options", "default_cache_type", "block_size"})
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "created")

_HEAD = re.compile(r"^(?P<scheme>[a-z][a-z0-9+.-]*)://", re.IGNORECASE)
# user:password@, also where the password holds a slash that should have been percent-encoded
_USER = re.compile(
    r"(?P<head>[a-z][a-z0-9+.-]*://)(?:[^\s/?#]*|[^\s/@?#:]*:(?!\d+/)[^\s@?#]*)@", re.I
)
_SECRET = re.compile(
    r"pass(?:word|wd|phrase)|secret|token|signature|credential|api[_-]?key|access[_-]?key|^sig$|^key$",
    re.I,
)
_SHORT = 3  # a shorter secret stands in too many words


def scheme_of(url: str) -> str:
    """What stands before `://`, in small letters; empty for a path.

    >>> scheme_of("S3://bucket"), scheme_of("/data/a")
    ('s3', '')
    """
    found = _HEAD.match(url)
    return found["scheme"].lower() if found else ""


def without_credentials(url: str) -> str:
    """The URL without user and password, and with secrets in its query replaced.

    >>> without_credentials("s3://me:hun/ter2@bucket/a?id=1&token=abc")
    's3://bucket/a?id=1&token=[redacted]'
    """
    if not scheme_of(url):
        return url
    place, mark, query = _USER.sub(r"\g<head>", url).partition("?")
    fields = [field.partition("=") for field in query.split("&")] if query else []
    kept = (f"{n}{eq}{GONE if eq and _SECRET.search(n) else v}" for n, eq, v in fields)
    return place + mark + "&".join(kept)


def redacted(text: str, urls: Iterable[str]) -> str:
    """The text without what these URLs keep secret.

    >>> redacted("hunter2 of s3://me:hunter2@bucket/a is wrong", ["s3://me:hunter2@bucket/a"])
    '[redacted] of s3://bucket/a is wrong'
    """
    for url in urls:
        if scheme_of(url):
            text = text.replace(url, without_credentials(url))
            query = parse_qsl(url.partition("?")[2], keep_blank_values=True)
            secrets = [value for name, value in query if _SECRET.search(name)]
            if found := _USER.match(url):
                secrets += found[0].partition("://")[2][:-1].split(":", 1)
            for value in secrets:
                for secret in {value, unquote(value), unquote_plus(value), quote(value, safe="")}:
                    if len(secret) >= _SHORT:
                        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", GONE, text)
    return _USER.sub(rf"\g<head>{GONE}@", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file or a directory, by its path in its file system."""

    path: str
    is_directory: bool = False
    bytes: int | None = None
    modified_ns: int | None = None
    tag: str | None = None


class ArrowTree:
    """A `pyarrow.fs.FileSystem`. `scheme` stands before `://`; empty for this machine's own."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self.scheme = "" if system.type_name == "local" else str(system.type_name)

    def info(self, path: str) -> Entry | None:
        """What is there; None: nothing."""
        found = self._system.get_file_info(path)
        return None if found.type == fs.FileType.NotFound else self._entry(found)

    def below(self, path: str, *, deep: bool) -> list[Entry]:
        """What is in a directory: directly, or to its depths."""
        selector = fs.FileSelector(path, recursive=deep)
        return list(map(self._entry, self._system.get_file_info(selector)))

    def open(self, path: str, *, ahead: bool = True) -> pa.NativeFile:  # noqa: ARG002 - as fsspec's
        """Open a file for reading at any place. Whether it reads `ahead` is its own choice."""
        return self._system.open_input_file(path)

    def part(self, path: str, start: int, stop: int) -> bytes:
        """Bytes of a file, by as few questions as can be."""
        with self._system.open_input_file(path) as file:
            return bytes(file.read_at(stop - start, start))

    def refresh(self) -> None:
        """Forget listings: it remembers none."""

    def _entry(self, info: Any) -> Entry:
        return Entry(
            path=info.path,
            is_directory=info.type == fs.FileType.Directory,
            bytes=info.size if info.type == fs.FileType.File else None,
            modified_ns=info.mtime_ns,
        )


class LocalTree(ArrowTree):
    """This machine's own file system."""

    def __init__(self) -> None:
        super().__init__(fs.LocalFileSystem())

    def below(self, path: str, *, deep: bool) -> list[Entry]:
        """The same. A link to nothing, which pyarrow leaves out, is a file of no size."""
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
    """An fsspec file system; its methods are those of `ArrowTree`."""

    def __init__(self, system: Any) -> None:
        self._system = system
        name = system.protocol if isinstance(system.protocol, str) else system.protocol[0]
        self.scheme = "" if name in {"file", "local"} else str(name)

    def info(self, path: str) -> Entry | None:
        """What is there. Of HTTP, what ends in `/` is a directory: its page lists links."""
        if path.endswith("/") and self.scheme in {"http", "https"}:
            return Entry(path=path, is_directory=True)
        try:
            return self._entry(self._system.info(path))
        except FileNotFoundError as error:  # which any other answer is dressed as, too
            if status_of(error) in _NOT_THERE:
                return None
            raise

    def below(self, path: str, *, deep: bool) -> list[Entry]:
        """What is in a directory."""
        depth = None if deep else 1
        found = self._system.find(path, maxdepth=depth, withdirs=not deep, detail=True)
        entries = map(self._entry, found.values())
        return [entry for entry in entries if entry.path.rstrip("/") != path.rstrip("/")]

    def open(self, path: str, *, ahead: bool = True) -> pa.NativeFile:
        """Open a file. What cannot be read at any place is read whole.

        It reads megabytes ahead of what is asked for, unless that is known to come in large parts.
        A file system that was given a cache of its own keeps that.
        """
        own = _CACHES & getattr(self._system, "storage_options", {}).keys()
        more = {} if ahead or own or self.scheme not in _BUFFERED else {"cache_type": "none"}
        file = self._system.open(path, "rb", **more)
        if file.seekable():
            return pa.PythonFile(file, mode="r")
        with file:
            return pa.BufferReader(file.read())

    def part(self, path: str, start: int, stop: int) -> bytes:
        """The same; from its beginning, where a server knows no parts."""
        with self._system.open(path, "rb") as file:
            if not file.seekable():
                return bytes(file.read(stop - start))
        return bytes(self._system.cat_file(path, start=start, end=stop))

    def refresh(self) -> None:
        """Forget listings."""
        self._system.invalidate_cache()

    def _entry(self, info: Mapping[str, Any]) -> Entry:
        size = info.get("size")
        tag = next((info[name] for name in _TAGS if info.get(name)), None)
        moment = next((info[name] for name in _TIMES if info.get(name)), None)
        if isinstance(moment, datetime):
            moment = moment.timestamp()
        return Entry(
            path=str(info["name"]),
            is_directory=info.get("type") == "directory",
            bytes=None if size is None else int(size),
            modified_ns=int(moment * 1e9) if isinstance(moment, int | float) else None,
            tag=None if tag is None else str(tag),
        )


Tree = ArrowTree | FsspecTree


def _raise(error: OSError) -> None:
    raise error


def _local(path: str) -> Entry:
    with suppress(FileNotFoundError):
        found = os.stat(path)  # noqa: PTH116 - of very many files
        if stat.S_ISREG(found.st_mode):  # a pipe or a device: reading it may wait for ever
            return Entry(path=path, bytes=found.st_size, modified_ns=found.st_mtime_ns)
    return Entry(path=path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """One path of a source: in its tree, perhaps with a pattern; up to that, a file or directory.

    `name` is what `base` is called: without credentials, and the same on every machine.
    """

    tree: Tree
    path: str
    base: str
    name: str

    def named(self, path: str) -> str:
        """What a file at or below `base` is called."""
        return self.name + path[len(self.base) :]

    def path_of(self, name: str) -> str | None:
        """The path in the tree of what is called so; None: it does not lie here."""
        if name == self.name or name.startswith(self.name.rstrip("/") + "/"):
            return self.base + name[len(self.name) :]
        return None


def paths_of(source: Source) -> tuple[str, ...]:
    """The paths of a source; without any, a `DataError`."""
    given: Any = source.path  # a `Path` will do
    several = (given,) if isinstance(given, str | os.PathLike) else tuple(given or ())
    paths = tuple(str(path) for path in several)
    if not all(path.strip() for path in paths) or not paths:
        raise DataError(
            f"Source.path = {source.path!r}: no files are named",
            hint="give a file, a directory, a pattern or a URL, or several of them",
        )
    return paths


def roots_of(source: Source) -> list[Root]:
    """One for each path; a `DataError`, without credentials, where nothing here can open a URL."""
    roots = [_root_of(source.filesystem, given) for given in paths_of(source)]
    by_name: dict[str, Root] = {}
    for root in roots:
        if by_name.setdefault(root.name, root).base != root.base:
            raise DataError(
                f"Source.path names two places that are both called {root.name!r}",
                hint="give each of them its own `Source`",
            )
    return roots


def _root_of(system: Any, given: str) -> Root:
    scheme = scheme_of(given)
    if system is not None:
        tree = _tree_of(system)
        path = given.partition("://")[2].partition("?")[0] if scheme else given
        return _root(tree, path, tree.scheme)
    if scheme in {"", "file", "local"} and "::" not in given:
        path = given.partition("://")[2] if scheme else given
        return _root(LocalTree(), str(expanded(Path(path)).absolute()), "")
    if scheme in _ARROW_SCHEMES:
        return _arrow_root(_ARROW_SCHEMES[scheme], given)
    scheme = scheme or given.partition("::")[0]
    try:
        system, path = fsspec.core.url_to_fs(given)
    except (ImportError, ValueError) as error:
        raise _no_system(scheme, given, error) from None
    except Exception as error:  # noqa: BLE001 - a file system of any library raises what it likes
        raise DataError(
            f"{without_credentials(given)!r} cannot be opened: {redacted(str(error), [given])}",
            hint="check the URL, and that its server can be reached from every node",
        ) from None
    return _root(FsspecTree(system), path, scheme, literal="*[")


def _tree_of(system: Any) -> Tree:
    if isinstance(system, fs.PyFileSystem) and isinstance(system.handler, fs.FSSpecHandler):
        system = system.handler.fs
    if isinstance(system, fsspec.AbstractFileSystem):
        return FsspecTree(system)
    if isinstance(system, fs.LocalFileSystem):
        return LocalTree()
    if isinstance(system, fs.FileSystem):
        return ArrowTree(system)
    raise DataError(
        f"Source.filesystem is of {type(system).__name__}, which is no file system",
        hint="give one of pyarrow.fs or of fsspec, or null to go by the URL",
    )


def _root(tree: Tree, path: str, scheme: str, *, literal: str = "*[?") -> Root:
    """Split the path at its pattern, unless there is a file of just that name."""
    base = path
    marked = next((i for i, char in enumerate(path) if char in literal), None)
    if marked is not None and not (scheme == "" and Path(path).exists()):
        base = path[:marked].rpartition("/")[0] or path[: path.startswith("/")]
    name = without_credentials(
        base if "://" in base or not scheme else f"{scheme}://{base.lstrip('/')}"
    )
    return Root(tree=tree, path=path, base=base, name=name)


def _arrow_root(scheme: str, given: str) -> Root:
    """Of a file system that pyarrow has itself: it gets the server, and the path stays as it is."""
    place, mark, query = given.partition("://")[2].partition("?")
    authority, slash, path = place.partition("/")
    try:
        if "@" in path and ":" in authority and "@" not in authority and scheme != "hdfs":
            raise ValueError("its key or secret holds a slash")  # noqa: TRY301 - as a bad URL's
        system, base = _arrow_system(f"{scheme}://{authority}{slash}{mark}{query}")
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        raise _no_system(scheme, given, error) from None
    inner = f"{base.rstrip('/')}/{path}" if path else base
    return _root(ArrowTree(system), inner.rstrip("/") or "/", scheme, literal="*[")


@lru_cache(maxsize=64)
def _arrow_system(url: str) -> tuple[fs.FileSystem, str]:
    system, base = fs.FileSystem.from_uri(url)
    return system, str(base)


def _no_system(scheme: str, given: str, error: Exception) -> DataError:
    text = redacted(str(error), [given]).splitlines()[0]
    if scheme in {"hdfs", "viewfs"} and isinstance(error, OSError):
        text = f"Hadoop's native library is missing ({text})"
        hint = (
            "install Java and Hadoop's libhdfs on every node, and set JAVA_HOME, HADOOP_HOME, "
            "ARROW_LIBHDFS_DIR and CLASSPATH; or read it as webhdfs://"
        )
    elif isinstance(error, ImportError | NotImplementedError):
        text = f"{scheme}:// needs a package that is not installed ({text})"
        hint = "install on every node what it names (`aiohttp` for http, `adlfs` for Azure, ...)"
    elif scheme in _ARROW_SCHEMES:
        hint = "in a URL, / + @ : of a key or secret are written as %2F %2B %40 %3A"
    else:
        text = f"no file system is known for {scheme}://"
        hint = "write a path, or a URL that fsspec knows; or give `Source.filesystem`"
    return DataError(f"{without_credentials(given)!r} cannot be opened: {text}", hint=hint)
