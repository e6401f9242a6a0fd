"""What people ask of a run while it goes on: a small file in its directory, taken by its driver."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypedDict

from raycloud.bounded import json_value, read_whole
from raycloud.errors import MachineError, SpecError

_FORMAT = 1
_LARGEST_BYTES = 10_000
_NAME = "range.request"


class Range(TypedDict):
    """The elastic range that is asked for: fewest and most workers, 1 <= fewest <= most."""

    min_workers: int
    max_workers: int


def parse_range(text: str, most: int, why: str) -> Range:
    """A range as people write it: `4`, `2:6`.

    Args:
        text: What was written.
        most: More workers than this cannot be used.
        why: The reason, as a clause.

    Raises:
        SpecError: It is none, or too large.

    >>> parse_range("2:6", 8, "a step has 8 micro-batches")
    {'min_workers': 2, 'max_workers': 6}
    """
    fewest, _, highest = text.partition(":")
    hint = "write the number of workers, or the fewest and the most: 4 or 2:6"
    try:
        asked = Range(min_workers=int(fewest), max_workers=int(highest or fewest))
    except ValueError:
        raise SpecError("WORKERS", text, "is no range of workers", hint=hint) from None
    if not _is_range(asked):
        raise SpecError("WORKERS", text, "is no range of workers", hint=hint)
    if asked["max_workers"] > most:
        raise SpecError(
            "WORKERS",
            text,
            f"{why}, so more workers would have nothing to compute",
            hint=f"ask for at most {most}, or start a run that can use more",
        )
    return asked


def ask_range(directory: Path, asked: Range) -> None:
    """Leave the wish for another range; one that was not taken yet is replaced.

    Raises:
        MachineError: It cannot be written.
    """
    draft = directory / f"{_NAME}.{os.getpid()}.draft"
    try:
        draft.write_text(json.dumps({"format": _FORMAT, **asked}), encoding="utf-8")
        draft.replace(directory / _NAME)
    except OSError as error:
        raise MachineError(
            f"cannot leave a wish in {directory}: {error.strerror}",
            hint="ask as the user who started the run",
        ) from error


def take_range(directory: Path) -> Range | None:
    """The wish that was left, taken away; None: there is none.

    Raises:
        ValueError: What was left is no range; it is taken away, too.
    """
    path, taken = directory / _NAME, directory / f"{_NAME}.taken"
    if not path.exists():
        return None
    try:
        path.replace(taken)  # another wish may come at any moment
        try:
            found: Any = json_value(read_whole(taken, _LARGEST_BYTES))
        finally:
            taken.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be taken: {error.strerror}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"{path} is of another format")
    asked: Any = {name: found.get(name) for name in Range.__annotations__}
    if not all(type(count) is int for count in asked.values()) or not _is_range(asked):
        raise ValueError(f"{path} asks for no range of workers")
    return Range(min_workers=asked["min_workers"], max_workers=asked["max_workers"])


def _is_range(asked: Any) -> bool:
    return bool(1 <= asked["min_workers"] <= asked["max_workers"])
