"""`submit`: a job and its working directory to a cluster, followed until it ends."""

from __future__ import annotations

import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli.shell import (
    STOPPED,
    JobFileArgument,
    PlainOption,
    SetOption,
    command,
    echo_json,
    is_plain,
    say,
)
from raycloud.cli.supervise import RestartsOption  # noqa: TC001 - Typer reads it
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.on_ray.submission import JobsClient
    from raycloud.packing.working_dir import WorkingDir
    from raycloud.spec.job import Job

_FORMAT = 2  # of what --json says
_RESTARTS = 3
_MOST_TOLD = 10

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Where the cluster's Jobs API answers, e.g. http://127.0.0.1:8265; without it, "
        "RAY_API_SERVER_ADDRESS, then port 8265 of this machine.",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Send the token and your code in clear to another machine (http)."
    ),
]


@command()
def submit(
    job: JobFileArgument,
    *,
    overrides: SetOption = None,
    address: ClusterOption = None,
    insecure: InsecureOption = False,
    working_dir: Annotated[
        Path | None,
        typer.Option(
            help="What travels; without it, the current directory, or the job's if that lies "
            "elsewhere.",
        ),
    ] = None,
    restarts: RestartsOption = _RESTARTS,
    detach: Annotated[
        bool, typer.Option("--detach", help="Do not wait: print how to come back, and end.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would travel, and send nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --dry-run: what would travel, as JSON.")
    ] = False,
    plain: PlainOption = False,
) -> None:
    """Train a job on a Ray cluster: send its working directory, follow it, end as it ends.

    Prints the submission's id on stdout. Ctrl-C detaches and leaves the job running.
    """
    if as_json and not dry_run:
        raise typer.BadParameter("goes with --dry-run", param_hint="--json")
    from raycloud.on_ray import submission
    from raycloud.packing import working_dir as packing

    root = packing.working_dir_of(job, working_dir)
    from raycloud.spec import load_job

    asked = load_job(job, overrides or ())
    found = packing.survey_for(asked, job, root, submission.packed_by_ray)
    if dry_run:
        _say_contents(found, as_json=as_json)
        return
    _say_left(found)
    for path in packing.ignored_above(found.root):
        say(f"not read: {path}; copy what is to count into .rayignore")
    jobs = submission.client(address, insecure=insecure)
    name = _send(jobs, asked, job, found, overrides=overrides or [], restarts=restarts)
    typer.echo(name)
    back = _ways_back(name, jobs.get_address(), insecure=insecure)
    if detach:
        say(back)
        return
    raise typer.Exit(_followed(jobs, name, back, plain=is_plain(sys.stderr, plain=plain)))


def _send(
    jobs: JobsClient,
    asked: Job,
    job: Path,
    found: WorkingDir,
    *,
    overrides: list[str],
    restarts: int,
) -> str:
    """Send a working directory and start its job; returns the submission's id."""
    from raycloud.on_ray import submission
    from raycloud.on_ray.registration import Registration
    from raycloud.packing import working_dir as packing

    name = packing.submission_id(asked.name, SystemClock().unix_s(), secrets.token_hex(2))
    where = packing.run_dir_of(name)
    command = packing.entrypoint(job, found.root, name, overrides=overrides, restarts=restarts)
    say(f"sending {_total(found)}, to {jobs.get_address()}")
    return submission.submit(
        jobs,
        found,
        submission_id=name,
        entrypoint=command,
        metadata=Registration(run=name, job=asked.name, directory=where).to_metadata(),
    )


def _followed(jobs: JobsClient, name: str, back: str, *, plain: bool) -> int:
    """Show a job's log until it ends; returns the exit code."""
    from raycloud.errors import RaycloudError
    from raycloud.on_ray import submission
    from raycloud.report.progress import show_log

    try:
        lines = submission.log_lines(jobs, name)
        show_log(lines, plain=plain, say=say)
        ending = submission.outcome(jobs, name)
    except KeyboardInterrupt:
        say(f"\ndetached; {name} goes on\n{back}")
        return STOPPED
    except RaycloudError:
        say(f"\nlost sight of {name}, which may go on\n{back}\n")
        raise
    return submission.exit_code(ending)


def _ways_back(name: str, address: str, *, insecure: bool) -> str:
    where = f" --address {shlex.quote(address)}" + (" --insecure" if insecure else "")
    return (
        f"  raycloud logs {name} --follow{where}\n"
        f"  raycloud status {name}{where}\n"
        f"  raycloud stop {name}{where}"
    )


def _say_left(found: WorkingDir) -> None:
    told = list(found.told.items())
    for path, reason in told[:_MOST_TOLD]:
        _say_stays(path, reason)
    if len(told) > _MOST_TOLD:
        more = len(told) - _MOST_TOLD
        say(f"stays here: {more} more; --dry-run shows all")


def _say_contents(found: WorkingDir, *, as_json: bool) -> None:
    if as_json:
        record = {
            "format": _FORMAT,
            "working_dir": str(found.root),
            "files": [{"path": path, "bytes": size} for path, size in found.sizes.items()],
            "left": [{"path": path, "reason": reason} for path, reason in found.left.items()],
            "total_bytes": sum(found.sizes.values()),
        }
        echo_json(record)
        return
    for path, size in found.sizes.items():
        typer.echo(f"{_size(size):>10}  {path}")
    for path, reason in found.left.items():
        _say_stays(path, reason)
    typer.echo(f"in all, before Ray packs them: {_total(found)}")


def _say_stays(path: str, reason: str) -> None:
    shown = path.encode(errors="replace").decode()
    say(f"stays here: {shown} ({reason})")


def _total(found: WorkingDir) -> str:
    return f"{_size(sum(found.sizes.values()))}, {len(found.sizes)} files"


def _size(size_bytes: int) -> str:
    if size_bytes < 2**20:
        return f"{size_bytes / 2**10:.1f} KiB"
    return f"{size_bytes / 2**20:.1f} MiB"
