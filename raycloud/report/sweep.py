"""A sweep as one page: its trials, and what made the difference. HTML with drawings in it.

Nothing is fetched: the page is one file that opens anywhere.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.report.figures import byte_count, figure
from raycloud.tuning.results import front, objectives

if TYPE_CHECKING:
    from raycloud.spec.sweep import Sweep
    from raycloud.tuning.results import Trial

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 640, 300, 64, 40, 16
BEST, OTHER, ENDED, FRONT, TARGET = "#0b6e4f", "#7a8b99", "#d9a441", "#2f5d9b", "#b23a48"
_BINS = 4  # of a range, to see what it explains
_MOST_TICKS = 5
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;"
    "color:#1d2830}table{border-collapse:collapse;font-size:13px}td,th{padding:.2rem .6rem;"
    "text-align:right;border-bottom:1px solid #e3e8ec}tr.best td{font-weight:600;color:#0b6e4f}"
    "svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#44535f}"
)

Place = tuple[float, float]


def page(name: str, trials: Sequence[Trial], sweep: Sweep) -> str:
    """The page of a sweep, by its trials as they are now."""
    scored = scored_trials(trials, sweep)
    best = best_of(scored, sweep)
    numbers = {trial.number for trial in best}
    parts = [
        f"<h1>{html.escape(name)}</h1>",
        f"<p>{_in_words(trials, best, sweep)}</p>",
        _table(trials, sweep, numbers),
        _titled("What each trial was given, and came to", _coordinates(trials, sweep, numbers)),
        _titled(f"{sweep.measure} over seconds", _curves(trials, sweep, numbers, "seconds")),
        _titled(f"{sweep.measure} over bytes sent", _curves(trials, sweep, numbers, "bytes")),
        _titled(f"{sweep.measure} over money", _curves(trials, sweep, numbers, "money")),
        _titled("What explains the difference", _importance(scored, sweep)),
        _titled("How far each trial came", _steps(trials, numbers)),
    ]
    body = "\n".join(part for part in parts if part)
    title = html.escape(name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def best_of(scored: Sequence[tuple[Trial, tuple[float, ...]]], sweep: Sweep) -> list[Trial]:
    """The best trial, or with several objectives those that no other beats in all.

    Where the best were trained once more, it is the best of those: one run of many is the fastest
    partly by chance.
    """
    again = [pair for pair in scored if pair[0].again is not None]
    return front(again or scored)[: None if len(sweep.minimize) > 1 else 1]


def status_of(trial: Trial) -> str:
    """Its status, and which other one it repeats."""
    return trial.status if trial.again is None else f"{trial.status}, {trial.again} again"


def importance(scored: Sequence[tuple[Trial, float]], path: str) -> float | None:
    """The part of the variance of an objective that a field explains (eta squared), 0 to 1.

    Values are taken together that are the same; of a range, those in one of four equal parts by
    rank. None: there are too few trials, or they all came to the same.
    """
    known = [(trial.point[path], value) for trial, value in scored if path in trial.point]
    values = [value for _, value in known]
    if len(known) < _BINS or len({repr(key) for key, _ in known}) == 1:
        return None
    mean = sum(values) / len(values)
    whole = sum((value - mean) ** 2 for value in values)
    if whole <= 0.0:
        return None
    groups: dict[str, list[float]] = {}
    for key, value in _grouped(known):
        groups.setdefault(key, []).append(value)
    between = sum(len(g) * (sum(g) / len(g) - mean) ** 2 for g in groups.values())
    return between / whole


def importances(
    scored: Sequence[tuple[Trial, tuple[float, ...]]], sweep: Sweep
) -> list[tuple[str, float]]:
    """The `importance` of each field for the first objective, where it is known; largest first."""
    first = [(trial, values[0]) for trial, values in scored if trial.again is None]
    found = [(path, importance(first, path)) for path in sweep.space]
    known = [(path, value) for path, value in found if value is not None]
    return sorted(known, key=lambda pair: -pair[1])


def _grouped(known: Sequence[tuple[Any, float]]) -> Iterable[tuple[str, float]]:
    keys = {repr(key) for key, _ in known}
    if len(keys) <= _BINS or not all(is_number(key) for key, _ in known):
        return [(repr(key), value) for key, value in known]
    ranked = sorted(known, key=lambda pair: pair[0])
    return [(str(at * _BINS // len(ranked)), value) for at, (_, value) in enumerate(ranked)]


def scored_trials(trials: Sequence[Trial], sweep: Sweep) -> list[tuple[Trial, tuple[float, ...]]]:
    """The trials that came to something, with their objectives; less is better."""
    found = []
    for trial in trials:
        came = objectives(trial, sweep.minimize, mode=sweep.mode, target=sweep.target)
        if came is not None:
            found.append((trial, came))
    return found


def _in_words(trials: Sequence[Trial], best: Sequence[Trial], sweep: Sweep) -> str:
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    to = f" to {sweep.measure} {figure(sweep.target)}" if sweep.target is not None else ""
    what = " and ".join(sweep.minimize)
    if not best:
        return f"{len(trials)} trials: {said}. None came to anything yet."
    numbers = ", ".join(str(trial.number) for trial in best)
    return f"{len(trials)} trials: {said}. Least {html.escape(what)}{html.escape(to)}: {numbers}."


def _table(trials: Sequence[Trial], sweep: Sweep, best: set[int]) -> str:
    heads = ("trial", "status", "step", sweep.measure, "seconds", "sent", *sweep.space)
    rows = ["<tr>" + "".join(f"<th>{html.escape(head)}</th>" for head in heads) + "</tr>"]
    for trial in trials:
        last = trial.last
        came: tuple[str, ...] = ("", "", "", "")
        if last is not None:
            came = (
                str(last.step),
                figure(last.measure),
                f"{last.seconds:.1f}",
                byte_count(last.bytes),
            )
        given = (str(trial.point.get(path, "")) for path in sweep.space)
        cells = (str(trial.number), status_of(trial), *came, *given)
        kind = ' class="best"' if trial.number in best else ""
        rows.append(f"<tr{kind}>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _curves(trials: Sequence[Trial], sweep: Sweep, best: set[int], of: str) -> str:
    lines = [(trial, places) for trial in trials if (places := points_of(trial, of))]
    every = [place for _, places in lines for place in places]
    if not every or max(x for x, _ in every) <= 0:
        return ""
    to_x, to_y = _scale([x for x, _ in every], _x), _scale([y for _, y in every], _y)
    drawn = [_axes(of, sweep.measure, [x for x, _ in every], [y for _, y in every])]
    for trial, places in sorted(lines, key=lambda pair: pair[0].number in best):
        points = [(to_x(x), to_y(y)) for x, y in places]
        drawn.append(_line(points, trial, best))
        drawn.append(_dot(points[-1], trial, best))
    if of != "seconds":
        front = stairs(cheapest(every, sweep.mode), max(x for x, _ in every))
        drawn.append(_front([(to_x(x), to_y(y)) for x, y in front]))
    losses = [y for _, y in every]
    if sweep.target is not None and min(losses) <= sweep.target <= max(losses):
        y = to_y(sweep.target)
        drawn.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{TARGET}" stroke-dasharray="4 4"/>'
        )
    return _svg(drawn)


def cheapest(places: Iterable[Place], mode: str) -> list[Place]:
    """The Pareto front of costs and measures: what no other is as good as in both; by cost.

    >>> cheapest([(1, 5.0), (2, 3.0), (3, 4.0), (2, 6.0), (4, 1.0)], "min")
    [(1, 5.0), (2, 3.0), (4, 1.0)]
    """
    sign = -1.0 if mode == "max" else 1.0
    found: list[Place] = []
    for cost, measure in sorted(places, key=lambda place: (place[0], sign * place[1])):
        if not found or sign * measure < sign * found[-1][1]:
            found.append((cost, measure))
    return found


def stairs(front: Sequence[Place], until: float) -> list[Place]:
    """The line of a front: at each cost what the best so far has come to.

    >>> stairs([(1, 5.0), (2, 3.0)], until=4)
    [(1, 5.0), (2, 5.0), (2, 3.0), (4, 3.0)]
    """
    line: list[Place] = []
    for (cost, measure), (after, _) in zip(front, [*front[1:], (until, 0.0)], strict=True):
        line += [(cost, measure), (after, measure)]
    return line


def points_of(trial: Trial, cost: str) -> list[Place]:
    """What was measured of a trial, with what it had cost by then, where that is known."""
    return [
        (float(getattr(one, cost)), one.measure)
        for one in trial.measured
        if getattr(one, cost) is not None and math.isfinite(one.measure)
    ]


def _coordinates(trials: Sequence[Trial], sweep: Sweep, best: set[int]) -> str:
    """A line for each trial through what it was given, one upright for each field."""
    shown = [trial for trial in trials if trial.last is not None]
    names = [*sweep.space, *(n for n in ("seconds", "measure") if shown)]
    if not shown:
        return ""
    columns = {name: [told(trial, name) for trial in shown] for name in names}
    uprights = {
        name: _LEFT + at * (_WIDTH - 2 * _LEFT) / (len(names) - 1) for at, name in enumerate(names)
    }
    scales = {name: _rank(values) for name, values in columns.items()}
    drawn = []
    for name, x in uprights.items():
        title = sweep.measure if name == "measure" else name
        path = f"M{x:.1f},{_ABOVE}V{_HEIGHT - _BELOW}"
        drawn.append(f'<path d="{path}" stroke="#c6d0d8"/>')
        drawn.append(_text(x, _HEIGHT - _BELOW + 16, title, "middle"))
        for text, y in _ticks_of(columns[name], scales[name]):
            drawn.append(_text(x + 4, y + 4, text, "start"))
    for trial in sorted(shown, key=lambda one: one.number in best):
        values = [(name, told(trial, name)) for name in names]
        given = [(uprights[n], scales[n](v)) for n, v in values if v is not None]
        drawn.append(_line(given, trial, best))
    return _svg(drawn)


def told(trial: Trial, name: str) -> Any:
    """What a trial was given, or has measured: a field's value, its `seconds` or its `measure`."""
    if name in {"seconds", "measure"} and trial.last is not None:
        return getattr(trial.last, name)
    return trial.point.get(name)


