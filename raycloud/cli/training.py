"""`train` and `plan`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli import shell
from raycloud.cli.shell import (
    EXIT_CODES,
    AddressOption,
    DebugOption,
    PlainOption,
    SetOption,
    app,
    errors_told,
    load,
    print_summary,
)
from raycloud.clock import Clock, SystemClock
from raycloud.errors import RunDirectoryError

if TYPE_CHECKING:
    from raycloud.events import Event
    from raycloud.spec.job import Job

    Observer = Callable[[Event], None]

_STOPPED = 130
_STOPPING = b"\nstopping after a checkpoint; Ctrl-C again ends at once\n"

JobFile = Annotated[Path | None, typer.Argument(metavar="JOB", help="The job file.")]


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


@app.command(epilog=EXIT_CODES)
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
    with errors_told(debug=debug), _interrupts(stop):
        asked = load(_job_path(job, run_dir, resume=resume), overrides)
        with _shown(asked, clock, plain=shell.is_plain(sys.stderr, plain=plain)) as observer:
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

        print_summary(Summary.from_record(run.summary), Path(run.directory), plain=plain)
        if run.status == "stopped" and stop.is_set():
            raise typer.Exit(_STOPPED)


@app.command(epilog=EXIT_CODES)
def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")],
    *,
    overrides: SetOption = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show what a job would do, without training: members, shares, seconds and bytes per step."""
    with errors_told(debug=debug):
        asked = load(job, overrides)
        from raycloud.on_ray import run as on_ray_run
        from raycloud.report.planned import plan_text

        made = on_ray_run.plan(asked, address=address)
        typer.echo(made.to_json().rstrip() if as_json else plan_text(made))


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


def _shown(job: Job, clock: Clock, *, plain: bool) -> AbstractContextManager[Observer]:
    from raycloud.report import shown

    if plain:
        return shown.shown_plainly(job, clock, lambda text: typer.echo(text, err=True))
    return shown.shown_live(job, clock)
