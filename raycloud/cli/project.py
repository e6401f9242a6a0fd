"""`init`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli.completion import complete_job
from raycloud.cli.shell import EXIT_CODES, DebugOption, SetOption, app, errors_told, load
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.data.cache import BlockCache

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
        from raycloud.spec import RunDirectory
        from raycloud.spec import load as jobs

        run = RunDirectory(job)
        asked = load(run.job_yaml if run.job_yaml.is_file() else job, overrides)
        if as_json:
            import json

            found = jobs.differences(asked)
            record = (
                {f: {"value": value, "default": default} for f, (value, default) in found.items()}
                if diff
                else jobs.kept_values(asked)
            )
            typer.echo(json.dumps({"format": FORMAT, "job": record}, indent=2, allow_nan=False))
            return
        shown = jobs.dump_minimal if diff else jobs.dump_commented if comments else jobs.dump_job
        typer.echo(shown(asked), nl=False)


cache = typer.Typer(help="Show or remove preprocessed rows on this machine.", no_args_is_help=True)
app.add_typer(cache, name="cache")

CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="The cache, where a job names one (data.cache.path); else RAYCLOUD_CACHE, or "
        "raycloud in the user's cache directory.",
    ),
]


@cache.command("ls", epilog=EXIT_CODES)
def cache_ls(
    *,
    directory: CacheOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
    debug: DebugOption = False,
) -> None:
    """List the data sets in the cache: what they are, how large, when they were last used."""
    with errors_told(debug=debug):
        from raycloud.report import listings

        typer.echo(listings.listed(_cache(directory), SystemClock(), as_json=as_json))


@cache.command("rm", epilog=EXIT_CODES)
def cache_rm(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Data sets, by their first letters.")
    ] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All data sets.")] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Those last used before, e.g. 30d or 12h.")
    ] = None,
    directory: CacheOption = None,
    debug: DebugOption = False,
) -> None:
    """Remove data sets that no run uses from the cache; a run that needs them makes them again."""
    if bool(ids) + everything + (older_than is not None) != 1:
        raise typer.BadParameter("give IDs, --all or --older-than AGE", param_hint="ID")
    with errors_told(debug=debug):
        from raycloud.report import listings

        typer.echo(listings.removed(_cache(directory), SystemClock(), ids, older_than))


def _cache(directory: Path | None) -> BlockCache:
    from raycloud.data.cache import BlockCache
    from raycloud.spec.environment import Environment

    return BlockCache(directory or Environment.from_process().cache)
