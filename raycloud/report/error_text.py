"""What a person reads of an error on the command line, and the exit code. Prints nothing.

An error fits one screen: the cause, then a hint. A traceback that a member sent along is cut to the
place in the user's code; `--debug` shows all of it.
"""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path

import typer

from raycloud.errors import InternalError, JobError, MachineError, RaycloudError
from raycloud.redact import redact_text
from raycloud.report.figures import printable

JOB, MACHINE, OURS, STOPPED = 2, 3, 4, 130

MOST_LINES = 18  # of the cause; with the hint they fit a terminal of 24
_WIDEST = 600  # letters of one of them

_TRACE = "Traceback (most recent call last):\n"
_FRAME = re.compile(
    r'^ *File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)(?:\n {4}(?P<code>.*))?', re.M
)
_NOT_THEIRS = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python",
    "<frozen ",
    str(Path(__file__).parents[1]),
)

_FAULT = "this is a fault in raycloud: please report it, with the traceback that --debug shows"
_WHO_ASKED = "--debug shows what asked for it"
_LOOK = f"look at its permissions and at the free space there; {_WHO_ASKED}"


def error_text(
    error: BaseException, *, debug: bool, plain: bool, interrupted: str = ""
) -> tuple[str, int]:
    """The error in one sentence, its remedy below, and the exit code that says whose fault it is.

    Args:
        error: What was raised, and is being handled.
        debug: Whether the traceback stands above.
        plain: Without colour.
        interrupted: The hint after Ctrl-C.
    """
    message, hint, code = _parts(error, interrupted)
    lines = [printable(traceback.format_exc())] if debug else []
    cause = message if debug else brief(message)
    lines.append(f"{_word('error', 'red', plain=plain)}: {printable(cause)}")
    if hint:
        lines.append(f"\n{_word('hint', 'cyan', plain=plain)}: {printable(hint)}")
    return redact_text("\n".join(lines)), code


def brief(message: str) -> str:
    """A message that fits one screen: without a member's traceback, and not too long."""
    head, trace, frames = message.partition(_TRACE)
    if trace:
        message = head.rstrip()
        if not message or message.endswith(
            ":"
        ):  # of an error that is ours: nothing but a traceback
            message = f"{message} {_raised(frames)}".strip()
        if (place := _place(frames)) is not None:
            message += f"\n  at {place}"
    lines = [
        line if len(line) <= _WIDEST else f"{line[:_WIDEST]} …" for line in message.split("\n")
    ]
    if len(lines) > MOST_LINES:
        more = len(lines) - MOST_LINES + 1
        lines = [*lines[: MOST_LINES - 1], f"… and {more} more lines: --debug shows them"]
    return "\n".join(lines)


def _raised(frames: str) -> str:
    """What a traceback ends with: the last error, in one line."""
    return next((line for line in reversed(frames.splitlines()) if line[:1].strip()), "")


def _place(frames: str) -> str | None:
    """The last line of the user's own code in a traceback, else the last of all."""
    found = list(_FRAME.finditer(frames))
    theirs = [f for f in found if not any(part in f["file"] for part in _NOT_THEIRS)]
    if not found:
        return None
    last = (theirs or found)[-1]
    code = f": {last['code']}" if last["code"] else ""
    return f"{last['file']}:{last['line']} in {last['name']}{code}"


def _parts(error: BaseException, interrupted: str) -> tuple[str, str, int]:
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
            return "stopped at once", interrupted, STOPPED
        case OSError():
            return _system_said(error), _LOOK if error.filename else _WHO_ASKED, MACHINE
        case _:
            return f"unexpected {type(error).__name__}: {error}", _FAULT, OURS


def _system_said(error: OSError) -> str:
    """What the operating system refused, and of which file, where it says so."""
    what = error.strerror or str(error) or type(error).__name__
    name = error.filename
    if name is None:
        return f"the system refused: {what}"
    return f"the system refused {os.fsdecode(name) if isinstance(name, bytes) else name}: {what}"


def _word(word: str, colour: str, *, plain: bool) -> str:
    return word if plain else typer.style(word, fg=colour, bold=True)
