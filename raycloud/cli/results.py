"""What runs left: `report`, `compare`, `audit`."""

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
    RunDirectoryArgument,
    app,
    echo_json,
    errors_told,
    print_summary,
)

_NOT_EXACT = 1
AUDIT_EXIT_CODES = (
    "Exit codes: 0 exact; 1 not exact: the samples are named; 2 there is no such run, or its log "
    "or ledger is damaged; 3 a disk failed; 4 raycloud's own fault."
)


@app.command(epilog=EXIT_CODES)
def report(
    run: RunDirectoryArgument,
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
            echo_json(summary.to_record())
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
        from raycloud.report import comparison

        found = comparison.compare(runs)
        if as_json:
            echo_json(found.to_record())
            return
        width = shutil.get_terminal_size((100, 24)).columns
        lines = comparison.comparison_lines(found, width=width)
        if shell.is_plain(sys.stdout, plain=plain):
            typer.echo("\n".join(text for _, text in lines))
            return
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for style, text in lines:
            console.print(Text(text, style=style, no_wrap=True, overflow="ignore"))


@app.command(epilog=AUDIT_EXIT_CODES)
def audit(
    run: RunDirectoryArgument,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="The audit as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """Prove from a run's ledger that each sample counted exactly once, or name those that did not.

    Of a run in any state, as far as it has come. Beside it stand the members that were lost, and
    how the run recovered.
    """
    with errors_told(debug=debug):
        from raycloud.report import audit as auditing

        found = auditing.audit(run)
        if as_json:
            echo_json(found.to_record())
        else:
            typer.echo(auditing.audited_text(found))
    if not found.exact:
        raise typer.Exit(_NOT_EXACT)
