"""What the doctor says: kinds of findings with their remedies, and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.doctor.facts import Facts


class Level(Enum):
    """How bad it is, from good to bad; the value is the exit code that it leads to."""

    WELL = ("well", 0)
    NOTE = ("note", 0)
    CHANGE = ("change", 2)
    UNWELL = ("unwell", 3)

    @property
    def word(self) -> str:
        """How it is written."""
        return self.value[0]

    @property
    def exit_code(self) -> int:
        """What a command that finds it ends with."""
        return self.value[1]

    @property
    def rank(self) -> int:
        """Its place, from good to bad."""
        return list(Level).index(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: The kind's name, or the check's where all is well.
        level: How bad it is.
        where: The machine, link or setting.
        what: What is the matter, in one sentence; empty where all is well.
        value: What was found.
        remedy: What would do; empty where all is well.
    """

    name: str
    level: Level
    where: str
    value: str
    what: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of finding: the row of a table, and of the page that explains it.

    Attributes:
        name: Its name, for scripts.
        level: How bad it is; not `WELL`.
        what: What is the matter, in one sentence.
        remedy: What would do.
    """

    name: str
    level: Level
    what: str
    remedy: str

    def at(self, where: str, value: str) -> Finding:
        """A finding of this kind."""
        return Finding(
            name=self.name,
            level=self.level,
            where=where,
            value=value,
            what=self.what,
            remedy=self.remedy,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One row of the table of checks.

    Attributes:
        name: Its name; what it finds well is told under it.
        asks: The question it answers.
        kinds: What it can find.
        look: Judges facts. Yields findings of its kinds, and `well` ones.
    """

    name: str
    asks: str
    kinds: tuple[Kind, ...]
    look: Callable[[Facts], Iterator[Finding]]


def well(name: str, where: str, value: str) -> Finding:
    """What was looked at and is as it should be."""
    return Finding(name=name, level=Level.WELL, where=where, value=value)


def exit_code(findings: Iterable[Finding]) -> int:
    """What the command ends with: the code of the worst finding.

    >>> exit_code([])
    0
    """
    return max((finding.level.exit_code for finding in findings), default=0)
