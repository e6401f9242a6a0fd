"""Before and beside a run: `init`, `config show`, `doctor`."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli.shell import (
    AddressOption,
    PlainOption,
    SetOption,
    app,
    command,
    complete_job,
    echo_json,
    is_plain,
)
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.doctor import Facts, Level

_DEFAULT = "classifier"


def _templates(incomplete: str) -> list[tuple[str, str]]:
    from raycloud.project.templates import TEMPLATES

    return [(name, about) for name, about in TEMPLATES.items() if name.startswith(incomplete)]


@command()
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
) -> None:
    """Write a task, a job file with its schema, and a README that run at once.

    Nothing is overwritten.
    """
    from raycloud.project.templates import TEMPLATES, write_project

    if template not in TEMPLATES:
        known = ", ".join(TEMPLATES)
        raise typer.BadParameter(f"{template!r} is none of {known}", param_hint="--from")
    written = write_project(directory, template)
    job = shlex.quote(str(directory / "job.yaml"))
    typer.echo(f"wrote {', '.join(str(path) for path in written)}")
    typer.echo(f"\ntry it:    raycloud train {job} --try")
    typer.echo(f"train it:  raycloud train {job}")


FORMAT = 1

config = typer.Typer(help="Look at jobs.", no_args_is_help=True)
app.add_typer(config, name="config")


@command("show", of=config)
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
) -> None:
    """Show a job with every field, checked, after --set; the text is a job file again.

    Secrets in URLs and settings are left out.
    """
    if comments and (diff or as_json):
        raise typer.BadParameter("goes with neither --diff nor --json", param_hint="--comments")
    from raycloud.spec import RunDirectory
    from raycloud.spec import load as jobs

    run = RunDirectory(job)
    from raycloud.spec import load_job

    asked = load_job(run.job_yaml if run.job_yaml.is_file() else job, overrides or ())
    if as_json:
        found = jobs.differences(asked)
        record = (
            {f: {"value": value, "default": default} for f, (value, default) in found.items()}
            if diff
            else jobs.kept_values(asked)
        )
        echo_json({"format": FORMAT, "job": record})
        return
    shown = jobs.dump_minimal if diff else jobs.dump_commented if comments else jobs.dump_job
    typer.echo(shown(asked), nl=False)


_EXIT_CODES = (
    "Exit codes: 0 all is well, or notes only; 2 something should be changed by you; 3 a machine "
    "is unwell or the cluster does not answer (also where there are both); 4 raycloud's own fault."
)
_COLOURS = {"well": "green", "note": "cyan", "change": "yellow", "unwell": "red"}


@command(epilog=_EXIT_CODES)
def doctor(
    *,
    address: AddressOption = None,
    links: Annotated[
        bool, typer.Option("--links", help="Measure how fast links are: a second for each node.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
    plain: PlainOption = False,
) -> None:
    """Look at this machine, and with --address at a cluster: what is wrong, and what would do.

    Nothing is changed. Versions, token, temporary folder, memory, shared memory, GPUs; of a
    cluster also its nodes, clocks and links.
    """
    if links and address is None:
        raise typer.BadParameter(
            "links are those of a cluster: add --address", param_hint="--links"
        )
    from raycloud.doctor import examine, exit_code
    from raycloud.doctor.findings import as_json as told_as_json
    from raycloud.doctor.findings import as_text

    facts = _facts(address, links=links)
    findings = examine(facts)
    if as_json:
        typer.echo(told_as_json(facts, findings))
    else:
        bare = is_plain(sys.stdout, plain=plain)

        def painted(level: Level, word: str) -> str:
            text = f"{word:<6}"
            return text if bare else typer.style(text, fg=_COLOURS[level.word], bold=True)

        typer.echo(as_text(facts, findings, painted))
    raise typer.Exit(exit_code(findings))


def _facts(address: str | None, *, links: bool) -> Facts:
    from raycloud.doctor import Settings, facts_here
    from raycloud.doctor.gather import gpu_devices

    gpus = None
    if gpu_devices():
        from raycloud.on_ray.survey import gpus_here

        gpus = gpus_here()
    settings = Settings.from_mapping(os.environ)
    facts = facts_here(settings, gpus=gpus)
    if address is None:
        return facts
    from raycloud.on_ray.survey import checkup

    found = checkup(address, links=links, clock=SystemClock(), tls=settings.tls)
    return replace(facts, cluster=found)
