"""Location: the files of a `Source`, found by its paths, and opened with retries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import translate
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from raycloud.data.filesystems import (
    Entry,
    LocalTree,
    Root,
    Tree,
    paths_of,
    redacted,
    roots_of,
    without_credentials,
)
from raycloud.data.formats import format_of, has_format, suffixes_in
from raycloud.data.retry import (
    TRIES,
    Pause,
    RetryingFile,
    cause_of,
    is_transient,
    status_of,
    wait,
    with_retries,
)
from raycloud.errors import DataError, RaycloudError, TaskError

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.task import Source

T = TypeVar("T")

AT_ONCE = 16  # files of another machine that are asked for, each of which is mostly waited for
_FORBIDDEN = frozenset({401, 403, 407})
_DENIED = re.compile(
    r"access_?denied|invalid_?access_?key|signature_?does_?not|expired_?token", re.I
)


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A file of a source: an absolute path on this machine, or `scheme://...` without credentials.

    Where its store does not say when it was last written to, or nothing about its content, such as
    an ETag, that is None.
    """

    path: str
    bytes: int
    modified_ns: int | None
    tag: str | None


def locate(source: Source, *, pause: Pause = wait) -> list[File]:
    """The files of a source, sorted by path.

    Of a directory, files whose names begin with `.` or `_` are left out, as are those below such a
    directory, those of other formats than `source.format`, and text such as a README beside data;
    files that are named, or match a pattern, are taken as they are.

    Raises:
        DataError: There are none, or of several formats; or a path cannot be looked at.
    """
    found: dict[str, tuple[Root, Entry]] = {}
    texts: dict[str, tuple[Root, Entry]] = {}  # come upon: data, if there is nothing else
    passed: list[str] = []  # what was left out
    for root in roots_of(source):
        root.tree.refresh()
        for entry, below, is_named in _entries(source, root, pause):
            name = root.named(entry.path)
            if source.select is not None:
                taken = _selects(source.select, below)
            else:
                taken = is_named or has_format(source.format, name)
            if taken:
                is_text = source.format == "auto" and has_format("text", name)
                kept = texts if is_text and source.select is None and not is_named else found
                kept[name] = root, entry
            else:
                passed.append(name)
    found = found or texts
    if not found:
        raise _nothing(source, passed)
    names = sorted(found)
    format_of(source.format, names)
    unsized = [name for name in names if found[name][1].bytes is None]
    # A server is asked for each: by many at once, since most of that is waiting.
    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(unsized)))) as threads:
        sized = threads.map(lambda name: _file(source, *found[name], name, pause), unsized)
        known = dict(zip(unsized, sized, strict=True))
    return [known.get(name) or _file(source, *found[name], name, pause) for name in names]


def open_file(
    source: Source, path: str, *, pause: Pause = wait, ahead: bool = True
) -> pa.NativeFile:
    """Open a file of `locate` for reading at any place; see `FsspecTree.open`.

    What fails for the moment (5xx, 429, a lost connection) is tried again, also while reading.

    Raises:
        DataError: It cannot be opened; reading raises the same.
    """
    if is_local(path):
        return _retried(source, path, partial(LocalTree().open, path), pause)
    root, inner = _place_of(source, path)
    reopen = partial(root.tree.open, inner, ahead=ahead)
    return pa.PythonFile(RetryingFile(reopen, pause, partial(_refusal, source, path)), mode="r")


def read_part(source: Source, path: str, start: int, stop: int, *, pause: Pause = wait) -> bytes:
    """Bytes of a file of `locate`; raises as `open_file` does."""
    tree: Tree = LocalTree()
    inner = path
    if not is_local(path):
        root, inner = _place_of(source, path)
        tree = root.tree
    return _retried(source, path, partial(tree.part, inner, start, stop), pause)


def _place_of(source: Source, path: str) -> tuple[Root, str]:
    roots = roots_of(source)
    found = [(root, inner) for root in roots if (inner := root.path_of(path)) is not None]
    if not found:
        raise DataError(
            f"{path!r} does not belong to {_names(source)}",
            hint="go on with the paths that the run was begun with",
        )
    return max(found, key=lambda place: len(place[0].name))


@contextmanager
def open_input(
    source: Source, file: Input, pause: Pause, *, ahead: bool = True
) -> Iterator[pa.NativeFile]:
    """An input, open; what goes wrong with it inside is a `DataError` that names it."""
    try:
        with open_file(source, file.path, pause=pause, ahead=ahead) as opened:
            size = opened.size()
            if size != file.bytes:
                raise DataError(
                    f"{file.path!r} has changed: it was of {file.bytes} bytes when it was found, "
                    f"and is of {size}",
                    hint="leave files as they are while a run reads them",
                )
            yield opened
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            text = f"it is no {source.encoding} text: {error.reason}"
        else:
            text = redacted(str(error), paths_of(source)).strip() or type(error).__name__
        raise DataError(
            f"{file.path!r} is damaged: {text.splitlines()[0]}",
            hint="write or fetch the file again, or leave it out by `Source.select`",
        ) from error