def _rank(values: Sequence[Any]) -> Callable[[Any], float]:
    """Where a value stands on its upright: numbers evenly or by logarithm, words by order."""
    known = [value for value in values if value is not None]
    if known and all(is_number(value) for value in known):
        low, high = min(known), max(known)
        if low > 0 and high > 20 * low:
            inner = _scale([math.log(v) for v in known], _y)
            return lambda value: inner(math.log(value))
        return _scale([float(v) for v in known], _y)
    order = sorted({str(value) for value in known})
    inner = _scale([*range(len(order))] or [0], _y)  # none: no trial was given this field
    return lambda value: inner(float(order.index(str(value))))


def _ticks_of(values: Sequence[Any], scale: Callable[[Any], float]) -> list[tuple[str, float]]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    if all(is_number(value) for value in known):
        few = sorted(set(known))
        few = few if len(few) <= _MOST_TICKS else [few[0], few[-1]]
        return [(figure(float(value)), scale(value)) for value in few]
    return [(value, scale(value)) for value in sorted({str(value) for value in known})]


def _importance(scored: Sequence[tuple[Trial, tuple[float, ...]]], sweep: Sweep) -> str:
    known = importances(scored, sweep)
    return _bars([(path, value, f"{value:.0%}", OTHER) for path, value in known], 1.0)


