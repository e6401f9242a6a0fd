"""Checks of what is installed: versions that raycloud can work with, the same on every node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from raycloud.doctor.finding import Check, Finding, Kind, Level, well

if TYPE_CHECKING:
    from raycloud.doctor.facts import Facts

MISSING = Kind(
    name="library-missing",
    level=Level.CHANGE,
    what="A library that raycloud needs is not installed there.",
    remedy="Install the same raycloud there, in the Python that Ray runs with: `pip install` it, "
    "and what it needs comes along.",
)
UNSUITED = Kind(
    name="version-unsuited",
    level=Level.CHANGE,
    what="The installed version is not one that raycloud was built and tested for.",
    remedy="Install a version in the range that is named: `pip install 'NAME RANGE'`.",
)
DIFFERS = Kind(
    name="version-differs",
    level=Level.CHANGE,
    what="A node has another version than this machine; results or messages may not agree.",
    remedy="Install the same versions on every node: one image, or one file of constraints.",
)

_PARTS = 2  # of Python's version that must be the same: 3.11


def satisfies(version: str, asked: str) -> bool:
    """Whether a version lies in a range; what follows its numbers is left out.

    >>> satisfies("2.60.1", ">=2.60,<2.61"), satisfies("2.61.0rc1", ">=2.60,<2.61")
    (True, False)
    >>> satisfies("2.13.0+cpu", "==2.13.0"), satisfies("3.10", ">=3.11"), satisfies("1", "")
    (True, False, True)
    """
    have = _numbers(version)
    for clause in filter(None, asked.split(",")):
        found = re.fullmatch(r"(>=|<=|==|!=|<|>|~=)([\d.]+)(?:\.\*)?", clause)
        if not found:
            continue
        wanted = _numbers(found.group(2))
        size = max(len(have), len(wanted))
        left, right = (n + (0,) * (size - len(n)) for n in (have, wanted))
        if not {
            ">=": left >= right,
            "<=": left <= right,
            "==": left == right,
            "!=": left != right,
            "<": left < right,
            ">": left > right,
            "~=": left >= right and left[: len(wanted) - 1] == wanted[:-1],
        }[found.group(1)]:
            return False
    return True


def _look(facts: Facts) -> Iterator[Finding]:
    yield from _here(facts)
    for node in facts.cluster.nodes if facts.cluster else ():
        yield from _there(node.name, node.versions, facts.machine.versions)


def _here(facts: Facts) -> Iterator[Finding]:
    where, fine = facts.machine.name, list[str]()
    for name, version in facts.machine.versions.items():
        asked = facts.required.get(name, "")
        if version is None:
            yield MISSING.at(where, name)
        elif not satisfies(version, asked):
            yield UNSUITED.at(where, f"{name} {version}; asked for: {asked}")
        else:
            fine.append(f"{name} {version}")
    if fine:
        yield well("versions", where, ", ".join(fine))


def _there(
    where: str, found: Mapping[str, str | None], here: Mapping[str, str | None]
) -> Iterator[Finding]:
    alike = list[str]()
    for name, version in found.items():
        own = here.get(name)
        if version is None:
            yield MISSING.at(where, name)
        elif own is not None and not _same(name, version, own):
            yield DIFFERS.at(where, f"{name} {version}; on this machine: {own}")
        else:
            alike.append(f"{name} {version}")
    if alike:
        yield well("versions", where, ", ".join(alike))


def _same(name: str, one: str, other: str) -> bool:
    """Whether versions agree; of Python the first two numbers, of the rest all before a `+`.

    What follows a `+` is the build: a node with GPUs has another one of torch.
    """
    if name == "python":
        return _numbers(one)[:_PARTS] == _numbers(other)[:_PARTS]
    return one.partition("+")[0] == other.partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


CHECKS = (
    Check(
        name="versions",
        asks="Do raycloud, Ray, torch and Python fit each other, and are they the same on all "
        "nodes?",
        kinds=(MISSING, UNSUITED, DIFFERS),
        look=_look,
    ),
)
