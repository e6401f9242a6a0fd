"""What every command shares: the app, its options, how errors are shown, and what is plain."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from raycloud.cli.completion import complete_field, complete_job, complete_run
from raycloud.errors import InternalError, JobError, MachineError, RaycloudError

if TYPE_CHECKING:
    from raycloud.report.summary import Summary
    from raycloud.spec.job import Job

EXIT_CODES = (
    "Exit codes: 0 done; 2 what was asked cannot be done (job, task, data or "
    "arguments); 3 a machine, link or disk failed; 4 raycloud's own fault; 130 stopped by Ctrl-C "
    "or SIGTERM."
)

JOB, MACHINE, OURS, STOPPED = 2, 3, 4, 130

_FAULT = "this is a fault in raycloud: please report it, with the traceback that --debug shows"
_WHO_ASKED = "--debug shows what asked for it"
_LOOK = f"look at its permissions and at the free space there; {_WHO_ASKED}"

app = typer.Typer(
    name="raycloud",
    help="Train PyTorch models on whatever machines are there.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a field, e.g. elastic.max_workers=4.",
        autocompletion=complete_field,
    ),
]
JobFileArgument = Annotated[
    Path, typer.Argument(metavar="JOB", help="The job file.", autocompletion=complete_job)
]
RunDirectoryArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The directory of a run.", autocompletion=complete_run)
]
AddressOption = Annotated[
    str | None,
    typer.Option(envvar="RAY_ADDRESS", help="A running Ray cluster; without one, Ray starts here."),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="Plain lines, no colour (as with NO_COLOR or a pipe).")
]


def _show_version(value: bool) -> None:
    if value:
        from raycloud import __version__

        typer.echo(f"raycloud {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    pass


def load(path: Path, overrides: list[str] | None) -> Job:
    """The job in a file, with what `--set` says."""
    from raycloud.spec import load_job

    return load_job(path, overrides=tuple(overrides or ()))


@contextmanager
def errors_told(*, debug: bool, interrupted: str = "") -> Iterator[None]:
    """Turns what is raised into a message and an exit code.

    Args:
        debug: Whether the traceback is shown.
        interrupted: The hint after Ctrl-C.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except (Exception, KeyboardInterrupt) as error:  # the outermost place: nothing is above
        plain = is_plain(sys.stderr, plain=False)
        text, code = error_text(error, debug=debug, plain=plain, interrupted=interrupted)
        say(text)
        raise typer.Exit(code) from error


def error_text(
    error: BaseException, *, debug: bool, plain: bool, interrupted: str = ""
) -> tuple[str, int]:
    """The error in one sentence, its remedy below, and the exit code that says whose fault it is.

    It fits one screen: a traceback that a member sent along is cut to the place in the user's code.

    Args:
        error: What was raised, and is being handled.
        debug: Whether the traceback stands above, and nothing is cut.
        plain: Without colour.
        interrupted: The hint after Ctrl-C.
    """
    from raycloud.redact import redact_text
    from raycloud.report.figures import printable
    from raycloud.report.notes import brief

    def word(text: str, colour: str) -> str:
        return text if plain else typer.style(text, fg=colour, bold=True)

    message, hint, code = _parts(error, interrupted)
    lines = [printable(traceback.format_exc())] if debug else []
    cause = message if debug else brief(message)
    lines.append(f"{word('error', 'red')}: {printable(cause)}")
    if hint:
        lines.append(f"\n{word('hint', 'cyan')}: {printable(hint)}")
    return redact_text("\n".join(lines)), code


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


def is_plain(stream: TextIO, *, plain: bool) -> bool:
    """Whether a stream gets plain lines: asked for, not a terminal, or one that wants no colour."""
    from raycloud.spec.environment import Environment

    environment = Environment.from_process()
    return plain or environment.no_color or environment.dumb_terminal or not stream.isatty()


def say(text: str) -> None:
    """A line on stderr, where progress, notes and errors go."""
    typer.echo(text, err=True)


def echo_json(record: Any) -> None:
    """A record on stdout, as JSON."""
    typer.echo(json.dumps(record, indent=2, allow_nan=False))


def print_summary(summary: Summary, directory: Path, *, plain: bool) -> None:
    """The summary of a run on stdout."""
    from raycloud.report.summary_text import summary_renderable, summary_text

    if is_plain(sys.stdout, plain=plain):
        typer.echo(summary_text(summary, directory))
        return
    from rich.console import Console

    Console(highlight=False).print(summary_renderable(summary, directory))
