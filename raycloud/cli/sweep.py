"""`sweep`: trials of a job, what they came to, and going on with them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from raycloud.cli.shell import (
    AddressOption,
    JobFileArgument,
    SetOption,
    app,
    command,
    complete_run,
    echo_json,
    is_plain,
    say,
)
from raycloud.errors import RunDirectoryError
from raycloud.report.figures import byte_count, counted, printable_line, table
from raycloud.tuning.results import CHARTS, DONE, JOB, LOG, STOP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from raycloud.spec.sweep import Sweep
    from raycloud.tuning.results import Results, Trial

FORMAT = 1
_RUNS = Path("runs")
_DIGITS = 5


class RunsByDefault(TyperGroup):
    """A group whose first word may also be that of its command `run`: a job file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` before what is no command's name, and no option of the group."""
        if args and args[0] not in self.commands and args[0] not in {"--help"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)


sweeps = typer.Typer(
    cls=RunsByDefault,
    help="Try a job with other values: `raycloud sweep JOB`, and what has come of it.",
    no_args_is_help=True,
)
app.add_typer(sweeps, name="sweep")

SweepDirectory = Annotated[
    Path, typer.Argument(metavar="SWEEP", help="Its directory.", autocompletion=complete_run)
]


@command("run", of=sweeps, interrupted="`raycloud sweep resume DIR` goes on with it")
def run_sweep(
    job: JobFileArgument,
    *,
    overrides: SetOption = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where it is kept; else a new place in runs/.")
    ] = None,
    address: AddressOption = None,
) -> None:
    """Try what the `sweep` section of a job file says. `run` may be left out."""
    from raycloud.spec.sweep import load_sweep

    asked, sweep = load_sweep(job, overrides or ())
    _carry_out(asked, sweep, directory=directory, address=address, resume=False)


@command("resume", of=sweeps, interrupted="`raycloud sweep resume DIR` goes on with it")
def resume_sweep(directory: SweepDirectory, *, address: AddressOption = None) -> None:
    """Go on with a sweep: what is over is not done again, what had begun goes on."""
    from raycloud.spec.sweep import load_sweep

    asked, sweep = load_sweep(_file(directory, JOB))
    _carry_out(asked, sweep, directory=directory, address=address, resume=True)


@command("stop", of=sweeps)
def stop_sweep(directory: SweepDirectory) -> None:
    """Ask a sweep to end; its trials end at once, and can be resumed."""
    _file(directory, LOG)
    (directory / STOP).touch()


@command("show", of=sweeps)
def show_sweep(
    directory: SweepDirectory,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The trials as JSON.")] = False,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="DIR", help="Draw the charts there, as PNG files."),
    ] = None,
) -> None:
    """Show the trials of a sweep, best first."""
    from raycloud.report import charts
    from raycloud.spec.sweep import load_sweep
    from raycloud.tuning.results import Results

    _, sweep = load_sweep(_file(directory, JOB), check_files=False)
    trials = Results.open(_file(directory, LOG)).trials.values()
    if as_json:
        from dataclasses import asdict

        echo_json({"format": FORMAT, "trials": [asdict(trial) for trial in trials]})
    else:
        typer.echo(sweep_text([*trials], sweep))
    if png is not None:
        files = charts.draw(png, [*trials], sweep)
        say(f"{counted(len(files), 'chart')} in {png}")


@command("ls", of=sweeps)
def list_sweeps() -> None:
    """List the sweeps in `runs/`."""
    from raycloud.tuning.results import Results

    rows = [("sweep", "over", "unfinished")]
    for log in sorted(_RUNS.glob(f"*/{LOG}")):
        found = Results.open(log)
        rows.append((str(log.parent), str(len(found.whole)), str(len(found.unfinished))))
    typer.echo("\n".join(table(rows, left=(True, False, False))))


def _carry_out(job: Any, sweep: Sweep, *, resume: bool, **given: Any) -> None:
    from raycloud.on_ray.sweep import sweep as carry_out
    from raycloud.report import charts

    with _followed(sweep) as show:
        found = carry_out(job, sweep, resume=resume, listener=show, **given)
    typer.echo(sweep_text([*found.trials], sweep))
    drawn = f" and {CHARTS}" if charts.available() else ""
    say(f"to look at: report.html{drawn} in {found.directory}")
    if not drawn:
        say(f"charts as PNG files need matplotlib: {charts.INSTALL}")
    if found.best:
        say(f"the best: trial {found.best[0].number}, as a job in {found.directory / 'best.yaml'}")
    else:
        say(f"no trial came to anything; all are in {found.directory}")


@contextlib.contextmanager
def _followed(sweep: Sweep) -> Iterator[Callable[[Results, Trial], None]]:
    """What tells of each trial that begins or ends; on a terminal, above a table of the others."""
    if is_plain(sys.stderr, plain=False):
        yield lambda results, trial: _say_once(results, trial, sweep)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)

    def draw(results: Results, trial: Trial) -> None:
        if trial.status != "running":
            console.print(Text(_line(results, trial, sweep)))
        running = results.unfinished
        best = [one for one in _ranked([*results.whole], sweep)[:1] if one.status in DONE]
        live.update(Text("\n".join(_rows([*best, *running], sweep))), refresh=True)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield draw


def _say_once(results: Results, trial: Trial, sweep: Sweep) -> None:
    if trial.status != "running" or not trial.measured:
        say(_line(results, trial, sweep))


def _line(results: Results, trial: Trial, sweep: Sweep) -> str:
    over, last = len(results.whole), ""
    values = " ".join(f"{name}={value}" for name, value in trial.point.items())
    if trial.last is not None:
        last = f" {sweep.measure} {trial.last.measure:.{_DIGITS}g}"
    why = f": {trial.why}" if trial.why else ""
    most = max(sweep.trials, len(results.trials))
    text = f"[{over}/{most}] trial {trial.number} {trial.status}{last}  {values}{why}"
    return printable_line(text)


def sweep_text(trials: list[Trial], sweep: Sweep) -> str:
    """A table of the trials: those that came to something first, best first."""
    return "\n".join(_rows(_ranked(trials, sweep), sweep))


def _ranked(trials: list[Trial], sweep: Sweep) -> list[Trial]:
    from raycloud.tuning.results import objectives

    def key(trial: Trial) -> tuple[Any, ...]:
        found = objectives(trial, sweep.minimize, mode=sweep.mode, target=sweep.target)
        return (found is None, trial.again is None, found or (), trial.number)

    return sorted(trials, key=key)


def _rows(trials: list[Trial], sweep: Sweep) -> list[str]:
    from raycloud.report.sweep import status_of

    head = ("trial", "status", "step", sweep.measure, "seconds", "sent", *sweep.space)
    rows = [head]
    for trial in trials:
        last = trial.last
        came = ("", "", "", "")
        if last is not None:
            measure = f"{last.measure:.{_DIGITS}g}"
            came = (str(last.step), measure, f"{last.seconds:.1f}", byte_count(last.bytes))
        values = (printable_line(str(trial.point.get(path, ""))) for path in sweep.space)
        rows.append((str(trial.number), status_of(trial), *came, *values))
    return [*table(rows, left=(False, True, *[False] * 4, *[True] * len(sweep.space)))]


def _file(directory: Path, name: str) -> Path:
    if not (directory / name).is_file():
        raise RunDirectoryError(
            f"{directory} is no sweep: it has no {name}", hint="`raycloud sweep ls` lists them"
        )
    return directory / name
