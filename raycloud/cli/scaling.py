"""The workers of a run that goes on: `scale`."""

from __future__ import annotations

from typing import Annotated

import typer

from raycloud.cli.shell import EXIT_CODES, DebugOption, app, errors_told
from raycloud.cli.standing import InsecureOption, JobsAddress, Run, jobs_of, local_run


@app.command(epilog=EXIT_CODES)
def scale(
    run: Run,
    workers: Annotated[
        str, typer.Argument(metavar="WORKERS", help="How many, or the fewest and the most: 4, 2:6.")
    ],
    *,
    address: JobsAddress = None,
    insecure: InsecureOption = False,
    debug: DebugOption = False,
) -> None:
    """Change how many workers a run may have while it goes on; returns once it is asked.

    More join as soon as there are machines for them, and the last ones leave between two steps. The
    job file keeps its own range, which a resumed run begins with.
    """
    with errors_told(debug=debug):
        from raycloud.report.local import ask_driver

        if (directory := local_run(run, address)) is not None:
            typer.echo(f"asked {run} for {ask_driver(directory, workers)} workers")
            return
        jobs = jobs_of(address, insecure=insecure)
        found = jobs.find(run)
        for line in jobs.asked(found, ["scale", found.directory, workers]):
            typer.echo(line)
