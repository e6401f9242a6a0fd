"""Findings of the doctor: kinds with their remedies, and how people and scripts read them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING

from raycloud.redact import redact

if TYPE_CHECKING:
    from raycloud.doctor.facts import Facts

FORMAT = 1


class Level(Enum):
    """How bad it is, from good to bad; `value` is its rank."""

    WELL = 0
    NOTE = 1
    CHANGE = 2
    UNWELL = 3

    @property
    def word(self) -> str:
        """How it is written."""
        return self.name.lower()

    @property
    def exit_code(self) -> int:
        """What a command that finds it ends with: 0, 2 or 3."""
        return 0 if self is Level.NOTE else self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at, and the `value` found `where`: a machine, link or setting.

    `name` is the kind's, or the check's where all is well; then `what` and `remedy` are empty.
    """

    name: str
    level: Level
    where: str
    value: str
    what: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding, as a row of the page that explains it; its level is not `WELL`."""

    level: Level
    name: str
    what: str
    remedy: str

    def at(self, where: str, value: str) -> Finding:
        """A finding of this kind."""
        return Finding(where=where, value=value, **asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A question; `look` answers it with findings of its `kinds`, and `well` ones."""

    name: str
    asks: str
    kinds: tuple[Kind, ...]
    look: Callable[[Facts], Iterator[Finding]]


def well(name: str, where: str, value: str) -> Finding:
    """What was looked at and is as it should be."""
    return Finding(name=name, level=Level.WELL, where=where, value=value)


def exit_code(findings: Iterable[Finding]) -> int:
    """What the command ends with: the code of the worst finding."""
    return max((finding.level.exit_code for finding in findings), default=0)


def as_text(facts: Facts, findings: Sequence[Finding], paint: Callable[[Level, str], str]) -> str:
    """What was found, the worst first, each with its remedy; then what is well; then a count.

    `paint` colours a level's word, or leaves it as it is.
    """
    alike = dict[str, list[Finding]]()
    fine = list[str]()
    for finding in findings:
        if finding.level is Level.WELL:
            fine.append(f"{paint(finding.level, 'well')}  {finding.name}  {_place(finding)}")
        else:
            alike.setdefault(finding.name, []).append(finding)
    blocks = []
    for group in alike.values():
        first = group[0]
        lines = [f"{paint(first.level, first.level.word)}  {first.name}: {first.what}"]
        lines += [f"        {_place(finding)}" for finding in group]
        blocks.append("\n".join([*lines, f"        remedy: {first.remedy}"]))
    counts = Counter(finding.level for finding in findings)
    told = [f"{counts[level]} {level.word}" for level in reversed(Level) if level in counts]
    looked = "this machine"
    if facts.cluster:
        nodes = len(facts.cluster.nodes)
        looked += f" and the cluster at {facts.cluster.address} ({nodes} node(s))"
    end = f"{looked}: {', '.join(told) or 'nothing found'}"
    return "\n\n".join(part for part in ("\n\n".join(blocks), "\n".join(fine), end) if part)


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """The same for scripts: a JSON object with a format number, without secrets."""
    record = {
        "format": FORMAT,
        "exit_code": exit_code(findings),
        "address": facts.cluster.address if facts.cluster else None,
        "findings": [asdict(finding) | {"level": finding.level.word} for finding in findings],
    }
    return json.dumps(redact(record), indent=2, allow_nan=False)


def _place(finding: Finding) -> str:
    """Where and what, on one line and without control characters: a terminal would obey them."""
    text = f"{finding.where}: {finding.value}"
    return "".join(char if char.isprintable() else "?" for char in text)
