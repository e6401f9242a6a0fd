"""What is right for a case: its `expected.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from raycloud import errors

CASES = Path(__file__).parent
NAMES = sorted(path.parent.name for path in CASES.glob("*/expected.yaml"))
_JOB, _MACHINE, _OWN = 2, 3, 4


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What comes of a case.

    Attributes:
        exit: The command's exit code.
        says: What the error and the notices have in them.
        steps: How many steps are committed; None: all, or as many as come to it.
        plain: How far a result may be from a plain loop's, as a part of each tensor's largest
            entry; None: there is no such loop.
        alone: The same, of one worker's alone.
        workers: How far one worker's result may be from two workers'.
    """

    exit: int
    says: tuple[str, ...] = ()
    steps: int | None = None
    plain: float | None = None
    alone: float | None = None
    workers: float | None = None


def expected(name: str) -> Expected:
    """Of the case in this folder."""
    values = yaml.safe_load((CASES / name / "expected.yaml").read_text())
    return Expected(**{**values, "says": tuple(values.get("says", ()))})


def exit_code(error: str) -> int:
    """Of a command that ends with this kind of error; empty: with none."""
    if not error:
        return 0
    kind = getattr(errors, error)
    if issubclass(kind, errors.JobError):
        return _JOB
    return _MACHINE if issubclass(kind, errors.MachineError) else _OWN
