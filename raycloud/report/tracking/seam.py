"""What the seam between a run and a tracker carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LONGEST = 500  # letters of a parameter, the least that any tracker takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Measures after `step` steps, at unix second `t`; all of them finite."""

    t: float
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a tracker is told of a run when it is first told anything.

    Attributes:
        run: The name of the run directory.
        job: The job's name.
        asked: The job as it is kept, without secrets: dotted field to value, as text.
        version: Of raycloud.
        known: What the tracker called this run earlier; empty for a new one.
    """

    run: str
    job: str
    asked: Mapping[str, str]
    version: str
    known: str = ""


class Tracker(Protocol):
    """Someone who is told. All calls come from one thread, one after another; each may raise.

    A call that raised is made again with the same numbers, and more: told twice, they must count
    once.
    """

    def begin(self, about: About) -> str:
        """The run begins or goes on; returns the name that the tracker knows it by."""
        ...

    def add(self, numbers: Sequence[Numbers]) -> None:
        """Take in numbers, in order; all of them, or raise."""
        ...

    def end(self, status: str) -> None:
        """The run is over: `finished`, `stopped` or `failed`. Nothing comes after."""
        ...


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as dotted names with texts.

    >>> flat({"steps": 3, "data": {"path": None, "shuffle": True}})
    {'steps': '3', 'data.path': 'null', 'data.shuffle': 'true'}
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            words = {None: "null", True: "true", False: "false"}
            plain = value is None or isinstance(value, bool)
            text = words[value] if plain else str(value)
            found[prefix + str(name)] = text[:LONGEST]
    return found
