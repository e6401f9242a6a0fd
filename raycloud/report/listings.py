"""How runs stand, for people and for programs: one run as a page, several as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.errors import JobError, SpecError
from raycloud.report.figures import byte_count, duration, figure, printable_line

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache, Held, Listing, Removal
    from raycloud.report.run_status import RunStatus

FORMAT = 1

_HEAD = (
    "run", "status", "step", "loss", "samples/s", "left", "workers", "recoveries", "checkpoint",
    "cost",
)  # fmt: skip
_MINUTE_S = 60.0
_WORDS = 2  # columns that are words, and stand to the left


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A run in a list.

    Attributes:
        id: What it is called in `raycloud status`, `logs` and `stop`.
        card: How it stands.
        place: Where its driver is, for people.
    """

    id: str
    card: RunStatus
    place: str = ""

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {"id": self.id, "place": self.place, **self.card.to_record()}


def record_of(runs: Sequence[Listed], place: str) -> dict[str, Any]:
    """The list as JSON-ready values; `place` says whose it is."""
    return {"format": FORMAT, "place": place, "runs": [run.to_record() for run in runs]}


def listed_text(runs: Sequence[Listed], place: str, now_t: float) -> str:
    """A line for each run."""
    if not runs:
        return f"{printable_line(place)}: no runs"
    rows = [_HEAD, *(_row(run, now_t) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [printable_line(place), ""]
    for row in rows:
        cells = [
            cell.ljust(width) if at < _WORDS else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def standing_text(run: Listed, now_t: float) -> str:
    """How one run stands."""
    card = run.card
    rows = [
        ("error", card.error or ""),
        ("job", card.job),
        ("run", card.run if card.run != run.id else ""),
        ("loss", "" if card.loss is None else figure(card.loss)),
        ("speed", _speed(card)),
        ("workers", _workers(card)),
        ("recoveries", card.recoveries_text),
        ("checkpoint", _checkpoint(card, now_t)),
        ("exchanged", f"{byte_count(card.bytes_sent)} sent" if card.bytes_sent else ""),
        ("cost so far", "" if card.cost is None else figure(card.cost)),
        ("run directory", card.directory + (f" on {run.place}" if run.place else "")),
        ("as of", "" if card.has_ended else ago(now_t - card.t)),
    ]
    shown = [(label, printable_line(text)) for label, text in rows if text]
    width = max(len(label) for label, _ in shown) + 2
    title = printable_line(f"{run.id} {card.status}: step {_step(card)}")
    return "\n".join([title, "", *(f"  {label:<{width}}{text}" for label, text in shown)])


def ago(seconds: float) -> str:
    """How long ago something was.

    >>> ago(0.4), ago(12.3), ago(3725.0), ago(2.6 * 86400)
    ('just now', '12 s ago', '1:02:05 ago', '2 d ago')
    """
    if seconds < 1:
        return "just now"
    days = int(seconds // 86_400)
    if days > 1:
        return f"{days} d ago"
    return f"{duration(seconds) if seconds >= _MINUTE_S else f'{seconds:.0f} s'} ago"


def _row(run: Listed, now_t: float) -> tuple[str, ...]:
    card = run.card
    saved = "-"
    if card.checkpoint_t is not None:
        saved = f"{card.checkpoint_step}, {ago(now_t - card.checkpoint_t)}"
    name = run.id if run.id.endswith(card.run) else f"{run.id} ({card.run})"
    return tuple(
        printable_line(cell)
        for cell in (
            name,
            card.status,
            _step(card),
            figure(card.loss),
            figure(card.samples_per_s),
            "-" if card.left_s is None else duration(card.left_s),
            str(card.workers),
            card.recoveries_text,
            saved,
            figure(card.cost),
        )
    )


def _step(card: RunStatus) -> str:
    return f"{card.step}/{card.steps}" if card.steps else str(card.step)


def _speed(card: RunStatus) -> str:
    parts = []
    if card.samples_per_s is not None:
        parts.append(f"{figure(card.samples_per_s)} samples/s")
    if card.left_s is not None:
        parts.append(f"{duration(card.left_s)} left")
    return " · ".join(parts)


def _workers(card: RunStatus) -> str:
    if not card.members:
        return f"{card.ready} of {card.workers} ready" if card.workers else ""
    numbers = " ".join(map(str, card.members))
    shares = " ".join(map(str, card.shares))
    return f"{card.workers} (members {numbers}, shares {shares}) · generation {card.generation}"


def _checkpoint(card: RunStatus, now_t: float) -> str:
    if card.checkpoint_t is None:
        return "none"
    return f"after step {card.checkpoint_step}, {ago(now_t - card.checkpoint_t)}"


CACHE_FORMAT = 1

_UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 604800}
_ID_LETTERS = 12
_CACHE_HEAD = ("id", "task", "split", "source", "rows", "size", "blocks", "used")
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
        lines += ["", *_table([_CACHE_HEAD, *(_cache_row(held, now_s) for held in listing.sets)])]
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
        "format": CACHE_FORMAT,
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


def _used_ago(seconds: float) -> str:
    """How long ago something was, in its largest unit.

    >>> _used_ago(5.0), _used_ago(7300.0), _used_ago(86400.0 * 20)
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


def _cache_row(held: Held, now_s: float) -> tuple[str, ...]:
    one = held.data_set
    used = (
        f"in use by {', '.join(held.users)}" if held.users else _used_ago(now_s - one.used_unix_s)
    )
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
            for cell, width, name in zip(row, widths, _CACHE_HEAD, strict=True)
        )
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines
