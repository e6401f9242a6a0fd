"""Bars as SVG: groups of named values with their spread. Same values, same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

PAPER, INK, QUIET, RULE = "#fcfcfa", "#22262b", "#6b7280", "#d9dde1"
FILL = {"plain": ("#c9ced4", "#9aa3ad"), "ours": ("#8fb4de", "#3b73b9")}
_WIDTH = 760
_LEFT, _RIGHT = 170, 150  # names stand left of the bars, numbers right of them
_TOP = 62
_ROW, _BAR, _HEADING, _GAP = 19, 11, 24, 12
_SIZE = 12


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One value.

    Attributes:
        name: Whose.
        value: Where the bar ends; None draws none, only the words.
        low: Lower end of the spread.
        high: Upper end.
        words: What stands at its right: the number, or why there is none.
        ours: Drawn in our colour.
    """

    name: str
    value: float | None
    low: float = 0.0
    high: float = 0.0
    words: str = ""
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Group:
    """Bars under one heading."""

    heading: str
    bars: tuple[Bar, ...]


def draw(title: str, groups: Sequence[Group], *, axis: str, least_end: float) -> str:
    """The whole file. It carries its own paper, so it reads on dark pages too.

    Args:
        title: Above the bars, and what a screen reader says.
        groups: From top to bottom.
        axis: What the numbers below the title are.
        least_end: The scale goes at least that far.
    """
    end = max([least_end, *(bar.high for group in groups for bar in group.bars)])
    marks = _marks(end)
    height = _TOP + sum(_HEADING + _ROW * len(g.bars) + _GAP for g in groups)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="{_SIZE}">',
        "<!-- Drawn by benchmarks/render.py from the results: run it again. -->",
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
        _words(20, 24, title, size=14),
        *_scale(marks, axis),
    ]
    y = float(_TOP)
    for group in groups:
        parts.append(_words(20, y + 15, group.heading))
        y += _HEADING
        parts += _rules(marks, y, y + _ROW * len(group.bars))  # they pass through no heading
        for bar in group.bars:
            parts += _bar(bar, y, marks[-1])
            y += _ROW
        y += _GAP
    return "\n".join([*parts, "</svg>\n"])


def _marks(end: float) -> list[float]:
    """Round numbers from 0 to at least `end`, at most seven.

    >>> _marks(1.0), _marks(130.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 50.0, 100.0, 150.0])
    """
    size = 1e-3
    while True:
        for factor in (1, 2, 5):
            step = size * factor
            count = int(-(-(end - step * 1e-6) // step))
            if count <= 6:
                return [round(step * i, 6) for i in range(count + 1)]
        size *= 10


def _scale(marks: Sequence[float], axis: str) -> list[str]:
    numbers = (
        _words(_at(mark, marks[-1]), 46, f"{mark:g}", anchor="middle", quiet=True) for mark in marks
    )
    return [_words(20, 46, axis, quiet=True), *numbers]


def _rules(marks: Sequence[float], top: float, bottom: float) -> list[str]:
    places = (_at(mark, marks[-1]) for mark in marks)
    return [
        f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" stroke="{RULE}"/>'
        for x in places
    ]


def _bar(bar: Bar, y: float, end: float) -> list[str]:
    middle = y + _ROW / 2
    parts = [_words(_LEFT - 8, middle + 4, bar.name, anchor="end")]
    if bar.value is None:
        return [*parts, _words(_LEFT + 6, middle + 4, bar.words, quiet=True)]
    fill, edge = FILL["ours" if bar.ours else "plain"]
    width = _at(bar.value, end) - _LEFT
    parts.append(
        f'<rect x="{_LEFT}" y="{middle - _BAR / 2:g}" width="{width:g}" height="{_BAR}" '
        f'fill="{fill}" stroke="{edge}"/>'
    )
    if bar.high > bar.low:
        low, high = _at(bar.low, end), _at(bar.high, end)
        parts.append(
            f'<path d="M{low:g} {middle - 3:g}v6M{low:g} {middle:g}H{high:g}'
            f'M{high:g} {middle - 3:g}v6" stroke="{INK}" fill="none"/>'
        )
    parts.append(_words(_WIDTH - _RIGHT + 10, middle + 4, bar.words))
    return parts


def _at(value: float, end: float) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / end, 1)


def _words(
    x: float, y: float, text: str, *, anchor: str = "start", quiet: bool = False, size: int = _SIZE
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{QUIET if quiet else INK}">{escape(text, quote=False)}</text>'
    )
