"""The ignore files of a repository, read as git reads them: from its top, and its own."""

from __future__ import annotations

import os.path
from collections.abc import Collection, Iterator
from pathlib import Path

from raycloud.packing.ignoring import IGNORE_FILES, LARGEST_BYTES, Rule, combined, rules_of

_LONGEST_PATH = 4096
_GIT = ".git"


def top_of(root: Path) -> Path:
    """The top of the repository that a resolved directory lies in; itself where it is in none."""
    for folder in (root, *root.parents):
        if (folder / _GIT).exists():
            return folder
    return root


def rules_above(root: Path, top: Path) -> tuple[Rule, ...]:
    """What the repository says above its working directory, from the weakest rule to the strongest.

    Raises:
        SpecError: One of its ignore files is far too long.
        OSError: One cannot be read.
    """
    exclude = _own(top / _GIT) / "info" / "exclude"
    own = [_rules(exclude, root, top, top)] if exclude.is_file() else []
    folders = [folder for folder in reversed(root.parents) if folder.is_relative_to(top)]
    return combined([*own, *(rules for folder in folders for rules in rules_in(folder, root, top))])


def rules_in(
    folder: Path, root: Path, top: Path, names: Collection[str] = IGNORE_FILES
) -> Iterator[tuple[Rule, ...]]:
    """What the ignore files of one directory say; those that are links are not read.

    Args:
        folder: The directory.
        root: Where paths in `Rule.source` start.
        top: Where paths in `Rule.folder` start.
        names: What may be in it.

    Raises:
        SpecError: One is far too long.
        OSError: One cannot be read.
    """
    for name in IGNORE_FILES:
        file = folder / name
        if name in names and file.is_file() and not file.is_symlink():
            yield _rules(file, root, top, folder)


def _rules(file: Path, root: Path, top: Path, folder: Path) -> tuple[Rule, ...]:
    with file.open("rb") as opened:
        text = opened.read(LARGEST_BYTES).decode("utf-8", errors="replace")
    below = "" if folder == top else f"{folder.relative_to(top).as_posix()}/"
    return rules_of(text, source=os.path.relpath(file, root), folder=below)


def _own(git: Path) -> Path:
    """Where a repository keeps what is its own: `.git`, or what the file `.git` leads to."""
    if (leads := _path_in(git, "gitdir:")) is not None:
        git = git.parent / leads  # of a submodule, or one of several working trees
    if (leads := _path_in(git / "commondir")) is not None:
        git = git / leads
    return git


def _path_in(file: Path, head: str = "") -> str | None:
    """The path in a file that holds one; None if it is no such file."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        text = os.fsdecode(opened.read(_LONGEST_PATH)).partition("\n")[0]
    return text.removeprefix(head).strip() if text.startswith(head) and "\0" not in text else None
