"""`cache ls` and `cache rm`: what the cache of blocks holds on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycloud.cli.shell import app, command, echo_json
from raycloud.clock import SystemClock
from raycloud.errors import JobError, SpecError
from raycloud.report.figures import byte_count, counted, printable_line, table

if TYPE_CHECKING:
    from raycloud.data.cache import BlockCache, Listing, Removal

FORMAT = 1

_HEAD = ("id", "task", "split", "source", "rows", "size", "blocks", "used")
_NUMBERS = {"rows", "size", "blocks"}
_UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 604800}
_ID_LETTERS = 12

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


@command("ls", of=cache)
def cache_ls(
    *,
    directory: CacheOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    """List the data sets in the cache: what they are, how large, when they were last used."""
    listing = _cache(directory).ls()
    if as_json:
        echo_json(cache_record(listing))
    else:
        typer.echo(cache_text(listing, SystemClock().unix_s()))


@command("rm", of=cache)
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
) -> None:
    """Remove data sets that no run uses from the cache; a run that needs them makes them again."""
    if bool(ids) + everything + (older_than is not None) != 1:
        raise typer.BadParameter("give IDs, --all or --older-than AGE", param_hint="ID")
    now_s = SystemClock().unix_s()
    before_s = None if older_than is None else now_s - age_s(older_than)
    removal = _cache(directory).rm(ids or None, used_before_unix_s=before_s)
    if ids and removal.refused:
        raise JobError(_removal_text(removal), hint="wait for the run to end, or stop it")
    typer.echo(_removal_text(removal))


def _cache(directory: Path | None) -> BlockCache:
    from raycloud.data.cache import BlockCache
    from raycloud.spec.environment import Environment

    return BlockCache(directory or Environment.from_process().cache)


def cache_text(listing: Listing, now_s: float) -> str:
    """A line for each data set, the one last used first."""
    root = printable_line(str(listing.root))
    if not listing.sets and not listing.bytes:
        return f"{root}: nothing is cached"
    lines = [f"{root}: {counted(len(listing.sets), 'data set')}, {byte_count(listing.bytes)}"]
    if listing.sets:
        rows: list[Sequence[str]] = [_HEAD]
        for held in listing.sets:
            one, users = held.data_set, ", ".join(held.users)
            cells = (
                one.id[:_ID_LETTERS],
                one.task,
                one.split,
                one.source,
                str(one.rows) if one.complete else "unfinished",
                byte_count(held.bytes),
                str(held.blocks),
                f"in use by {users}" if users else _used_ago(now_s - one.used_unix_s),
            )
            rows.append([printable_line(cell) for cell in cells])
        lines += ["", *table(rows, left=[name not in _NUMBERS for name in _HEAD])]
    if listing.loose_blocks:
        loose = f"{counted(listing.loose_blocks, 'block')} ({byte_count(listing.loose_bytes)})"
        verb, them = ("belong", "them") if listing.loose_blocks > 1 else ("belongs", "it")
        rest = f"{verb} to no data set: `raycloud cache rm --all` removes {them}, too"
        lines += ["", f"{loose} {rest}"]
    return "\n".join(lines)


def cache_record(listing: Listing) -> dict[str, Any]:
    """The same as JSON-ready values."""
    names = ("id", "task", "split", "source", "rows", "bad_rows", "complete")
    return {
        "format": FORMAT,
        "root": str(listing.root),
        "bytes": listing.bytes,
        "loose_blocks": listing.loose_blocks,
        "loose_bytes": listing.loose_bytes,
        "data_sets": [
            {
                **{name: getattr(held.data_set, name) for name in names},
                "blocks": held.blocks,
                "bytes": held.bytes,
                "used_unix_s": held.data_set.used_unix_s,
                "users": list(held.users),
            }
            for held in listing.sets
        ],
    }


def age_s(text: str) -> float:
    """Seconds of an age as people write it.

    >>> age_s("90m"), age_s("30d"), age_s("0h")
    (5400.0, 2592000.0, 0.0)

    Raises:
        SpecError: It is not an age.
    """
    found = re.fullmatch(r"(\d{1,9})([mhdw])", text.strip())
    if found is None:
        raise SpecError(
            "--older-than",
            text,
            "is not an age",
            hint="write a number and m, h, d or w (minutes, hours, days, weeks), as in 30d",
        )
    return float(found[1]) * _UNITS_S[found[2]]


def _removal_text(removal: Removal) -> str:
    """What is gone, and what is still there as it is in use."""
    gone = f"removed {counted(len(removal.removed), 'data set')}: "
    lines = [f"{gone}{counted(removal.blocks, 'block')}, {byte_count(removal.bytes)}"]
    for held in removal.refused:
        users = printable_line(", ".join(held.users))
        lines.append(f"kept {held.data_set.id[:_ID_LETTERS]}, in use by {users}")
    return "\n".join(lines)


def _used_ago(seconds: float) -> str:
    """How long ago something was, in its largest unit.

    >>> _used_ago(5.0), _used_ago(7300.0), _used_ago(86400.0 * 20)
    ('just now', '2 h ago', '2 w ago')
    """
    for unit, unit_s in reversed(_UNITS_S.items()):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit} ago"
    return "just now"
