"""The command line: a thin layer over `raycloud.train` and `raycloud.plan`; all printing is here.

What is heavy (torch, ray, pydantic, rich's live display) is imported inside the commands that need
it. Progress, notes and errors go to stderr, results to stdout.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from raycloud.clock import Clock, SystemClock
from raycloud.errors import RunDirectoryError

if TYPE_CHECKING:
    from raycloud.data.cache import BlockCache
    from raycloud.events import Event
    from raycloud.report.summary import Summary
    from raycloud.spec.job import Job

    Observer = Callable[[Event], None]

_STOPPED = 130
_EXIT_CODES = (
    "Exit codes: 0 done; 2 what was asked cannot be done (job, task, data or "
    "arguments); 3 a machine, link or disk failed; 4 raycloud's own fault; 130 stopped by Ctrl-C."
)
_STOPPING = b"\nstopping after a checkpoint; Ctrl-C again ends at once\n"

app = typer.Typer(
    name="raycloud",
    help="Train PyTorch models on whatever machines are there.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache = typer.Typer(help="Show or remove preprocessed rows on this machine.", no_args_is_help=True)
app.add_typer(cache, name="cache")

JobFile = Annotated[Path | None, typer.Argument(metavar="JOB", help="The job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field, e.g. elastic.max_workers=4."
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
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The cache, where a job names one (data.cache.path); else RAYCLOUD_CACHE, or "
        "raycloud in the user's cache directory.",
    ),
]


class StopSwitch:
    """Asks a run, once, to checkpoint and end; the run looks at `reason`."""

    def __init__(self) -> None:
        """Not asked yet."""
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        """Ask; the first reason stays."""
        self.reason = self.reason or reason

    def is_set(self) -> bool:
        """Whether someone asked."""
        return self.reason is not None


def main() -> None:
    """The command `raycloud`."""
    started_s = SystemClock().process_started_s()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows `?`, and goes on
    app(obj=started_s)


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


@app.command(epilog=_EXIT_CODES)
def train(
    context: typer.Context,
    job: JobFile = None,
    *,
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run is kept; without it, a new place in runs/.")
    ] = None,
    address: AddressOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --run-dir.")
    ] = False,
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a job. `--resume --run-dir DIR` goes on with the job kept in DIR.

    Ctrl-C writes a checkpoint and ends; a second Ctrl-C ends at once.
    """
    clock = SystemClock()
    started_s = context.obj if isinstance(context.obj, float) else clock.monotonic_s()
    stop = StopSwitch()
    with _errors_told(debug=debug), _interrupts(stop):
        asked = _load(_job_path(job, run_dir, resume=resume), overrides)
        with _shown(asked, clock, plain=_is_plain(sys.stderr, plain=plain)) as observer:
            from raycloud.on_ray import run as on_ray_run

            run = on_ray_run.train(
                asked,
                run_dir=run_dir,
                address=address,
                resume=resume,
                observer=observer,
                stop=stop,
                started_s=started_s,
            )
        from raycloud.report.summary import Summary

        _print_summary(Summary.from_record(run.summary), Path(run.directory), plain=plain)
        if run.status == "stopped" and stop.is_set():
            raise typer.Exit(_STOPPED)


@app.command(epilog=_EXIT_CODES)
def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    *,
    overrides: SetOption = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show what a job would do, without training: members, shares, seconds and bytes per step."""
    with _errors_told(debug=debug):
        asked = _load(job, overrides)
        from raycloud.on_ray import run as on_ray_run
        from raycloud.report.planned import plan_text

        made = on_ray_run.plan(asked, address=address)
        typer.echo(made.to_json().rstrip() if as_json else plan_text(made))


@app.command(epilog=_EXIT_CODES)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the summary of a run, also of one that is still going or was killed."""
    with _errors_told(debug=debug):
        from raycloud.report.summary import of_run

        summary = of_run(run)
        if as_json:
            import json

            typer.echo(json.dumps(summary.to_record(), indent=2, allow_nan=False))
        else:
            _print_summary(summary, run, plain=plain)


@cache.command("ls", epilog=_EXIT_CODES)
def cache_ls(
    *,
    directory: CacheOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """List the data sets in the cache: what they are, how large, when they were last used."""
    with _errors_told(debug=debug):
        from raycloud.report import cached

        typer.echo(cached.listed(_cache(directory), SystemClock(), as_json=as_json))


@cache.command("rm", epilog=_EXIT_CODES)
def cache_rm(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Data sets, by their first letters.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All data sets.")] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Those last used before, e.g. 30d or 12h.")
    ] = None,
    directory: CacheOption = None,
    debug: DebugOption = False,
) -> None:
    """Remove data sets that no run uses from the cache; a run that needs them makes them again."""
    if bool(ids) + everything + (older_than is not None) != 1:
        raise typer.BadParameter("give IDs, --all or --older-than AGE", param_hint="ID")
    with _errors_told(debug=debug):
        from raycloud.report import cached

        typer.echo(cached.removed(_cache(directory), SystemClock(), ids, older_than))


def _cache(directory: Path | None) -> BlockCache:
    from raycloud.data.cache import BlockCache
    from raycloud.spec.environment import Environment

    return BlockCache(directory or Environment.from_process().cache)


def _job_path(job: Path | None, run_dir: Path | None, *, resume: bool) -> Path:
    """The job file: the one named, or that of the run to go on with."""
    if job is not None:
        return job
    if not resume or run_dir is None:
        raise typer.BadParameter("give a job file, or --resume --run-dir DIR", param_hint="JOB")
    from raycloud.spec import RunDirectory

    path = RunDirectory(run_dir).job_yaml
    if not path.is_file():
        raise RunDirectoryError(
            f"no run to resume: {run_dir} has no {path.name}",
            hint="name the directory of an earlier run, or start one: leave --resume out",
        )
    return path


def _load(path: Path, overrides: list[str] | None) -> Job:
    from raycloud.spec import load_job

    return load_job(path, overrides=tuple(overrides or ()))


@contextmanager
def _errors_told(*, debug: bool) -> Iterator[None]:
    """Turns what is raised into a message and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except (Exception, KeyboardInterrupt) as error:  # the outermost place: nothing is above
        from raycloud.report.told import told

        text, code = told(error, debug=debug, plain=_is_plain(sys.stderr, plain=False))
        typer.echo(text, err=True)
        raise typer.Exit(code) from error


@contextmanager
def _interrupts(stop: StopSwitch) -> Iterator[None]:
    """The first Ctrl-C asks the run to stop, the second raises KeyboardInterrupt."""

    def interrupted(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.request("Ctrl-C")
        # Not through sys.stderr: the signal may have come in the middle of a write to it.
        os.write(2, _STOPPING)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_plain(stream: TextIO, *, plain: bool) -> bool:
    from raycloud.spec.environment import Environment

    environment = Environment.from_process()
    return plain or environment.no_color or environment.dumb_terminal or not stream.isatty()


def _print_summary(summary: Summary, directory: Path, *, plain: bool) -> None:
    from raycloud.report.terminal import summary_renderable, summary_text

    if _is_plain(sys.stdout, plain=plain):
        typer.echo(summary_text(summary, directory))
        return
    from rich.console import Console

    Console(highlight=False).print(summary_renderable(summary, directory))


def _shown(job: Job, clock: Clock, *, plain: bool) -> AbstractContextManager[Observer]:
    from raycloud.report import shown

    if plain:
        return shown.shown_plainly(job, clock, lambda text: typer.echo(text, err=True))
    return shown.shown_live(job, clock)
