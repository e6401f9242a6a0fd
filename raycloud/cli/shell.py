"""What every command shares: the app, its options, what Tab offers, how errors are shown."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from raycloud.bounded import expanded, open_regular
from raycloud.errors import InternalError, JobError, MachineError, RaycloudError

if TYPE_CHECKING:
    from typer.core import TyperCommand

    from raycloud.report.summary import Summary

    Command = Callable[..., None]

_RUNS = "runs"
_MOST_BYTES = 2**16  # that are looked at of a file


def complete_job(incomplete: str) -> list[str]:
    """Job files, and folders that may hold some.

    A YAML file counts as a job when a line of it begins with `task:`.
    """
    found = []
    for path, text in _entries(incomplete):
        if _is_folder(path):
            found.append(f"{text}/")
        elif path.suffix in {".yaml", ".yml"} and _is_job(path):
            found.append(text)
    return found


def complete_run(incomplete: str) -> list[str]:
    """Directories of runs: those below `runs/`, newest first, or what is being typed."""
    if incomplete and not _RUNS.startswith(incomplete):
        runs = [(path, text) for path, text in _entries(incomplete) if _is_folder(path)]
        return [text if _is_run(path) else f"{text}/" for path, text in runs]
    try:
        here = [path for path in Path(_RUNS).iterdir() if _is_run(path)]
        here.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return [str(path) for path in here]
    except OSError:
        return []


def complete_field(incomplete: str) -> list[tuple[str, str]]:
    """`field=value` for `--set`: each word a field takes, else its default, which one changes."""
    from raycloud.spec.job import Job
    from raycloud.spec.schema import schema_of, settable

    return [offer for offer in settable(schema_of(Job)) if offer[0].startswith(incomplete)]


def _entries(incomplete: str) -> Iterator[tuple[Path, str]]:
    """What there is whose path begins with what is typed, as a path and as it would be typed."""
    head, slash, name = incomplete.rpartition("/")
    try:
        paths = sorted(expanded(Path(head + slash or ".")).iterdir())
    except OSError:
        return
    for path in paths:
        if path.name.startswith(name) and (name.startswith(".") or not path.name.startswith(".")):
            yield path, f"{head}{slash}{path.name}"


def _is_job(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return any(line.startswith(b"task:") for line in file.read(_MOST_BYTES).splitlines())
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # behind a folder that may not be looked into
        return False


def _is_run(path: Path) -> bool:
    try:
        return any((path / name).is_file() for name in ("events.jsonl", "job.yaml"))
    except OSError:
        return False


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
_DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
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


def command(
    name: str | None = None,
    *,
    of: typer.Typer = app,
    epilog: str = EXIT_CODES,
    cls: type[TyperCommand] | None = None,
    interrupted: str = "",
) -> Callable[[Command], Command]:
    """Add a command that takes `--debug`, too, and whose errors become a message and an exit code.

    `name` is by default the function's; `interrupted` is the hint after Ctrl-C.
    """

    def added(function: Command) -> Command:
        @functools.wraps(function)
        def told(*words: Any, debug: bool, **options: Any) -> None:
            with _errors_told(debug=debug, interrupted=interrupted):
                function(*words, **options)

        own = inspect.signature(function, eval_str=True)
        flag = inspect.Parameter(
            "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_DebugOption
        )
        signature = own.replace(parameters=[*own.parameters.values(), flag])
        told.__signature__ = signature  # type: ignore[attr-defined]
        of.command(name, epilog=epilog, cls=cls)(told)
        return function

    return added


@contextmanager
def _errors_told(*, debug: bool, interrupted: str) -> Iterator[None]:
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
    what, name = error.strerror or str(error) or type(error).__name__, error.filename
    of = f" {os.fsdecode(name) if isinstance(name, bytes) else name}" if name is not None else ""
    return f"the system refused{of}: {what}"


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
