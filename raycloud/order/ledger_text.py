"""The text of a run's `ledger` file: JSON lines, appended to and never rewritten.

    {"format": 3, "kind": "ledger", "samples": 60000}
    {"commit": {"first_step": 0, "last_step": 120, "epoch": 0, "start": 0, "stop": 3840, ...}}
    {"grow": {"epoch": 3, "samples": 61000}}
    {"skip": {"step": 100, "epoch": 0, "start": 3208, "stop": 3216, "why": "error"}}
    {"restore": {"next_step": 100, ...}}

A header opens the file, and again each later start of the run: from there on nothing is committed
until a `restore` record says what the checkpoint held. So replaying the file from the top gives
what counts now, and nothing that was ever written is lost. There is one commit record per report,
not per step: the file grows with time, not with speed. A `grow` record says from which epoch on
there are more samples; it stands before the first commit of that epoch. A `skip` record, after the
commit of its step, names samples that the step took and that did not count in it. Format 1 had no
`grow`, formats 1 and 2 no `skip`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from raycloud.bounded import json_value
from raycloud.errors import InternalError, RunDirectoryError
from raycloud.order.commits import Commit, Skip, skip_of
from raycloud.order.ledger import Ledger

if TYPE_CHECKING:
    from raycloud.order.auditing import Trail

FORMAT = 3
_DEFAULTS = {"epochs": 1, "left_out": 0}
_FIELDS = frozenset(f.name for f in fields(Commit))


def header_record(samples: int) -> dict[str, Any]:
    """The record that opens a ledger of `samples` samples per epoch."""
    return {"format": FORMAT, "kind": "ledger", "samples": samples}


def commit_record(commit: Commit) -> dict[str, Any]:
    """The record of one committed range."""
    values = {k: v for k, v in asdict(commit).items() if _DEFAULTS.get(k) != v}
    return {"commit": values}


def growth_record(epoch: int, samples: int) -> dict[str, Any]:
    """The record that from `epoch` on an epoch has `samples` samples."""
    return {"grow": {"epoch": epoch, "samples": samples}}


def skip_record(skip: Skip) -> dict[str, Any]:
    """The record that a committed step took samples which did not count."""
    return {"skip": skip.to_record()}


def restore_record(state: Mapping[str, Any]) -> dict[str, Any]:
    """The record that sets the ledger to `state` (see `Ledger.state`)."""
    return {"restore": dict(state)}


def ledger_line(record: Mapping[str, Any]) -> str:
    r"""One record as it stands in the file, with its line end.

    >>> ledger_line(header_record(10))
    '{"format":3,"kind":"ledger","samples":10}\n'
    """
    return json.dumps(record, separators=(",", ":")) + "\n"


def read_ledger(lines: Iterable[str], trail: Trail | None = None) -> Ledger:
    """Replay a ledger file.

    A last line that a killed writer left unfinished is not counted; it is kept in `Ledger.torn`.
    Ranges committed twice do not stop the replay: `Ledger.audit` names those of the last start.

    Args:
        lines: The lines of the file, with or without line ends.
        trail: Is told of every record. Reading ends where it is full.

    Raises:
        RunDirectoryError: The file is no ledger, is damaged, or was written by a newer version.
    """
    ledger: Ledger | None = None
    broken: tuple[int, str] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if broken:
            raise _damaged(broken[0], f"it is no JSON object, and more follows: {broken[1][:60]!r}")
        try:
            record = json_value(line)
        except ValueError:
            broken = (number, line)
            continue
        ledger = _replay(ledger, record, number, trail)
        if trail is not None and trail.full:
            break
    if ledger is None:
        raise RunDirectoryError(
            "the ledger has no header line, so nothing can be said about its run",
            hint="start the run again, or resume it from its last checkpoint",
        )
    ledger.torn = broken[1] if broken else ""
    return ledger


def _replay(
    ledger: Ledger | None, record: object, number: int, trail: Trail | None = None
) -> Ledger:
    try:
        match record:
            case {"kind": "ledger", "format": int(version), "samples": int(samples)}:
                if version > FORMAT:
                    raise RunDirectoryError(
                        f"line {number} of the ledger has format {version}, this version reads "
                        f"up to {FORMAT}",
                        hint="read it with the raycloud that wrote it, or a newer one",
                    )
                if trail is not None:
                    trail.start()
                return Ledger(samples=samples)
            case {"commit": dict(values)} if ledger is not None:
                commit = _commit(values)
                if trail is None:
                    ledger.replay(commit)
                else:
                    trail.replay(ledger, commit, number)
                return ledger
            case {"grow": {"epoch": int(epoch), "samples": int(samples)}} if ledger is not None:
                ledger.grow(epoch, samples)
                return ledger
            case {"skip": dict(values)} if ledger is not None:
                _skip(ledger, skip_of(values))
                return ledger
            case {"restore": dict(state)} if ledger is not None:
                ledger.restore(state)
                if trail is not None:
                    trail.restore(ledger)
                return ledger
            case _:
                raise _damaged(number, "not a record of a ledger, or one before its header")
    except (InternalError, KeyError, TypeError, ValueError) as error:
        raise _damaged(number, str(error)) from error


def _skip(ledger: Ledger, skip: Skip) -> None:
    if skip.stop > ledger.samples_in(skip.epoch):
        raise InternalError(f"not samples of the epoch: {skip}")
    with suppress(InternalError):  # what no record has is missing, and named as that
        ledger.skip(skip)


def _commit(values: dict[str, Any]) -> Commit:
    if not all(type(v) is int for v in values.values()):
        raise ValueError("a commit record holds whole numbers only")
    if unknown := sorted(values.keys() - _FIELDS):
        raise ValueError(f"a commit record has no field {unknown[0]!r}")
    return Commit(**values)


def _damaged(number: int, problem: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"line {number} of the ledger is damaged: {problem}",
        hint="restore the file from a copy; a run can still be resumed from its last checkpoint",
    )
