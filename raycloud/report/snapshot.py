"""Snapshots: the state of a run kept beside its log, so that a long log is not read from its start.

A snapshot holds what the first `size` bytes of the log come to, and a digest of the last of them.
It is a copy: one that is damaged, of another format or of another log is passed over, and the whole
log is read.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from raycloud.bounded import json_value, open_regular, read_whole
from raycloud.report.log import Tail
from raycloud.report.state import RunState

FORMAT = 6  # raised whenever `RunState` comes to something else, or is kept otherwise
EVERY = 10_000  # entries of the log; to read as many takes about a second

_DIGESTED_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run, and of which part of its log that is.

    Attributes:
        format: See `FORMAT`.
        size: Bytes of the log, which are so many whole `lines`.
        digest: Of the last of these bytes.
        fold: The state they come to.
    """

    format: int
    size: int
    lines: int
    digest: str
    fold: RunState


@cache
def _adapter() -> TypeAdapter[list[Snapshot]]:
    # In a list, since a type adapter of a dataclass takes no configuration.
    return TypeAdapter(list[Snapshot], config=ConfigDict(ser_json_inf_nan="constants"))


def path_of(log: Path) -> Path:
    """Where the snapshot of a log is kept."""
    return log.with_suffix(".snapshot.json")


def keep(log: Path, state: RunState, *, size: int, lines: int) -> None:
    """Write the snapshot of a log: what its first `size` bytes, which are `lines`, come to.

    Raises:
        OSError: It cannot be written.
    """
    with open_regular(log) as file:
        digest = _digest(file, size)
    if digest is None:
        return  # someone else has written to the log
    kept = Snapshot(format=FORMAT, size=size, lines=lines, digest=digest, fold=state)
    path = path_of(log)
    draft = path.with_suffix(".draft")
    draft.write_bytes(_adapter().dump_json([kept]))
    draft.replace(path)


def state_of(log: Path) -> RunState:
    """The state that a log comes to.

    Raises:
        RunDirectoryError: As `Tail.rest`.
    """
    return continued(log)[0]


def continued(log: Path) -> tuple[RunState, Tail, int]:
    """The same, the tail of the log behind it, and how many lines its snapshot has not seen.

    Raises:
        RunDirectoryError: As `Tail.rest`.
    """
    kept = snapshot_of(log)
    state, size, lines = (RunState(), 0, 0) if kept is None else (kept.fold, kept.size, kept.lines)
    tail = Tail(log, at=size, lines=lines)
    for entry in tail.rest():
        state.apply(*entry)
    return state, tail, tail.lines - lines


def snapshot_of(log: Path) -> Snapshot | None:
    """The snapshot of a log; None where there is none that is of use."""
    try:
        found = json_value(read_whole(path_of(log)), constants=True)
        kept = _adapter().validate_python(found)[0]
        with open_regular(log) as file:
            digest = _digest(file, kept.size)
    except (OSError, ValueError, IndexError, ValidationError, RecursionError):
        return None
    return kept if kept.format == FORMAT and digest == kept.digest else None


def _digest(file: IO[Any], size: int) -> str | None:
    """Of the bytes before `size`; None where there are fewer, or they end within a line."""
    if size < 0 or os.fstat(file.fileno()).st_size < size:
        return None
    file.seek(max(0, size - _DIGESTED_BYTES))
    read = file.read(min(size, _DIGESTED_BYTES))
    return None if read[-1:] not in {b"", b"\n"} else hashlib.sha256(read).hexdigest()
