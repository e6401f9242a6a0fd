"""What the user says shall stay: `.gitignore` and `.raycloudignore`, with git's rules."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from raycloud.errors import SpecError

IGNORE_FILES = (".gitignore", ".raycloudignore")  # in this order: the second may take back
LARGEST_BYTES = 1 << 20
_MOST_RULES = 10_000
_LONGEST_LINE = 4096  # of a path, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One line of an ignore file.

    Attributes:
        source: The file it stands in, as a path from the working directory.
        folder: The directory it holds below, as a path from the top with `/` at its end; empty
            for the top. The top is that of the repository, else the working directory.
        pattern: What it says of each name on the path from `folder`; None is `**`.
        only_folders: It ended in `/`.
        keeps: It began with `!`: what matches travels after all.
    """

    source: str
    folder: str
    pattern: tuple[re.Pattern[str] | None, ...]
    only_folders: bool
    keeps: bool


def rules_of(text: str, *, source: str, folder: str) -> tuple[Rule, ...]:
    r"""The rules in the text of an ignore file.

    Raises:
        SpecError: It is far too long for one; a part of it must not be passed over.

    >>> [rule.only_folders for rule in rules_of("*.bin\n/data/", source=".gitignore", folder="")]
    [False, True]
    """
    lines = text.split("\n", _MOST_RULES + 1)
    longest = max(map(len, lines[:_MOST_RULES]))
    if len(lines) > _MOST_RULES or longest > _LONGEST_LINE or len(text) >= LARGEST_BYTES:
        raise SpecError(
            "--working-dir",
            source,
            f"has more than {_MOST_RULES} lines, or one of more than {_LONGEST_LINE} letters",
            hint="leave out whole directories by one line each: what it says has to be kept to",
        )
    rules = []
    for written in lines:
        line = _without_trailing_spaces(written)
        if not line or line.startswith("#"):
            continue
        keeps = line.startswith("!")
        body = line[1:] if keeps else line
        only_folders = body.endswith("/")
        body = body.rstrip("/")
        if body:
            rules.append(
                Rule(
                    source=source,
                    folder=folder,
                    pattern=_translated(body),
                    only_folders=only_folders,
                    keeps=keeps,
                )
            )
    return tuple(rules)


def ignored_by(path: str, rules: Sequence[Rule], *, is_folder: bool) -> Rule | None:
    """The rule that leaves out a path; None if it travels. The last rule that matches decides.

    Args:
        path: From the top, with `/` between its parts. Nothing above it is left out.
        rules: Those of the top first, then those of the directories on the way.
        is_folder: Whether it is a directory.
    """
    for rule in reversed(rules):
        if rule.only_folders and not is_folder:
            continue
        inner = path.removeprefix(rule.folder).split("/")
        if path.startswith(rule.folder) and _matches(rule.pattern, inner):
            return None if rule.keeps else rule
    return None


def _without_trailing_spaces(line: str) -> str:
    line = line.rstrip("\r\n")
    stripped = line.rstrip(" ")
    return stripped + " " if stripped.endswith("\\") and stripped != line else stripped


@lru_cache(maxsize=4096)
def _translated(body: str) -> tuple[re.Pattern[str] | None, ...]:
    """A pattern, name by name.

    A slash at the start or in the middle ties it to its directory; without one it matches at any
    depth.
    """
    tied = "/" in body
    parts = [part for part in body.split("/") if part]
    names = [None if part == "**" else _name(part) for part in parts]
    return tuple(names if tied else [None, *names])


def _matches(pattern: Sequence[re.Pattern[str] | None], names: Sequence[str]) -> bool:
    """Whether a pattern matches a path. Takes time as its length, whatever the pattern says.

    Args:
        pattern: None is any number of names, at least one where it stands last.
        names: The parts of the path.
    """
    end = len(pattern)
    places = _with_skips({0}, pattern)  # what of the pattern may come next
    for name in names:
        after = set()
        for place in places:
            if place == end:
                continue
            part = pattern[place]
            if part is None:
                after |= {place, end} if place == end - 1 else {place}
            elif part.fullmatch(name):
                after.add(place + 1)
        places = _with_skips(after, pattern)
    return end in places


def _with_skips(places: set[int], pattern: Sequence[re.Pattern[str] | None]) -> set[int]:
    """With the places behind each `**` that is not the last, since that may stand for nothing."""
    for place in range(len(pattern) - 1):
        if place in places and pattern[place] is None:
            places.add(place + 1)
    return places


def _name(part: str) -> re.Pattern[str]:
    """A pattern of one name, in the words of `fnmatch`, whose stars cost no exponential time."""
    out: list[str] = []
    at = 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "[":
            text, at = _brackets(part, at)
            out.append(text)
        elif char == "\\" and at < len(part):
            out.append(_literal(part[at]))
            at += 1
        else:
            out.append(char)
    try:
        return re.compile(fnmatch.translate("".join(out)))
    except re.error:
        return re.compile(r"(?!)")


def _literal(char: str) -> str:
    return f"[{char}]" if char in "*?[" else char


def _brackets(part: str, at: int) -> tuple[str, int]:
    """A bracket expression that starts before `at`; a lone bracket is itself."""
    negated = at < len(part) and part[at] in "!^"
    start = at + negated
    end = part.find("]", start + 1)
    if end < 0:
        return _literal("["), at
    return f"[{'!' if negated else ''}{part[start:end]}]", end + 1


def combined(parts: Iterable[tuple[Rule, ...]]) -> tuple[Rule, ...]:
    """The rules of several files, in order."""
    return tuple(rule for part in parts for rule in part)
