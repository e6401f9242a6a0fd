"""`cache ls` and `cache rm`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raycloud.cli.shell import EXIT_CODES, DebugOption, app, errors_told
from raycloud.clock import SystemClock

if TYPE_CHECKING:
    from raycloud.data.cache import BlockCache

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
        from raycloud.report import cached

        typer.echo(cached.listed(_cache(directory), SystemClock(), as_json=as_json))


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
        from raycloud.report import cached

        typer.echo(cached.removed(_cache(directory), SystemClock(), ids, older_than))


def _cache(directory: Path | None) -> BlockCache:
    from raycloud.data.cache import BlockCache
    from raycloud.spec.environment import Environment

    return BlockCache(directory or Environment.from_process().cache)
