"""What a run's ledger proves: `audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raycloud.cli.completing import complete_run
from raycloud.cli.shell import DebugOption, app, errors_told

_NOT_EXACT = 1
EXIT_CODES = (
    "Exit codes: 0 exact; 1 not exact: the samples are named; 2 there is no such run, or its log "
    "or ledger is damaged; 3 a disk failed; 4 raycloud's own fault."
)


@app.command(epilog=EXIT_CODES)
def audit(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The directory of a run.", autocompletion=complete_run),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The audit as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """Prove from a run's ledger that each sample counted exactly once, or name those that did not.

    Of a run in any state, as far as it has come. Beside it stand the members that were lost, and
    how the run recovered.
    """
    with errors_told(debug=debug):
        from raycloud.report.auditing import audit as audited

        found = audited(run)
        if as_json:
            import json

            typer.echo(json.dumps(found.to_record(), indent=2, allow_nan=False))
        else:
            from raycloud.report.audited import audited_text

            typer.echo(audited_text(found))
    if not found.exact:
        raise typer.Exit(_NOT_EXACT)
