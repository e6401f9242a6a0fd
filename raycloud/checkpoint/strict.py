"""Reading JSON values that may be damaged or hostile: each has one type, or is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raycloud.checkpoint.naming import DamagedError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_HINT = "the checkpoint was altered or is not one of raycloud's: use an older one"

# More than any counter or size can reach, and exact wherever JSON numbers are doubles.
LARGEST = 2**53


def refuse(where: str, problem: str) -> DamagedError:
    """The error for the value at key path `where`."""
    return DamagedError(f"{where} {problem}", hint=_HINT)


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refuse(where, f"is a {type(value).__name__}, not an object")
    return value


def record(value: object, keys: tuple[str, ...], where: str) -> Mapping[str, Any]:
    """A JSON object with exactly these keys."""
    fields = mapping(value, where)
    missing = sorted(set(keys) - set(fields))
    unknown = sorted(set(fields) - set(keys))
    if missing:
        raise refuse(where, f"lacks {', '.join(missing)}")
    if unknown:
        raise refuse(where, f"has unknown keys: {', '.join(unknown)[:200]}")
    return fields


def sequence(value: object, where: str) -> list[Any]:
    """A JSON array (or a tuple, for records that have not been written yet)."""
    if not isinstance(value, (list, tuple)):
        raise refuse(where, f"is a {type(value).__name__}, not an array")
    return list(value)


def integer(value: object, where: str, *, least: int = 0, most: int = LARGEST) -> int:
    """An integer from `least` to `most`; a bool is not one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise refuse(where, f"is a {type(value).__name__}, not an integer")
    if not least <= value <= most:
        raise refuse(where, f"is not from {least} to {most}")
    return value


def text(value: object, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise refuse(where, f"is a {type(value).__name__}, not a string")
    return value


def sha256(value: object, where: str) -> str:
    """64 lower-case hexadecimal digits."""
    if _SHA256.fullmatch(text(value, where)) is None:
        raise refuse(where, "is not a SHA-256 digest")
    return text(value, where)