def is_local(path: str) -> bool:
    """Whether a file of `locate` is on this machine's own file system."""
    return "://" not in path


def _entries(source: Source, root: Root, pause: Pause) -> Iterator[tuple[Entry, str, bool]]:
    """Each file, its path below the root, and whether it was named rather than come upon."""

    def below(path: str, *, deep: bool) -> list[Entry]:
        act = partial(root.tree.below, path, deep=deep)
        return _retried(source, root.named(path), act, pause)

    base = root.base
    top = _retried(source, root.named(base), partial(root.tree.info, base), pause)
    if top is None:
        return
    matched = [top]
    if root.path != base:
        pattern = root.path[len(base) :].strip("/").split("/")
        matched = list(_matches(below, top, pattern)) if top.is_directory else []
    hidden = (".", "_") if source.select is None else (".",)
    for entry in matched:
        if not entry.is_directory:
            inner = entry.path[len(base) :].strip("/")
            yield entry, inner or entry.path.rpartition("/")[2], True
            continue
        for inside in below(entry.path, deep=True):
            parts = inside.path[len(entry.path.rstrip("/")) :].strip("/").split("/")
            if not inside.is_directory and not any(part.startswith(hidden) for part in parts):
                yield inside, inside.path[len(base.rstrip("/")) :].strip("/"), False


def _matches(below: Callable[..., list[Entry]], top: Entry, pattern: list[str]) -> Iterator[Entry]:
    """What matches the parts of a pattern below a directory; `**` is any number of directories."""
    part, *rest = pattern
    if part == "**":
        entries = below(top.path, deep=False)
        if rest:
            yield from _matches(below, top, rest)
        for entry in entries:
            if entry.is_directory:
                yield from _matches(below, entry, pattern)
            elif not rest:
                yield entry
        return
    is_match = re.compile(translate(part)).match
    for entry in below(top.path, deep=False):
        name = entry.path.rstrip("/").rpartition("/")[2]
        if not is_match(name) or (name.startswith(".") and not part.startswith(".")):
            continue
        if not rest:
            yield entry
        elif entry.is_directory:
            yield from _matches(below, entry, rest)


def _selects(select: Callable[[str], bool], below: str) -> bool:
    try:
        return bool(select(below))
    except RaycloudError:
        raise
    except BaseException as error:
        what = f"Source.select raised {type(error).__name__}: {error}"
        raise TaskError(what, hint=f"it was asked about {below!r}") from error


def _file(source: Source, root: Root, entry: Entry, name: str, pause: Pause) -> File:
    size = entry.bytes
    if size is None:
        if root.tree.scheme == "":
            raise DataError(
                f"{name!r} is a link to nothing, or no regular file",
                hint="restore the file or the link; data are not read from pipes and devices",
            )
        # A server that does not say.
        with open_file(source, name, pause=pause) as file:
            size = int(file.size())
    return File(path=name, bytes=size, modified_ns=entry.modified_ns, tag=entry.tag)


def _retried(source: Source, name: str, act: Callable[[], T], pause: Pause) -> T:
    try:
        return with_retries(act, pause)
    except Exception as error:  # noqa: BLE001 - a file system of any library raises what it likes
        raise _refusal(source, name, error) from None  # what was caught may hold credentials


def _refusal(source: Source, name: str, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    cause = cause_of(error)
    text = redacted(str(cause), paths_of(source)).strip() or type(cause).__name__
    denied = status_of(error) in _FORBIDDEN or _DENIED.search(str(cause))
    what, hint = "cannot be read", "check the path, and that it is whole"
    if isinstance(error, ImportError):
        hint = "install what it names on every node"
    elif is_transient(error):
        what = f"cannot be read after {TRIES} tries"
        hint = "its server is out of reach or overloaded: try later, with fewer `data.cpus`"
    elif denied or isinstance(error, PermissionError):
        what = "may not be read"
        hint = "check its permissions, or the credentials, on every node"
    elif isinstance(error, FileNotFoundError):
        what, hint = "is not there", "restore the file, or check its URL"
    return DataError(f"{name!r} {what}: {text.splitlines()[0]}", hint=hint)


def _names(source: Source) -> str:
    return ", ".join(repr(without_credentials(path)) for path in paths_of(source))


def _nothing(source: Source, passed: list[str]) -> DataError:
    where = f"files are found at {_names(source)}"
    if not passed:
        hint = "check data.path; a relative path starts at the directory the job was started in"
        return DataError(f"no {where}", hint=hint)
    if source.select is not None:
        count, first = len(passed), passed[0]
        what = f"Source.select takes none of the {count} files at {_names(source)}, as {first!r}"
        return DataError(what, hint="it is asked with each file's path below Source.path")
    kind = "" if source.format == "auto" else f"{source.format} "
    return DataError(
        f"no {kind}{where}; those there end in {suffixes_in(passed)}",
        hint="name files by a pattern, such as `folder/*.dat`, and give `Source.format`",
    )
