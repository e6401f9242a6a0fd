"""From a member's report of what went wrong to the error that the caller gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud import errors
from raycloud.events import MemberFailed, MemberLost

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.commands import Finish


def error_of(failure: MemberFailed, where: str = "") -> errors.RaycloudError:
    """The error that a member sent by name, as its own kind; `where` is put before its message."""
    kind = getattr(errors, failure.error, errors.InternalError)
    if kind is errors.SpecError:  # it has no field of the job file to name here
        kind = errors.JobError
    made: errors.RaycloudError = kind(where + failure.message, hint=failure.hint)
    return made


def failure_of(
    failure: MemberFailed | MemberLost | None, finish: Finish, directory: Path
) -> errors.RaycloudError:
    """Why a run failed: the first member's failure, or else what control says.

    Args:
        failure: The first report of a failure, if a member sent one.
        finish: Control's word.
        directory: Where the run is kept.
    """
    if isinstance(failure, MemberFailed):
        error = error_of(failure, f"member {failure.member}: ")
        error.hint = error.hint or f"the run is kept in {directory}"
        return error
    message, _, hint = (finish.error or "the run failed").partition("\n\nhint: ")
    hint = f"{hint} (run directory {directory})" if hint else f"see the log in {directory}"
    lost = isinstance(failure, MemberLost)
    kind = errors.MemberLostError if lost else getattr(errors, finish.blames)
    made: errors.RaycloudError = kind(message, hint=hint)
    return made
