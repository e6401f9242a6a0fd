"""What every command shares: the app, its options, how errors are told, and what is plain."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from raycloud.cli.completion import complete_field

if TYPE_CHECKING:
    from raycloud.report.summary import Summary
    from raycloud.spec.job import Job

EXIT_CODES = (
    "Exit codes: 0 done; 2 what was asked cannot be done (job, task, data or "
    "arguments); 3 a machine, link or disk failed; 4 raycloud's own fault; 130 stopped by Ctrl-C "
    "or SIGTERM."
)

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
        from raycloud.report.error_text import error_text

        plain = is_plain(sys.stderr, plain=False)
        text, code = error_text(error, debug=debug, plain=plain, interrupted=interrupted)
        typer.echo(text, err=True)
        raise typer.Exit(code) from error


def is_plain(stream: TextIO, *, plain: bool) -> bool:
    """Whether a stream gets plain lines: asked for, not a terminal, or one that wants no colour."""
    from raycloud.spec.environment import Environment

    environment = Environment.from_process()
    return plain or environment.no_color or environment.dumb_terminal or not stream.isatty()


def print_summary(summary: Summary, directory: Path, *, plain: bool) -> None:
    """The summary of a run on stdout."""
    from raycloud.report.summary_text import summary_renderable, summary_text

    if is_plain(sys.stdout, plain=plain):
        typer.echo(summary_text(summary, directory))
        return
    from rich.console import Console

    Console(highlight=False).print(summary_renderable(summary, directory))
