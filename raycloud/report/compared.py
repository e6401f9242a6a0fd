"""A comparison of runs for people: plain lines, or a rich renderable. Prints nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.redact import redact_text
from raycloud.report.comparison import ABSENT, Comparison, Outcome
from raycloud.report.figures import (
    byte_count,
    duration,
    figure,
    percent,
    printable_line,
    sparkline,
)
from raycloud.report.recoveries import counts_text
from raycloud.spec.schema import plain_word

if TYPE_CHECKING:
    from rich.console import Group

_CURVE_CELLS = 16
_MOST_CELL = 48  # characters; longer values of a job are cut
_GAP = 3
_INDENT = 2
_STYLES = {"runs": "cyan", "title": "bold", "row": ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A part of the comparison: its title, and rows of a label and a cell per run."""

    title: str
    rows: list[tuple[str, list[str]]]


def compared_text(comparison: Comparison, *, width: int) -> str:
    """The comparison as plain lines.

    Args:
        comparison: What is compared.
        width: Characters in a line. Runs that do not fit beside the others stand below.
    """
    return "\n".join(text for _, text in _lines(comparison, width))


def compared_renderable(comparison: Comparison, *, width: int) -> Group:
    """The comparison for a terminal: the same lines, in colour."""
    from rich.console import Group  # noqa: PLC0415 - only a terminal needs it
    from rich.text import Text  # noqa: PLC0415

    return Group(
        *(
            Text(text, style=_STYLES[kind], no_wrap=True, overflow="ignore")
            for kind, text in _lines(comparison, width)
        )
    )


def _lines(comparison: Comparison, width: int) -> list[tuple[str, str]]:
    """Each line behind its kind: `runs`, `title` or `row`."""
    names, tables = _names(comparison), _tables(comparison)
    first = max((len(label) for table in tables for label, _ in table.rows), default=0)
    columns = [
        max(len(text) for text in (name, *(cells[at] for t in tables for _, cells in t.rows)))
        for at, name in enumerate(names)
    ]
    lines: list[tuple[str, str]] = []
    for picked in _fitting(columns, width - first - _INDENT):
        lines += [("row", "")] * (2 if lines else 0)
        lines.append(("runs", _line("", first, [(names[at], columns[at]) for at in picked])))
        for table in tables:
            lines += [("row", ""), ("title", table.title)]
            for label, cells in table.rows:
                line = _line(label, first, [(cells[at], columns[at]) for at in picked])
                lines.append(("row", line))
    return lines


def _names(comparison: Comparison) -> list[str]:
    """The directories without what they all begin with, as far as that leaves them apart."""
    paths = [str(run) for run in comparison.runs]
    above = {os.path.dirname(path) for path in paths}  # noqa: PTH120 - of texts as they were given
    shown = [os.path.basename(path) for path in paths]  # noqa: PTH119
    return [printable_line(name) for name in (shown if len(above) == 1 and all(shown) else paths)]


def _tables(comparison: Comparison) -> list[Table]:
    differs = [
        (printable_line(name), [_value(value) for value in values])
        for name, values in comparison.differs.items()
    ]
    title = "what differs in the jobs" if differs else "the jobs are the same"
    came = [(outcome.label, _cells(outcome, values)) for outcome, values in comparison.outcomes()]
    curves = _curves(comparison)
    if any(curves):
        at = next((i + 1 for i, (label, _) in enumerate(came) if label == "loss"), len(came))
        came.insert(at, ("loss curve", curves))
    return [Table(title=title, rows=differs), Table(title="what came of them", rows=came)]


def _curves(comparison: Comparison) -> list[str]:
    """The curves of the losses, all on one scale."""
    curves = [[loss for _, loss in summary.loss_curve] for summary in comparison.summaries]
    known = [loss for curve in curves for loss in curve if loss is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return [sparkline(curve, width=_CURVE_CELLS, low=low, high=high) for curve in curves]


def _cells(outcome: Outcome, values: Sequence[Any]) -> list[str]:
    return [_shown(outcome, value) + _off(outcome, value, values[0]) for value in values]


def _shown(outcome: Outcome, value: Any) -> str:
    if value is None:
        return "-"
    match outcome.kind:
        case "seconds":
            return duration(value)
        case "bytes":
            return byte_count(value)
        case "share":
            return percent(value)
        case "figure":
            return figure(value)
        case "counts":
            return counts_text(value)
        case "list":
            return " ".join(map(str, value))
        case _:
            return printable_line(str(value))


def _off(outcome: Outcome, value: Any, first: Any) -> str:
    """How far a value is from that of the first run; nothing where they are the same."""
    if not outcome.relative or value is None or not first or not math.isfinite(first):
        return ""
    off = f"{100 * (value / first - 1):+.1f}%"
    return "" if off in {"+0.0%", "-0.0%"} else f" {off}"


def _value(value: Any) -> str:
    if value is ABSENT:
        return "-"
    text = printable_line(redact_text(plain_word(value)))
    return text if len(text) <= _MOST_CELL else text[: _MOST_CELL - 1] + "…"


def _fitting(columns: Sequence[int], width: int) -> Iterator[list[int]]:
    """The numbers of the columns that stand side by side, at least one at a time."""
    picked: list[int] = []
    used = 0
    for at, column in enumerate(columns):
        if picked and used + _GAP + column > width:
            yield picked
            picked, used = [], 0
        picked.append(at)
        used += _GAP + column
    if picked:
        yield picked


def _line(label: str, first: int, cells: Sequence[tuple[str, int]]) -> str:
    padded = "".join(" " * _GAP + text.ljust(width) for text, width in cells)
    return f"{'':{_INDENT}}{label:<{first}}{padded}".rstrip()
