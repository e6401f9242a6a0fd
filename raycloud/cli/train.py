"""`train` and `plan`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycloud.cli.shell import (
    STOPPED,
    AddressOption,
    JobFileArgument,
    PlainOption,
    SetOption,
    command,
    complete_job,
    complete_run,
    is_plain,
    print_summary,
    say,
)
from raycloud.cli.supervise import (
    RestartsOption,
    Resuming,
    ResumingCommand,
    resumed,
    supervised,
    without_try,
)
from raycloud.clock import Clock, SystemClock
from raycloud.errors import RunDirectoryError

if TYPE_CHECKING:
    from raycloud.events import Observed
    from raycloud.spec.job import Job

_GOES_ON = "`--resume` goes on from the last checkpoint"
_STOPPING = b"\nstopping after a checkpoint; Ctrl-C again ends at once\n"
_TERMINATED = b"stopping after a checkpoint\n"

JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="JOB", help="The job file.", autocompletion=complete_job),
]


class StopSwitch:
    """Asks a run, once, to checkpoint and end; the run looks at `reason`."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def request(self, reason: str) -> None:
        """Ask; the first reason stays."""
        self.reason = self.reason or reason

    def is_set(self) -> bool:
        """Whether someone asked."""
        return self.reason is not None


@command(cls=ResumingCommand, interrupted=_GOES_ON)
def train(
    context: typer.Context,
    job: JobFile = None,
    *,
    overrides: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where the run is kept; without it, a new place in runs/.",
            autocompletion=complete_run,
        ),
    ] = None,
    address: AddressOption = None,
    resume: Annotated[
        Resuming,
        typer.Option(
            help="Whether to go on from the last checkpoint in --run-dir. must, also --resume "
            "alone: yes, or refuse. allow: if there is one, else begin. never: refuse to.",
            show_choices=True,
        ),
    ] = Resuming.NEVER,
    trying: Annotated[
        bool,
        typer.Option("--try", help="Send two steps through everything, and keep nothing."),
    ] = False,
    tour: Annotated[
        bool,
        typer.Option("--tour", help="Measure ways for updates in the run, and go on by the best."),
    ] = False,
    restarts: RestartsOption = 0,
    plain: PlainOption = False,
    cards: Annotated[bool, typer.Option("--cards", hidden=True)] = False,
) -> None:
    """Train a job. `--resume --run-dir DIR` goes on with the job kept in DIR.

    Ctrl-C, SIGTERM or a closed terminal writes a checkpoint and ends; a second Ctrl-C ends at once.
    """
    if trying and resume is not Resuming.NEVER:
        raise typer.BadParameter("a job is tried from its beginning", param_hint="--resume")
    if trying and restarts:
        raise typer.BadParameter("a job is tried once", param_hint="--restarts")
    clock = SystemClock()
    started_s = context.obj if isinstance(context.obj, float) else clock.monotonic_s()
    stop = StopSwitch()
    with _interrupts(stop), _exactly(context):
        from raycloud.spec import load_job

        more = ("sync.tour=auto",) if tour else ()
        asked = load_job(_job_path(job, run_dir, resume), (*(overrides or ()), *more))
        if restarts:
            raise typer.Exit(
                supervised(context, asked.name, run_dir, restarts=restarts, clock=clock)
            )
        shown = _shown(asked, clock, plain=plain, cards=cards, run_dir=run_dir)
        given: dict[str, Any] = {
            "run_dir": run_dir,
            "address": address,
            "stop": stop,
            "started_s": started_s,
        }
        with shown as observer:
            if trying:
                from raycloud.on_ray import dry_run
                from raycloud.report.summary_text import tried_text

                tried = dry_run.try_out(asked, observer=observer, **given)
            else:
                from raycloud.on_ray import run as on_ray_run

                run = on_ray_run.train(asked, resume=resume.value, observer=observer, **given)
        if trying:
            typer.echo(tried_text(tried, without_try(context)))
            if tried.status == "stopped":
                raise typer.Exit(STOPPED)
            return
        from raycloud.report.summary import Summary

        print_summary(Summary.from_record(run.summary), Path(run.directory), plain=plain)
        if run.status == "stopped" and stop.is_set():
            raise typer.Exit(STOPPED)


@command()
def plan(
    job: JobFileArgument,
    *,
    overrides: SetOption = None,
    address: AddressOption = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A cluster that is not there: a CSV table of its nodes, or what `ray up` takes.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure again what an earlier plan did within a day."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
) -> None:
    """Show what a job would do, without training: members, shares, seconds, bytes and cost."""
    from raycloud.spec import load_job

    asked = load_job(job, overrides or ())
    from raycloud.on_ray import dry_run
    from raycloud.report.summary_text import plan_text

    made = dry_run.plan(asked, address=address, cluster=cluster, reuse=not measure)
    typer.echo(made.to_json().rstrip() if as_json else plan_text(made))


@contextmanager
def _exactly(context: typer.Context) -> Iterator[None]:
    """Name the command that goes on with a run as this one was typed."""
    try:
        yield
    except RunDirectoryError as error:
        from raycloud.spec.rundir import RunTakenError

        if not isinstance(error, RunTakenError):
            raise
        hint = f"go on with `{resumed(context, error.resume)}`, or give another --run-dir"
        raise RunDirectoryError(error.message, hint=hint) from error


def _job_path(job: Path | None, run_dir: Path | None, resume: Resuming) -> Path:
    """The job file: the one named, or that of the run to go on with."""
    if job is not None:
        return job
    if resume is Resuming.NEVER or run_dir is None:
        if resume is Resuming.NEVER:
            raise typer.BadParameter("give a job file, or --resume --run-dir DIR", param_hint="JOB")
        what = "say which run to go on with: --run-dir DIR"
        raise typer.BadParameter(what, param_hint="--resume")
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
    """The first Ctrl-C asks the run to stop, the second raises KeyboardInterrupt.

    SIGTERM asks, too, however often it comes: a job's supervisors may each send one. So does
    SIGHUP, a terminal that is closed, unless it is ignored, as under nohup.
    """

    def interrupted(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.request("Ctrl-C")
        # Not through sys.stderr: the signal may have come in the middle of a write to it.
        os.write(2, _STOPPING)

    def terminated(_number: int, _frame: object) -> None:
        if not stop.is_set():
            stop.request("SIGTERM")
            os.write(2, _TERMINATED)

    def hung_up(_number: int, _frame: object) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in terminals:  # writing to one that is gone is an error
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        stop.request("SIGHUP")

    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    handlers = {signal.SIGINT: interrupted, signal.SIGTERM: terminated}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = hung_up
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        if stop.is_set():  # this command is about to end, with a code that says how
            before |= dict.fromkeys(before.keys() - {signal.SIGINT}, signal.SIG_IGN)
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(
    job: Job, clock: Clock, *, plain: bool, cards: bool, run_dir: Path | None
) -> AbstractContextManager[Callable[[Observed], None]]:
    """What shows the run; `cards` makes lines for a job's log."""
    from raycloud.report import progress

    if cards:
        directory = None if run_dir is None else run_dir.absolute()
        return progress.shown_as_cards(job, clock, typer.echo, note=say, directory=directory)
    if is_plain(sys.stderr, plain=plain):
        return progress.shown_plainly(job, clock, say)
    return progress.shown_live(job, clock)
