"""Names in a store, names of a checkpoint's files, and how a store words its errors."""

from __future__ import annotations

import errno
import re
import secrets

from raycloud.errors import CheckpointError

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_DRAFT = ".draft"
_LONGEST = 1000

MISSING_HINT = (
    "it was removed, or its writer sees another file system than this process: `checkpoint.path` "
    "has to be one that all nodes share"
)
_ROOM = "free space there, lower `checkpoint.keep`, or set `checkpoint.path` to a larger place"
_RIGHTS = "give this user the right to read and write there, or set `checkpoint.path`"
_IN_THE_WAY = "a file lies where a directory should be: move it, or set `checkpoint.path`"
_HINTS = {
    errno.ENOSPC: f"the disk is full: {_ROOM}",
    errno.EDQUOT: f"the quota is used up: {_ROOM}",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "that file system is read-only: set `checkpoint.path` to one that is not",
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EEXIST: _IN_THE_WAY,
    errno.EISDIR: "a directory lies where a file should be: move it, or set `checkpoint.path`",
}


class StoreError(CheckpointError):
    """The store is full, forbidden, not reached or does not answer: it may do so later."""


class DamagedError(CheckpointError):
    """A file is missing, truncated or altered: going back to an older checkpoint is right."""


def check_name(name: str) -> None:
    """Accept a plain relative name such as `step-00000200/manifest.json`.

    Segments are letters, digits, `.`, `_` and `-`, starting with a letter or digit: so neither
    absolute, nor `..`, nor hidden, and free of what a shell, URL or glob would interpret.

    Raises:
        CheckpointError: Anything else.
    """
    if len(name) > _LONGEST or not all(_SEGMENT.fullmatch(part) for part in name.split("/")):
        raise CheckpointError(
            f"{name[:200]!r} is not a name a checkpoint may use",
            hint="names are relative, of letters, digits, `.`, `_` and `-`, without `..`",
        )


def check_final_name(name: str) -> None:
    """Accept what `check_name` accepts, except the name of a draft."""
    check_name(name)
    if is_draft(name):
        raise CheckpointError(
            f"{name!r} is the name of a draft", hint=f"choose one that does not end in {_DRAFT}"
        )


def draft_name(name: str) -> str:
    """A fresh name, in the same directory, to write `name` under until it is complete."""
    return f"{name}.{secrets.token_hex(8)}{_DRAFT}"


def is_draft(name: str) -> bool:
    """Whether `name` is that of an unfinished file."""
    return name.endswith(_DRAFT)


def directory(step: int) -> str:
    """The directory of a step's checkpoint.

    >>> directory(200)
    'step-00000200'
    """
    return f"step-{step:08d}"


def manifest_name(step: int) -> str:
    """The name of a step's manifest."""
    return f"{directory(step)}/manifest.json"


def part_name(step: int, rank: int, parts: int) -> str:
    """The name of one part.

    >>> part_name(200, 0, 2)
    'step-00000200/part-0-of-2.safetensors'
    """
    return f"{directory(step)}/part-{rank}-of-{parts}.safetensors"


def published_step(name: str) -> int | None:
    """The step whose manifest `name` is; None for anything else."""
    return step_of(name) if name.endswith("/manifest.json") else None


def step_of(name: str) -> int | None:
    """The step whose directory `name` lies in; None for anything else."""
    found = re.fullmatch(r"step-([0-9]{8,18})/[^/]+", name)
    if found is None:
        return None
    step = int(found[1])
    return step if name.startswith(f"{directory(step)}/") else None


def blamed(action: str, place: str, error: Exception) -> CheckpointError:
    """What a store raises when `action` (read, write, ...) on `place` failed with `error`."""
    if isinstance(error, FileNotFoundError) and action != "write":
        return DamagedError(f"{place} is missing", hint=MISSING_HINT)
    number = error.errno if isinstance(error, OSError) else None
    return StoreError(
        f"cannot {action} {place}: {type(error).__name__}: {error}",
        hint=_HINTS.get(number or 0, "see that the place can be reached, or set `checkpoint.path`"),
    )


def damaged(where: str, problem: str) -> DamagedError:
    """The error for a file, or the key path in one, that is not as it was written."""
    hint = "use an older checkpoint: this one was altered or not written to the end"
    return DamagedError(f"{where} {problem}", hint=hint)
