"""What a person reads of an error on the command line, and the exit code. Prints nothing."""

from __future__ import annotations

import traceback

import typer

from raycloud.errors import InternalError, JobError, MachineError, RaycloudError
from raycloud.report.figures import printable

JOB, MACHINE, OURS, STOPPED = 2, 3, 4, 130

_FAULT = "this is a fault in raycloud: please report it, with the traceback that --debug shows"


def told(error: BaseException, *, debug: bool, plain: bool) -> tuple[str, int]:
    """The error in one sentence, its remedy below, and the exit code that says whose fault it is.

    Args:
        error: What was raised, and is being handled.
        debug: Whether the traceback stands above.
        plain: Without colour.
    """
    message, hint, code = _parts(error)
    lines = [printable(traceback.format_exc())] if debug else []
    lines.append(f"{_word('error', 'red', plain=plain)}: {printable(message)}")
    if hint:
        lines.append(f"\n{_word('hint', 'cyan', plain=plain)}: {printable(hint)}")
    return "\n".join(lines), code


def _parts(error: BaseException) -> tuple[str, str, int]:
    match error:
        case JobError():
            return error.message, error.hint, JOB
        case MachineError():
            return error.message, error.hint, MACHINE
        case InternalError():
            return error.message, error.hint or _FAULT, OURS
        case RaycloudError():
            return error.message, error.hint, OURS
        case KeyboardInterrupt():
            return "stopped at once", "`--resume` goes on from the last checkpoint", STOPPED
        case _:
            return f"unexpected {type(error).__name__}: {error}", _FAULT, OURS


def _word(word: str, colour: str, *, plain: bool) -> str:
    return word if plain else typer.style(word, fg=colour, bold=True)
