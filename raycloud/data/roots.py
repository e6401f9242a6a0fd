"""What a `Source`'s path names: a tree of files, a place in it, and how its files are called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from pyarrow import fs

from raycloud.bounded import expanded
from raycloud.data.hush import hushed, plain, scheme_of
from raycloud.data.trees import ArrowTree, FsspecTree, LocalTree, Tree
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.task import Source

_ARROW_SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "hdfs": "hdfs",
    "viewfs": "viewfs",
    "abfs": "abfs",
    "abfss": "abfss",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    """One path of a source.

    Attributes:
        tree: Where it lies.
        path: Its path in the tree; may hold a pattern.
        base: `path` up to the pattern: a file, or a directory.
        name: What `base` is called: without credentials, and the same on every machine.
        given: The path as the source has it; may hold credentials.
    """

    tree: Tree
    path: str
    base: str
    name: str
    given: str

    @property
    def is_pattern(self) -> bool:
        """Whether `path` names files by a pattern."""
        return self.path != self.base

    def named(self, path: str) -> str:
        """What a file at or below `base` is called."""
        return self.name + path[len(self.base) :]

    def path_of(self, name: str) -> str | None:
        """The path in the tree of what is called so; None: it does not lie here."""
        if name == self.name or name.startswith(self.name.rstrip("/") + "/"):
            return self.base + name[len(self.name) :]
        return None


def paths_of(source: Source) -> tuple[str, ...]:
    """The paths of a source.

    Raises:
        DataError: There are none.
    """
    given: Any = source.path  # a `Path` will do
    several = (given,) if isinstance(given, str | PathLike) else tuple(given or ())
    paths = tuple(str(path) for path in several)
    if not all(path.strip() for path in paths) or not paths:
        raise DataError(
            f"Source.path = {source.path!r}: no files are named",
            hint="give a file, a directory, a pattern or a URL, or several of them",
        )
    return paths


def roots_of(source: Source) -> list[Root]:
    """The roots of a source, one for each path.

    Raises:
        DataError: A URL of a kind that nothing here can open; credentials are not in its text.
    """
    given = tuple(_roots(source))
    for root in given:
        twin = next((r for r in given if r.name == root.name and r.base != root.base), None)
        if twin is not None:
            raise DataError(
                f"Source.path names two places that are both called {root.name!r}",
                hint="give each of them its own `Source`",
            )
    return list(given)


def _roots(source: Source) -> Iterator[Root]:
    for given in paths_of(source):
        if source.filesystem is not None:
            tree = _tree_of(source.filesystem)
            yield _root(tree, _inner(given), tree.scheme, given)
        elif scheme_of(given) in {"", "file", "local"} and "::" not in given:
            path = given.partition("://")[2] if scheme_of(given) else given
            absolute = str(expanded(Path(path)).absolute())
            yield _root(LocalTree(), absolute, "", given)
        elif (native := _ARROW_SCHEMES.get(scheme_of(given))) is not None:
            yield _arrow_root(native, given)
        else:
            yield _fsspec_root(given)


def _tree_of(system: Any) -> Tree:
    if isinstance(system, fs.PyFileSystem) and isinstance(system.handler, fs.FSSpecHandler):
        return FsspecTree(system.handler.fs)
    if isinstance(system, fs.LocalFileSystem):
        return LocalTree()
    if isinstance(system, fs.FileSystem):
        return ArrowTree(system)
    if isinstance(system, fsspec.AbstractFileSystem):
        return FsspecTree(system)
    raise DataError(
        f"Source.filesystem is of {type(system).__name__}, which is no file system",
        hint="give one of pyarrow.fs or of fsspec, or null to go by the URL",
    )


def _inner(given: str) -> str:
    return given.partition("://")[2].partition("?")[0] if scheme_of(given) else given


def _root(tree: Tree, path: str, scheme: str, given: str, *, literal: str = "*[?") -> Root:
    """Split the path at its pattern, unless there is a file of just that name."""
    base = path
    marked = next((i for i, char in enumerate(path) if char in literal), None)
    if marked is not None and not (scheme == "" and Path(path).exists()):
        base = path[:marked].rpartition("/")[0] or path[: path.startswith("/")]
    name = plain(base if "://" in base or not scheme else f"{scheme}://{base.lstrip('/')}")
    return Root(tree=tree, path=path, base=base, name=name, given=given)


def _arrow_root(scheme: str, given: str) -> Root:
    """Of a file system that pyarrow has itself: it gets the server, and the path stays as it is."""
    rest = given.partition("://")[2]
    place, mark, query = rest.partition("?")
    authority, slash, path = place.partition("/")
    try:
        if "@" in path and ":" in authority and "@" not in authority and scheme != "hdfs":
            raise ValueError("its key or secret holds a slash")  # noqa: TRY301 - as a bad URL's
        system, base = _arrow_system(f"{scheme}://{authority}{slash}{mark}{query}")
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        raise _no_system(scheme, given, error) from None
    tree = ArrowTree(system)
    inner = f"{str(base).rstrip('/')}/{path}" if path else str(base)
    return _root(tree, inner.rstrip("/") or "/", scheme, given, literal="*[")


@lru_cache(maxsize=64)
def _arrow_system(url: str) -> tuple[fs.FileSystem, str]:
    system, base = fs.FileSystem.from_uri(url)
    return system, base


def _fsspec_root(given: str) -> Root:
    scheme = scheme_of(given) or given.partition("::")[0]
    try:
        system, path = fsspec.core.url_to_fs(given)
    except (ImportError, ValueError) as error:
        raise _no_system(scheme, given, error) from None
    except Exception as error:  # noqa: BLE001 - a file system of any library raises what it likes
        raise DataError(
            f"{plain(given)!r} cannot be opened: {hushed(str(error), [given])}",
            hint="check the URL, and that its server can be reached from every node",
        ) from None
    return _root(FsspecTree(system), path, scheme, given, literal="*[")


def _no_system(scheme: str, given: str, error: Exception) -> DataError:
    text = hushed(str(error), [given]).splitlines()[0]
    where = f"{plain(given)!r} cannot be opened: "
    if scheme in {"hdfs", "viewfs"} and isinstance(error, OSError):
        return DataError(
            f"{where}Hadoop's native library is missing ({text})",
            hint="install Java and Hadoop's libhdfs on every node, and set JAVA_HOME, HADOOP_HOME, "
            "ARROW_LIBHDFS_DIR and CLASSPATH; or read it as webhdfs://",
        )
    if isinstance(error, ImportError | NotImplementedError):
        return DataError(
            f"{where}{scheme}:// needs a package that is not installed ({text})",
            hint="install on every node what it names (`pip install aiohttp` for http, `adlfs` for "
            "Azure, `paramiko` for sftp, ...)",
        )
    if scheme in _ARROW_SCHEMES.values():
        return DataError(
            f"{where}{text}",
            hint="in a URL, characters such as / + @ : of a key or secret are written as %2F %2B "
            "%40 %3A",
        )
    return DataError(
        f"{where}no file system is known for {scheme}://",
        hint="write a path, or s3://, gs://, hdfs://, http:// or another that fsspec knows; or "
        "give `Source.filesystem`",
    )
