"""What a run left: `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raycloud.cli.completing import complete_run
from raycloud.cli.shell import (
    EXIT_CODES,
    DebugOption,
    PlainOption,
    app,
    errors_told,
    print_summary,
)


@app.command(epilog=EXIT_CODES)
def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The directory of a run.", autocompletion=complete_run),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Show the summary of a run, also of one that is still going or was killed."""
    with errors_told(debug=debug):
        from raycloud.report.summary import of_run

        summary = of_run(run)
        if as_json:
            import json

            typer.echo(json.dumps(summary.to_record(), indent=2, allow_nan=False))
        else:
            print_summary(summary, run, plain=plain)
