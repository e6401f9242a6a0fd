"""A simulated job as people read it: a table of sizes, one of policies, and a page with charts.

Nothing is fetched: the page is one file that opens anywhere.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raycloud.report.figures import byte_count, duration, figure, percent, printable_line, table

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE, _RIGHT = 640, 260, 70, 42, 18, 16
_GRID, _BAR, _OWN = "#9fb0bc", "#7a8b99", "#0b6e4f"
_LINES = ("#2f5d9b", "#0b6e4f", "#c26a22", "#b23a48")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;"
    "color:#1d2830}table{border-collapse:collapse;font-size:13px}td,th{padding:.2rem .6rem;"
    "text-align:right;border-bottom:1px solid #e3e8ec}"
    "svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#44535f}"
)
_POLICY_BAR, _NAMES = 22, 170

Record = Mapping[str, Any]
Place = tuple[float, float]
# By what a column is called: where its value stands, and how it is written.
_COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "nodes": ("nodes", str),
    "workers": ("workers", str),
    "samples/step": ("global_batch", str),
    "step s": ("step_s", figure),
    "exposed s": ("exposed_s", figure),
    "bytes/step": ("bytes_per_step", byte_count),
    "job": ("job_s", duration),
    "samples/s": ("samples_per_s", figure),
    "goodput": ("goodput", lambda part: f"{part:.3f}"),
    "utilization": ("utilization", percent),
    "cost": ("cost", figure),
}
_CHARTS = (
    ("samples_per_s", "samples per second, over the whole job"),
    ("job_s", "seconds of the job"),
    ("step_s", "seconds of a step"),
    ("goodput", "goodput"),
    ("utilization", "utilization"),
    ("cost", "cost"),
)


def simulated_text(record: Record) -> str:
    """The record of `raycloud simulate` as plain lines."""
    rows: Sequence[Record] = record["sizes"]
    known = [name for name, (at, _) in _COLUMNS.items() if any(r[at] is not None for r in rows)]
    cells = [[_COLUMNS[name][1](r[_COLUMNS[name][0]]) for name in known] for r in rows]
    told = [
        printable_line(f"{record['job']} on {record['cluster']}, {record['steps']} steps"),
        "\n".join(table([known, *cells], left=[False] * len(known))),
    ]
    for row in rows:
        told += _notes(row)
    if record["policies"]:
        told.append(_policies_text(record["policies"]))
    return "\n\n".join(told)


def _notes(row: Record) -> list[str]:
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(row["faults"].items()))
    notes = []
    if faults:
        notes.append(f"{row['nodes']} nodes: {faults}; {row['recoveries']} recoveries")
    if row["of_present"] is not None:
        part = percent(row["of_present"])
        notes.append(f"{row['nodes']} nodes: {part} of what the machines could that were there")
    if row["status"] != "finished":
        notes.append(f"{row['nodes']} nodes: {row['status']} after {row['steps']} steps")
    return [*notes, *(f"{row['nodes']} nodes: BROKEN: {promise}" for promise in row["broken"])]


def _policies_text(policies: Sequence[Record]) -> str:
    backed = any(row["backed_up"] is not None for row in policies)
    heads = ["saved of equal shares' computing", "parts", "whole", *(["backups"] if backed else [])]
    cells = []
    for row in policies:
        values = [row["fractional"], row["whole"], *([row["backed_up"]] if backed else [])]
        cells.append([row["policy"], *(_saved(value) for value in values)])
    return "\n".join(table([heads, *cells], left=[True] + [False] * (len(heads) - 1)))


def _saved(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f}%"


def simulated_page(record: Record) -> str:
    """The same as a page: HTML with drawings in it."""
    rows: Sequence[Record] = record["sizes"]
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in _COLUMNS)
    lines = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_shown(row, at, to))}</td>" for at, to in _cells())
        + "</tr>"
        for row in rows
    )
    title = html.escape(printable_line(f"{record['job']} on {record['cluster']}"))
    notes = [note for row in rows for note in _notes(row)]
    parts = [
        f"<h1>{title}</h1>",
        f"<table><tr>{heads}</tr>{lines}</table>",
        *(f"<p>{html.escape(printable_line(note))}</p>" for note in notes),
    ]
    if len(rows) > 1:
        for name, what in _CHARTS:
            places = [(row["nodes"], row[name]) for row in rows if row[name]]
            parts.append(_titled(f"{what}, by nodes", _curve(places)))
    if record["policies"]:
        parts.append(
            _titled(
                "what shares by a policy save of equal shares' computing", _bars(record["policies"])
            )
        )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>\n"
    )


def _cells() -> list[tuple[str, Callable[[Any], str]]]:
    return list(_COLUMNS.values())


def _shown(row: Record, at: str, to: Callable[[Any], str]) -> str:
    return "-" if row[at] is None else to(row[at])


def _titled(title: str, drawing: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{drawing}" if drawing else ""


def _curve(places: Sequence[Place]) -> str:
    """A single line; nothing of fewer than two places."""
    return curves({"": places}, "nodes", "") if len(places) > 1 else ""


def curves(lines: Mapping[str, Sequence[Place]], x_name: str, y_name: str) -> str:
    """Lines by name in one drawing, SVG, along scales of logarithms where values are far apart."""
    every = [place for places in lines.values() for place in places]
    x, y = (_scale([place[at] for place in every], at) for at in (0, 1))
    bottom = _HEIGHT - _BELOW
    marks = [f'<path d="M{_LEFT},{_ABOVE}V{bottom}H{_WIDTH}" fill="none" stroke="{_GRID}"/>']
    for number, (name, places) in enumerate(lines.items()):
        colour = _LINES[number % len(_LINES)]
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in places)
        marks.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        marks += [
            f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in places
        ]
        if name:
            end = places[-1]
            marks.append(_text(x(end[0]) + 8, y(end[1]) + 4, name, "start"))
    marks += [_text(x(a), bottom + 16, figure(a), "middle") for a in sorted({a for a, _ in every})]
    marks.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_name, "middle"))
    marks.append(_text(_LEFT + 6, _ABOVE - 6, y_name, "start"))
    ends = sorted({min(b for _, b in every), max(b for _, b in every)})
    marks += [_text(_LEFT - 6, y(b) + 4, figure(b), "end") for b in ends]
    return _svg(marks, _HEIGHT)


def _scale(values: Sequence[float], axis: int) -> Callable[[float], float]:
    low, high = min(values), max(values)
    of = math.log if low > 0 and high > 4 * low else float
    span = (of(high) - of(low)) or 1.0

    def place(value: float) -> float:
        part = (of(value) - of(low)) / span
        if axis == 0:
            return _LEFT + 12 + part * (_WIDTH - _LEFT - _RIGHT - 24)
        return _HEIGHT - _BELOW - 8 - part * (_HEIGHT - _BELOW - _ABOVE - 16)

    return place


def _bars(policies: Sequence[Record]) -> str:
    """Of each policy two bars: with parts of micro-batches, and with backups or whole ones."""
    kinds = ("fractional", "backed_up" if policies[0]["backed_up"] is not None else "whole")
    most = max((row[kind] for row in policies for kind in kinds), default=0.0)
    if most <= 0:
        return ""
    marks = []
    for at, row in enumerate(policies):
        top = 6 + at * (2 * _POLICY_BAR)
        marks.append(_text(_NAMES - 6, top + 14, row["policy"], "end"))
        for number, kind in enumerate(kinds):
            y, width = top + number * 17, max(0.0, (_WIDTH - _NAMES - 120) * row[kind] / most)
            colour = _OWN if number == 0 else _BAR
            marks.append(
                f'<rect x="{_NAMES}" y="{y}" width="{width:.1f}" height="14" fill="{colour}"/>'
            )
            told = f"{_saved(row[kind])} {_KINDS[kind]}"
            marks.append(_text(_NAMES + width + 6, y + 11, told, "start"))
    return _svg(marks, 12 + len(policies) * 2 * _POLICY_BAR)


_KINDS = {"fractional": "in parts", "backed_up": "with backups", "whole": "whole"}


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(parts: Sequence[str], height: float) -> str:
    box = f'viewBox="0 0 {_WIDTH + 60} {height}" width="{_WIDTH + 60}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>'
