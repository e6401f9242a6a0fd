"""What several runs left: `compare`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from raycloud.cli import shell
from raycloud.cli.completing import complete_run
from raycloud.cli.shell import EXIT_CODES, DebugOption, PlainOption, app, errors_told


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
        from raycloud.report.compared import compared_renderable, compared_text

        width = shutil.get_terminal_size((100, 24)).columns
        if shell.is_plain(sys.stdout, plain=plain):
            typer.echo(compared_text(comparison, width=width))
            return
        from rich.console import Console

        Console(highlight=False).print(compared_renderable(comparison, width=width))
