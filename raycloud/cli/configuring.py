"""`config show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raycloud.cli.completing import complete_job
from raycloud.cli.shell import EXIT_CODES, DebugOption, SetOption, app, errors_told, load

FORMAT = 1

config = typer.Typer(help="Look at jobs.", no_args_is_help=True)
app.add_typer(config, name="config")


@config.command("show", epilog=EXIT_CODES)
def show(
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB", help="A job file, or a run's directory.", autocompletion=complete_job
        ),
    ],
    *,
    overrides: SetOption = None,
    comments: Annotated[
        bool, typer.Option("--comments", help="Above each field, what it means and takes.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Only what is not at its default, beside the default.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The fields as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """Show a job with every field, checked, after --set; the text is a job file again.

    Secrets in URLs and settings are left out.
    """
    if comments and (diff or as_json):
        raise typer.BadParameter("goes with neither --diff nor --json", param_hint="--comments")
    with errors_told(debug=debug):
        from raycloud.spec import RunDirectory, display

        run = RunDirectory(job)
        asked = load(run.job_yaml if run.job_yaml.is_file() else job, overrides)
        if as_json:
            import json

            found = display.differences(asked)
            record = (
                {f: {"value": value, "default": default} for f, (value, default) in found.items()}
                if diff
                else display.values_of(asked)
            )
            typer.echo(json.dumps({"format": FORMAT, "job": record}, indent=2, allow_nan=False))
            return
        shown = display.minimal if diff else display.commented if comments else display.plain
        typer.echo(shown(asked), nl=False)
