"""Runs that go on, here or on a cluster: `status`, `logs`, `stop`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli.completing import complete_run
from raycloud.cli.shell import (
    EXIT_CODES,
    DebugOption,
    PlainOption,
    app,
    errors_told,
    is_plain,
)
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.on_ray.jobs_api import ClusterRun, JobsApi
    from raycloud.report.listed import Listed

_DETACHED = 130

JobsAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="The Jobs API of a cluster, e.g. http://127.0.0.1:8265; without it "
        "RAY_API_SERVER_ADDRESS, or runs on this machine.",
    ),
]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Send the token in clear to another machine.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="The answer as JSON.")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run directory here; or a run's id or name on a cluster.",
        autocompletion=complete_run,
    ),
]


@app.command(epilog=EXIT_CODES)
def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run directory, or an id or name; without it, all.",
            autocompletion=complete_run,
        ),
    ] = None,
    *,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show how runs stand: step, loss, rate, members, recoveries, checkpoint, cost so far."""
    with errors_told(debug=debug):
        import json

        from raycloud.report import listed

        found, place = _found(run, address, insecure=insecure)
        if as_json:
            typer.echo(json.dumps(listed.record_of(found, place), indent=2, allow_nan=False))
            return
        now_t = SystemClock().unix_s()
        if run is None:
            typer.echo(listed.listed_text(found, place, now_t))
        else:
            typer.echo(listed.standing_text(found[0], now_t))


@app.command(epilog=EXIT_CODES)
def logs(
    run: Run,
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    member: Annotated[
        int | None, typer.Option(metavar="N", help="What member N logged, instead.")
    ] = None,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Lines as they are kept: cards and entries as JSON.")
    ] = False,
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a run says; with --follow as it comes. Ctrl-C ends the showing, not the run."""
    with errors_told(debug=debug):
        if follow and member is not None:
            raise typer.BadParameter(
                "shows what is there: leave --follow out", param_hint="--member"
            )
        lines = _lines(run, address, insecure=insecure, member=member, follow=follow, raw=as_json)
        try:
            _show(lines, as_json=as_json, plain=plain)
        except KeyboardInterrupt:
            raise typer.Exit(_DETACHED) from None


@app.command(epilog=EXIT_CODES)
def stop(
    run: Run,
    *,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
    debug: DebugOption = False,
) -> None:
    """Ask a run to write a checkpoint and end, as Ctrl-C does; returns once it is asked."""
    with errors_told(debug=debug):
        if (directory := _local(run, address)) is not None:
            from raycloud.report.local import stop_driver

            pid = stop_driver(directory)
            typer.echo(f"asked {run}, driven by process {pid}, to write a checkpoint and end")
            return
        jobs = _jobs(address, insecure=insecure)
        found = jobs.find(run)
        jobs.stop(found)
        typer.echo(f"asked {found.id} to write a checkpoint and end")


def _local(run: str, address: str | None) -> Path | None:
    """The run directory that is meant, if one here is."""
    from raycloud.report.local import is_run
    from raycloud.spec.rundir import RUNS

    if address is not None:
        return None
    for directory in (Path(run).expanduser(), RUNS / run):
        if is_run(directory):
            return directory
    if _jobs_address(address) is not None:
        return None
    from raycloud.errors import RunDirectoryError

    raise RunDirectoryError(
        f"{run} is no run directory, nor is there one in {RUNS}/",
        hint="name one that holds job.yaml; or give the --address of a cluster's Jobs API",
    )


def _jobs_address(address: str | None) -> str | None:
    from raycloud.spec.environment import Environment

    return address or Environment.from_process().jobs_address


def _jobs(address: str | None, *, insecure: bool) -> JobsApi:
    from raycloud.on_ray.jobs_api import JobsApi

    return JobsApi.at(address, insecure=insecure)


def _found(run: str | None, address: str | None, *, insecure: bool) -> tuple[list[Listed], str]:
    """What is asked for, and where it is."""
    from raycloud.report.listed import Listed
    from raycloud.report.local import runs_below, standing_of, standing_or_why
    from raycloud.spec.rundir import RUNS

    clock = SystemClock()
    here = None if run is None else _local(run, address)
    if here is not None or (run is None and _jobs_address(address) is None):
        directories = runs_below() if here is None else [here]
        stands = standing_of if here is not None else standing_or_why
        cards = [(str(path), stands(path, clock)) for path in directories]
        return [Listed(id=name, card=card) for name, card in cards], f"{RUNS}/ on this machine"
    jobs = _jobs(address, insecure=insecure)
    found = [jobs.find(run)] if run is not None else [jobs.with_card(one) for one in jobs.runs()]
    return [_listed(one, clock) for one in found], jobs.address


def _listed(run: ClusterRun, clock: SystemClock) -> Listed:
    from raycloud.report.listed import Listed

    return Listed(id=run.id, card=run.standing(clock), place=run.node_ip)


def _lines(
    run: str,
    address: str | None,
    *,
    insecure: bool,
    member: int | None,
    follow: bool,
    raw: bool,
) -> Iterable[str]:
    """The lines that are asked for."""
    here = _local(run, address)
    if here is not None:
        from raycloud.report.local import log_lines
        from raycloud.report.said import member_lines

        if member is not None:
            return member_lines(here, member, raw=raw)
        return log_lines(here, SystemClock(), follow=follow)
    jobs = _jobs(address, insecure=insecure)
    found = jobs.find(run)
    if member is not None:
        words = ["logs", found.directory, "--member", str(member)]
        return jobs.asked(found, [*words, "--json"] if raw else words)
    return jobs.follow(found) if follow else jobs.log(found)


def _show(lines: Iterable[str], *, as_json: bool, plain: bool) -> None:
    """Lines on stdout; on a terminal with the progress below them."""
    if as_json:
        for line in lines:
            typer.echo(line)
        return
    from raycloud.report.card import followed

    # The display is drawn behind stderr, so both have to be a terminal for it.
    without = is_plain(sys.stdout, plain=plain) or is_plain(sys.stderr, plain=plain)
    followed(lines, plain=without, say=typer.echo)
