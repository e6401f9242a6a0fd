"""`doctor`: what is wrong with the machines, before a run is."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli import shell
from raycloud.cli.shell import AddressOption, DebugOption, PlainOption, app, errors_told
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.doctor import Facts, Level

_EXIT_CODES = (
    "Exit codes: 0 all is well, or notes only; 2 something should be changed by you; 3 a machine "
    "is unwell or the cluster does not answer (also where there are both); 4 raycloud's own fault."
)
_COLOURS = {"well": "green", "note": "cyan", "change": "yellow", "unwell": "red"}


@app.command(epilog=_EXIT_CODES)
def doctor(
    *,
    address: AddressOption = None,
    links: Annotated[
        bool, typer.Option("--links", help="Measure how fast links are: a second for each node.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
    plain: PlainOption = False,
    debug: DebugOption = False,
) -> None:
    """Look at this machine, and with --address at a cluster: what is wrong, and what would do.

    Nothing is changed. Versions, token, temporary folder, memory, shared memory, GPUs; of a
    cluster also its nodes, clocks and links.
    """
    if links and address is None:
        raise typer.BadParameter(
            "links are those of a cluster: add --address", param_hint="--links"
        )
    with errors_told(debug=debug):
        from raycloud.doctor import examine, exit_code
        from raycloud.doctor.findings import as_json as told_as_json
        from raycloud.doctor.findings import as_text

        facts = _facts(address, links=links)
        findings = examine(facts)
        if as_json:
            typer.echo(told_as_json(facts, findings))
        else:
            bare = shell.is_plain(sys.stdout, plain=plain)
            typer.echo(as_text(facts, findings, _bare if bare else _painted))
    raise typer.Exit(exit_code(findings))


def _facts(address: str | None, *, links: bool) -> Facts:
    from raycloud.doctor import Settings, facts_here
    from raycloud.doctor.gather import gpu_devices

    gpus = None
    if gpu_devices():
        from raycloud.on_ray.checkup import gpus_here

        gpus = gpus_here()
    settings = Settings.from_mapping(os.environ)
    facts = facts_here(settings, gpus=gpus)
    if address is None:
        return facts
    from raycloud.on_ray.checkup import checkup

    found = checkup(address, links=links, clock=SystemClock(), tls=settings.tls)
    return replace(facts, cluster=found)


def _bare(_level: Level, word: str) -> str:
    return f"{word:<6}"


def _painted(level: Level, word: str) -> str:
    return typer.style(f"{word:<6}", fg=_COLOURS[level.word], bold=True)
