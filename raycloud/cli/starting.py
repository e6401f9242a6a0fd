"""`init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from raycloud.cli.shell import EXIT_CODES, DebugOption, app, errors_told

_DEFAULT = "classifier"


def _templates(incomplete: str) -> list[tuple[str, str]]:
    from raycloud.project import TEMPLATES

    return [(t.name, t.about) for t in TEMPLATES.values() if t.name.startswith(incomplete)]


@app.command(epilog=EXIT_CODES)
def init(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where; it is made if it is not there.")
    ] = Path(),
    *,
    template: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TEMPLATE",
            help="What to start from: classifier or text.",
            autocompletion=_templates,
        ),
    ] = _DEFAULT,
    debug: DebugOption = False,
) -> None:
    """Write a task, a job file with its schema, and a README that run at once.

    Nothing is overwritten.
    """
    with errors_told(debug=debug):
        from raycloud.project import TEMPLATES, write_project

        if template not in TEMPLATES:
            known = ", ".join(TEMPLATES)
            raise typer.BadParameter(f"{template!r} is none of {known}", param_hint="--from")
        written = write_project(directory, TEMPLATES[template])
        job = shlex.quote(str(directory / "job.yaml"))
        typer.echo(f"wrote {', '.join(str(path) for path in written)}")
        typer.echo(f"\ntry it:    raycloud train {job} --try")
        typer.echo(f"train it:  raycloud train {job}")
