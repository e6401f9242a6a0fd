"""Looks through a working directory: which files travel, which stay, and why."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from raycloud.bounded import expanded
from raycloud.errors import SpecError
from raycloud.packing.ignoring import Rule, combined, ignored_by
from raycloud.packing.names import EXPECTED, file_stays, folder_stays
from raycloud.packing.repository import rules_above, rules_in, top_of

_FIELD = "--working-dir"
_MOST_FILES = 50_000
_DEEPEST = 64
_SAID = "by "
_DATA, _RUNS = "a cache of data", "runs"
_ODD_NAME = "a name that is no text"
_EXPECTED = EXPECTED | {_DATA, _RUNS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Travelling:
    """A file that travels.

    Attributes:
        path: From the root, with `/` between its parts.
        file: Where its bytes are: the file itself, or what a link within the root leads to.
        size_bytes: As it was found.
        executable: Whether its owner may execute it.
    """

    path: str
    file: Path
    size_bytes: int
    executable: bool


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Left:
    """A file or a whole directory that stays.

    Attributes:
        path: From the root; a directory ends in `/`.
        reason: Why.
    """

    path: str
    reason: str

    @property
    def told(self) -> bool:
        """Whether a reader wants to know: not of caches, and not of what the user has said."""
        return self.reason not in _EXPECTED and not self.reason.startswith(_SAID)


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What was found, by path.

    Attributes:
        root: The working directory, resolved.
        files: What travels.
        left: What stays.
    """

    root: Path
    files: tuple[Travelling, ...]
    left: tuple[Left, ...]

    def why_left(self, path: str) -> str | None:
        """Why a path stays, itself or a directory above it; None if it does not."""
        for one in self.left:
            if path == one.path or (one.path.endswith("/") and path.startswith(one.path)):
                return one.reason
        return None


def survey(root: Path, *, also: tuple[Path, ...] = ()) -> Survey:
    """Look through a directory. Reads names, sizes and ignore files, no other file.

    Args:
        root: The working directory.
        also: Places below it that stay besides, such as a cache of data.

    Raises:
        SpecError: It is no directory that can be read, or holds far too many files.
    """
    root = _checked(root)
    try:
        top = top_of(root)
        walk = _Walk(root, top, frozenset(os.path.realpath(place) for place in also))
        files = list(walk.below("", rules_above(root, top), depth=0))
        found = [*files, *walk.linked(files)]
    except OSError as error:
        raise SpecError(
            _FIELD, str(root), f"cannot be read: {error}", hint="name another directory"
        ) from error
    return Survey(
        root=root,
        files=tuple(sorted(found, key=lambda file: file.path)),
        left=tuple(sorted(walk.left)),
    )


def _checked(root: Path) -> Path:
    if not root.is_dir():
        raise SpecError(_FIELD, str(root), "is no directory", hint="name the project's directory")
    root = root.resolve()
    if root in {Path(root.anchor), expanded(Path("~")).resolve()}:
        raise SpecError(
            _FIELD,
            str(root),
            "is your whole home or the whole machine, not a project",
            hint="go to the project's directory, or name it with --working-dir",
        )
    return root


class _Walk:
    """One walk; `left` fills as it goes, but for links, of which `linked` tells afterwards."""

    def __init__(self, root: Path, top: Path, also: frozenset[str]) -> None:
        self._root, self._top, self._also = root, top, also
        self._from_top = "" if root == top else f"{root.relative_to(top).as_posix()}/"
        self.left: list[Left] = []
        self._seen = 0
        self._links: list[str] = []

    def below(self, folder: str, rules: tuple[Rule, ...], *, depth: int) -> Iterator[Travelling]:
        """What travels of a directory, named from the root with `/` at its end."""
        with os.scandir(self._root / folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        names = {entry.name for entry in found}
        rules = combined((rules, *rules_in(self._root / folder, self._root, self._top, names)))
        for entry in found:
            self._seen += 1
            if self._seen > _MOST_FILES:
                raise SpecError(
                    _FIELD,
                    str(self._root),
                    f"holds more than {_MOST_FILES} files",
                    hint="name a smaller directory, or leave some out in .raycloudignore",
                )
            path = folder + entry.name
            if entry.is_dir(follow_symlinks=False):
                reason = self._folder(path, entry.name, rules, depth)
                if reason is None:
                    yield from self.below(path + "/", rules, depth=depth + 1)
            elif (one := self._file(path, entry, rules)) is not None:
                yield one

    def linked(self, found: list[Travelling]) -> Iterator[Travelling]:
        """What travels of the links: those that lead to one of the files that were found.

        A link carries the bytes of its target, so that it must not bring in what would stay.
        """
        files = {file.file: file for file in found}
        for path in self._links:
            target = Path(os.path.realpath(self._root / path))
            if target in files:
                yield replace(files[target], path=path)
            else:
                self.left.append(Left(path=_shown(path), reason=self._why_no_link(target)))

    def _folder(self, path: str, name: str, rules: tuple[Rule, ...], depth: int) -> str | None:
        """Why a directory stays; None if one has to look into it."""
        place = self._root / path
        reason = folder_stays(name, place) if _is_text(name) else _ODD_NAME
        if reason is None and path == "runs":
            reason = _RUNS
        if reason is None:
            reason = self._said_or_cached(path, rules, is_folder=True)
        if reason is None and depth >= _DEEPEST:
            reason = "too deep"
        if reason is not None:
            self.left.append(Left(path=_shown(path) + "/", reason=reason))
        return reason

    def _file(
        self, path: str, entry: os.DirEntry[str], rules: tuple[Rule, ...]
    ) -> Travelling | None:
        """A file that travels; None if it stays, or is a link."""
        file = self._root / path
        reason = file_stays(entry.name) if _is_text(entry.name) else _ODD_NAME
        if reason is None:
            reason = self._said_or_cached(path, rules, is_folder=False)
        if reason is None and entry.is_symlink():
            self._links.append(path)
            return None
        if reason is None:
            status = file.lstat()
            if stat.S_ISREG(status.st_mode):
                return Travelling(
                    path=path,
                    file=file,
                    size_bytes=status.st_size,
                    executable=bool(status.st_mode & stat.S_IXUSR),
                )
            reason = "a socket, device or pipe"
        self.left.append(Left(path=_shown(path), reason=reason))
        return None

    def _said_or_cached(self, path: str, rules: tuple[Rule, ...], *, is_folder: bool) -> str | None:
        if os.path.realpath(self._root / path) in self._also:
            return _DATA
        rule = ignored_by(self._from_top + path, rules, is_folder=is_folder)
        return f"{_SAID}{rule.source}" if rule else None

    def _why_no_link(self, target: Path) -> str:
        """Why a link stays, by where it leads in the end: no file that travels."""
        if not target.is_relative_to(self._root):
            return "a link that leads outside"
        if not target.exists():
            return "a link that leads nowhere"
        return "a link to a directory" if target.is_dir() else "a link to what stays"


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes that are no UTF-8
        return False
    return True


def _shown(path: str) -> str:
    return path.encode(errors="replace").decode()
