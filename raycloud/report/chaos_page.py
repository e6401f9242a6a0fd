"""What a run under faults came to, as one page of HTML: no scripts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING

from raycloud.report.chaos_text import (
    PARTS,
    apart_text,
    hit_text,
    ledger_text,
    pause_text,
    pauses_text,
)
from raycloud.report.figures import duration, percent

if TYPE_CHECKING:
    from raycloud.report.chaos import Outcome
    from raycloud.report.chaos_sides import Side

_COLOURS = {
    "computing_s": "#3f8a49",
    "data_s": "#b9cfe9",
    "exchange_s": "#7fa8d9",
    "lane_s": "#3b73b9",
    "recovering_s": "#e39a4c",
    "lost_s": "#b94a4a",
    "starting_s": "#c9ccd1",
    "beside_s": "#8d939c",
}
_MARKS = {"kill": "#b94a4a", "freeze": "#3b73b9", "terminate": "#7a5aa6", "cut": "#c26a22"}
_LOST, _STAYED, _PAUSE = "#d9a3a3", "#a9cfae", "#f6dfc4"
_BARS = {"stayed or left": _STAYED, "lost": _LOST, "pause": _PAUSE}
_WIDTH, _LEFT, _ROW = 900, 110, 24
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262b; background: #fcfcfa;
       max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 1.6em }
.well { color: #2f6d38 } .ill { color: #a13030 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: 2px 14px 2px 0; text-align: left; vertical-align: top } .n { text-align: right }
svg { width: 100%; height: auto } .key { display: inline-block; width: .8em; height: .8em }
ol { padding-left: 1.5em } code { font-size: .9em }
"""


def outcome_page(outcome: Outcome) -> str:
    """The page; every text in it is escaped."""
    title = f"{outcome.job} under faults"
    word = "the run under faults is the undisturbed run" if outcome.proved else "not proved"
    seed = "" if outcome.seed is None else f", drawn from seed {outcome.seed}"
    facts = (
        ("parameters", apart_text(outcome)),
        ("ledger", ledger_text(outcome.disturbed)),
        ("undisturbed", ledger_text(outcome.undisturbed)),
        ("workers", f"{outcome.workers} at most"),
        ("faults", f"{len(outcome.hits)}{seed}; {len(outcome.left)} did not happen"),
        ("pauses", pauses_text(outcome.disturbed)),
        ("error", outcome.disturbed.error or ""),
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{escape(outcome.job)}: <span class="{"well" if outcome.proved else "ill"}">'
        f"{word}</span></h1>",
        _table((escape(a), escape(b)) for a, b in facts if b),
        "<h2>The workers of the run under faults</h2>",
        _timeline(outcome),
        _keys((_BARS | _MARKS).items()),
        "<h2>Where the time went</h2>",
        _bars(outcome),
        _waterfall(outcome),
        "<h2>Faults</h2>",
        _list(hit_text(outcome, hit).strip() for hit in outcome.hits),
        _list(f"{fault}: did not happen, the run ended before" for fault in outcome.left),
        "<h2>Pauses</h2>",
        _list(pause_text(pause).strip() for pause in outcome.disturbed.pauses),
        "</body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _timeline(outcome: Outcome) -> str:
    """A row for each worker; what was done to it, and above all of them the pauses."""
    side = outcome.disturbed
    end_s = max([side.wall_s, *(life.to_s for life in side.lives), 1e-9])
    rows = {life.member: n for n, life in enumerate(side.lives)}
    height = _ROW * (len(rows) + 1)

    def x(second: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * min(1.0, max(0.0, second / end_s))

    shapes = []
    for pause in side.pauses:
        from_x, to_x = x(pause.detected_s), x(pause.resumed_s)
        shapes.append(_box(from_x, 0, max(2.0, to_x - from_x), height - _ROW, _PAUSE))
    for life in side.lives:
        top, width = _ROW * rows[life.member], max(1.0, x(life.to_s) - x(life.from_s))
        colour = _LOST if life.lost else _STAYED
        shapes.append(_words(0, top + 16, f"member {life.member}"))
        shapes.append(_box(x(life.from_s), top + 6, width, _ROW - 12, colour))
    for hit in outcome.hits:
        if hit.member in rows:
            at = x(hit.t - side.started_t)
            colour = _MARKS[hit.fault.action.value]
            shapes.append(_box(at - 2, _ROW * rows[hit.member] + 2, 4, _ROW - 4, colour))
    shapes += [_words(_LEFT, height - 6, "0 s"), _words(_WIDTH - 50, height - 6, duration(end_s))]
    return _svg(height, shapes, "the workers over time, with the faults")


def _bars(outcome: Outcome) -> str:
    """Two bars to one scale: the time of all workers, by what it was spent for."""
    sides = (("undisturbed", outcome.undisturbed), ("under faults", outcome.disturbed))
    longest_s = max([side.goodput.get("whole_s") or 0.0 for _, side in sides] + [1e-9])
    shapes = []
    for row, (label, side) in enumerate(sides):
        shapes.append(_words(0, 1.5 * _ROW * row + 20, label))
        at = float(_LEFT)
        for name, colour in _COLOURS.items():
            width = (_WIDTH - _LEFT) * (side.goodput.get(name) or 0.0) / longest_s
            shapes.append(_box(at, 1.5 * _ROW * row + 4, width, _ROW, colour))
            at += width
    return _svg(int(3 * _ROW), shapes, "where the time of all workers went")


def _waterfall(outcome: Outcome) -> str:
    def cell(side: Side, name: str) -> str:
        whole_s = side.goodput.get("whole_s") or 0.0
        if not whole_s:
            return "-"
        seconds = side.goodput[name]
        return f'<span class="n">{duration(seconds)}, {percent(seconds / whole_s)}</span>'

    rows = [("", "undisturbed", "under faults")]
    for label, name in PARTS:
        key = f'<span class="key" style="background:{_COLOURS[name]}"></span> {label}'
        rows.append((key, cell(outcome.undisturbed, name), cell(outcome.disturbed, name)))
    rows.append(
        ("together", cell(outcome.undisturbed, "whole_s"), cell(outcome.disturbed, "whole_s"))
    )
    return _table(rows)


def _svg(height: int, shapes: Iterable[str], title: str) -> str:
    inner = "".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-size="13" fill="#22262b"><title>{escape(title)}</title>{inner}</svg>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _words(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _keys(keys: Iterable[tuple[str, str]]) -> str:
    texts = (
        f'<span class="key" style="background:{colour}"></span> {escape(name)}'
        for name, colour in keys
    )
    return f"<p>{' &nbsp; '.join(texts)}</p>"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{''.join(lines)}</table>"


def _list(texts: Iterator[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ol>{items}</ol>" if items else ""
