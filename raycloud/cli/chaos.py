"""A job under faults, beside the same job without: `chaos`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli.shell import (
    AddressOption,
    JobFileArgument,
    SetOption,
    command,
    echo_json,
    say,
)
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.faults import Fault
    from raycloud.report.chaos import Outcome
    from raycloud.spec.job import Job

_NOT_PROVED = 1
EXIT_CODES = (
    "Exit codes: 0 the parameters agree within the bound, and both ledgers are exact; 1 they do "
    "not, or the run under faults failed; 2 what was asked cannot be done; 3 a machine, link or "
    "disk failed in the undisturbed run; 4 raycloud's own fault."
)


@command(epilog=EXIT_CODES)
def chaos(
    job: JobFileArgument,
    *,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The faults, as YAML or JSON.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Draw the faults by chance, from N.")
    ] = None,
    faults: Annotated[
        int, typer.Option(min=1, max=1000, metavar="K", help="How many are drawn.")
    ] = 10,
    steps: Annotated[
        int | None, typer.Option(min=2, metavar="S", help="Steps, in the place of the job's.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where both runs, the schedule and the report are kept; without it, a new place "
            "in runs/.",
        ),
    ] = None,
    overrides: SetOption = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The outcome as JSON.")] = False,
) -> None:
    """Run a job under faults, and hold what comes of it against the same job without them.

    The faults are real: workers of this run, and no other processes, are killed, frozen, told to
    leave and cut off. It says how far the parameters are apart, whether each sample counted once,
    what each fault cost, and where the time went.
    """
    if (schedule is None) == (seed is None):
        raise typer.BadParameter(
            "give the faults: --schedule FILE, or --seed N to draw them", param_hint="--schedule"
        )
    from raycloud.on_ray.chaos import prepared
    from raycloud.spec import load_job

    asked = prepared(load_job(job, overrides or ()), steps)
    planned = _planned(asked, schedule, seed=seed, faults=faults)
    outcome = _outcome(asked, planned, out, address, seed)
    if as_json:
        echo_json(outcome.to_record())
    else:
        from raycloud.report.chaos import outcome_text

        typer.echo(outcome_text(outcome))
    if not outcome.proved:
        raise typer.Exit(_NOT_PROVED)


def _planned(
    job: Job, schedule: Path | None, *, seed: int | None, faults: int
) -> tuple[Fault, ...]:
    from raycloud.errors import SpecError
    from raycloud.faults import check, drawn, load_schedule

    if schedule is not None:
        found = load_schedule(schedule)
    else:
        if job.steps is None:
            hint = "give the number of steps with --steps, or steps in the job"
            raise SpecError("steps", None, "they are drawn for a number of steps", hint=hint)
        found = drawn(seed or 0, faults=faults, steps=job.steps, workers=job.most_workers)
    check(found, workers=job.most_workers, steps=job.steps)
    return found


def _outcome(
    job: Job, faults: tuple[Fault, ...], out: Path | None, address: str | None, seed: int | None
) -> Outcome:
    """Run both, and keep what is known beside them."""
    from raycloud.errors import RunDirectoryError
    from raycloud.faults import schedule_text
    from raycloud.on_ray.chaos import Chaos
    from raycloud.report.chaos import PAGE, RECORD, SCHEDULE, keep, keep_outcome
    from raycloud.report.progress import shown_plainly
    from raycloud.spec import choose

    try:
        place = choose(out, f"{job.name}-chaos", resume=False).path
    except RunDirectoryError as error:
        error.hint = "give a directory that is new or empty with --out"
        raise

    for fault in faults:
        say(f"planned: {fault}")
    keep(place / SCHEDULE, schedule_text(faults))
    say(f"the schedule is kept in {place / SCHEDULE}; --schedule takes it again")
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints there that a worker has died
        trial = Chaos(place, address, say, lambda job: shown_plainly(job, SystemClock(), say))
        outcome = replace(trial.run(job, faults), seed=seed)
    keep_outcome(place, outcome)
    say(f"the report is in {place / PAGE} and {place / RECORD}")
    return outcome
