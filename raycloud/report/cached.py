"""What a cache holds, and what was removed from it, as plain lines. Prints nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raycloud.errors import JobError, SpecError
from raycloud.report.figures import byte_count, printable_line

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache, Held, Listing, Removal

FORMAT = 1

_UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 604800}
_ID_LETTERS = 12
_HEAD = ("id", "task", "split", "source", "rows", "size", "blocks", "used")
_NUMBERS = {"rows", "size", "blocks"}


def listed(cache: BlockCache, clock: Clock, *, as_json: bool) -> str:
    """What `raycloud cache ls` prints."""
    listing = cache.ls()
    if as_json:
        return json.dumps(listing_record(listing), indent=2)
    return listing_text(listing, clock.unix_s())


def removed(
    cache: BlockCache, clock: Clock, ids: Sequence[str] | None, older_than: str | None
) -> str:
    """What `raycloud cache rm` prints, once it is done.

    Raises:
        JobError: Some of those named are in use; the others are gone.
        DataError: None is called so.
        SpecError: `older_than` is not an age.
    """
    before_s = None if older_than is None else clock.unix_s() - age_s(older_than)
    removal = cache.rm(ids or None, used_before_unix_s=before_s)
    if ids and removal.refused:
        raise JobError(removal_text(removal), hint="wait for the run to end, or stop it")
    return removal_text(removal)


def listing_text(listing: Listing, now_s: float) -> str:
    """A line for each data set, the one last used first."""
    root = printable_line(str(listing.root))
    if not listing.sets and not listing.bytes:
        return f"{root}: nothing is cached"
    lines = [f"{root}: {_sets(len(listing.sets))}, {byte_count(listing.bytes)}"]
    if listing.sets:
        lines += ["", *_table([_HEAD, *(_row(held, now_s) for held in listing.sets)])]
    if listing.loose_blocks:
        loose = f"{_blocks(listing.loose_blocks)} ({byte_count(listing.loose_bytes)})"
        rest = "belongs to no data set: `raycloud cache rm --all` removes it, too"
        if listing.loose_blocks > 1:
            rest = "belong to no data set: `raycloud cache rm --all` removes them, too"
        lines += ["", f"{loose} {rest}"]
    return "\n".join(lines)


def listing_record(listing: Listing) -> dict[str, Any]:
    """The same as JSON-ready values."""
    return {
        "format": FORMAT,
        "root": str(listing.root),
        "bytes": listing.bytes,
        "loose_blocks": listing.loose_blocks,
        "loose_bytes": listing.loose_bytes,
        "data_sets": [
            {
                "id": held.data_set.id,
                "task": held.data_set.task,
                "split": held.data_set.split,
                "source": held.data_set.source,
                "rows": held.data_set.rows,
                "bad_rows": held.data_set.bad_rows,
                "complete": held.data_set.complete,
                "blocks": held.blocks,
                "bytes": held.bytes,
                "used_unix_s": held.data_set.used_unix_s,
                "users": list(held.users),
            }
            for held in listing.sets
        ],
    }


def removal_text(removal: Removal) -> str:
    """What is gone, and what is still there as it is in use."""
    gone = f"removed {_sets(len(removal.removed))}: {_blocks(removal.blocks)}"
    lines = [f"{gone}, {byte_count(removal.bytes)}"]
    for held in removal.refused:
        users = printable_line(", ".join(held.users))
        lines.append(f"kept {held.data_set.id[:_ID_LETTERS]}, in use by {users}")
    return "\n".join(lines)


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


def ago(seconds: float) -> str:
    """How long ago something was, in its largest unit.

    >>> ago(5.0), ago(7300.0), ago(86400.0 * 20)
    ('just now', '2 h ago', '2 w ago')
    """
    for unit, unit_s in reversed(_UNITS_S.items()):
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit} ago"
    return "just now"


def _sets(count: int) -> str:
    return "1 data set" if count == 1 else f"{count} data sets"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"


def _row(held: Held, now_s: float) -> tuple[str, ...]:
    one = held.data_set
    used = f"in use by {', '.join(held.users)}" if held.users else ago(now_s - one.used_unix_s)
    return (
        one.id[:_ID_LETTERS],
        printable_line(one.task),
        one.split,
        printable_line(one.source),
        str(one.rows) if one.complete else "unfinished",
        byte_count(held.bytes),
        str(held.blocks),
        printable_line(used),
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
            for cell, width, name in zip(row, widths, _HEAD, strict=True)
        )
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