def _steps(trials: Sequence[Trial], best: set[int]) -> str:
    rows = []
    for trial in trials:
        step = trial.last.step if trial.last else 0
        name = f"{trial.number} {trial.status}"
        rows.append((name, float(step), str(step), colour(trial, best)))
    return _bars(rows, max((row[1] for row in rows), default=0.0))


def _bars(rows: Sequence[tuple[str, float, str, str]], most: float) -> str:
    if not rows or most <= 0:
        return ""
    drawn, left = [], 170
    for at, (name, value, text, colour) in enumerate(rows):
        y, width = 4 + 20 * at, (_WIDTH - left - 60) * value / most
        drawn.append(_text(left - 6, y + 12, name, "end"))
        drawn.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="15" fill="{colour}"/>')
        drawn.append(_text(left + width + 5, y + 12, text, "start"))
    return _svg(drawn, height=8 + 20 * len(rows))


def is_number(value: Any) -> bool:
    """Whether it can be drawn along a scale."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _x(part: float) -> float:
    return _LEFT + part * (_WIDTH - _LEFT - 12)


def _y(part: float) -> float:
    return _HEIGHT - _BELOW - part * (_HEIGHT - _BELOW - _ABOVE)


def _scale(values: Sequence[float], to: Callable[[float], float]) -> Callable[[float], float]:
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return lambda value: to((value - low) / span if high > low else 0.5)


def _axes(x_name: str, y_name: str, xs: Sequence[float], ys: Sequence[float]) -> str:
    bottom = _HEIGHT - _BELOW
    shown = byte_count if x_name == "bytes" else figure
    parts = [
        f'<path d="M{_LEFT},{_ABOVE}V{bottom}H{_WIDTH}" fill="none" stroke="#9fb0bc"/>',
        _text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, x_name, "middle"),
        _text(_LEFT + 6, _ABOVE, y_name, "start"),
        *(_text(_scale(xs, _x)(x), bottom + 16, shown(x), "middle") for x in (min(xs), max(xs))),
        *(_text(_LEFT - 6, _scale(ys, _y)(y) + 4, figure(y), "end") for y in (min(ys), max(ys))),
    ]
    return "".join(parts)


def colour(trial: Trial, best: set[int]) -> str:
    """Green of the best, amber of what was ended early, else grey."""
    return BEST if trial.number in best else ENDED if trial.status == "stopped" else OTHER


def _dot(place: Place, trial: Trial, best: set[int]) -> str:
    x, y = place
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour(trial, best)}"/>'


def _line(places: Sequence[Place], trial: Trial, best: set[int]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    width, seen = (2.5, 1.0) if trial.number in best else (1.2, 0.65)
    given = ", ".join(f"{name} {value}" for name, value in trial.point.items())
    title = html.escape(f"trial {trial.number}, {trial.status}: {given}")
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour(trial, best)}" '
        f'stroke-width="{width}" '
        f'opacity="{seen}"><title>{title}</title></polyline>'
    )


def _front(places: Sequence[Place]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return (
        f'<polyline points="{points}" fill="none" stroke="{FRONT}" stroke-dasharray="6 3">'
        "<title>the Pareto front: the best for so much</title></polyline>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(parts: Iterable[str], height: float = _HEIGHT) -> str:
    box = f'viewBox="0 0 {_WIDTH + 40} {height}" width="{_WIDTH + 40}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>'


def _titled(title: str, drawing: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{drawing}" if drawing else ""
