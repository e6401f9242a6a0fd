"""What a run left: `report`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from raycloud.cli import shell
from raycloud.cli.completion import complete_run
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


@app.command(epilog=EXIT_CODES)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN RUN...", help="The directories of the runs.", autocompletion=complete_run
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as JSON.")] = False,
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Set runs side by side: in what their jobs differ, then what came of them.

    Runs may be in any state, also still going. Percentages are the distance from the first run.
    """
    if len(runs) < 2:  # noqa: PLR2004 - one run has nothing to be compared with
        raise typer.BadParameter("give two runs or more", param_hint="RUN RUN...")
    with errors_told(debug=debug):
        from raycloud.report.comparison import compare as compared

        comparison = compared(runs)
        if as_json:
            import json

            typer.echo(json.dumps(comparison.to_record(), indent=2, allow_nan=False))
            return
        from raycloud.report.comparison import compared_renderable, compared_text

        width = shutil.get_terminal_size((100, 24)).columns
        if shell.is_plain(sys.stdout, plain=plain):
            typer.echo(compared_text(comparison, width=width))
            return
        from rich.console import Console

        Console(highlight=False).print(compared_renderable(comparison, width=width))


_NOT_EXACT = 1
AUDIT_EXIT_CODES = (
    "Exit codes: 0 exact; 1 not exact: the samples are named; 2 there is no such run, or its log "
    "or ledger is damaged; 3 a disk failed; 4 raycloud's own fault."
)


@app.command(epilog=AUDIT_EXIT_CODES)
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
        from raycloud.report.audit import audit as audited

        found = audited(run)
        if as_json:
            import json

            typer.echo(json.dumps(found.to_record(), indent=2, allow_nan=False))
        else:
            from raycloud.report.audit import audited_text

            typer.echo(audited_text(found))
    if not found.exact:
        raise typer.Exit(_NOT_EXACT)
