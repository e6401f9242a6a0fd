"""A sweep's charts as PNG files, drawn with matplotlib: what `report.html` shows, for elsewhere.

They need the extra `raycloud[charts]`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.errors import JobError
from raycloud.report.figures import byte_count, figure
from raycloud.report.sweep import (
    BEST,
    ENDED,
    FRONT,
    OTHER,
    TARGET,
    best_of,
    cheapest,
    colour,
    importances,
    is_number,
    points_of,
    scored_trials,
    stairs,
    told,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from raycloud.spec.sweep import Sweep
    from raycloud.tuning.results import Trial

INSTALL = "pip install 'raycloud[charts]'"
_DPI = 150
_INCHES = (7.0, 4.0)
_BAR_INCHES = 0.24  # of height
_FEW_INCHES = 1.1  # of a chart of bars, beside them
_MANY_BARS = 60
_WIDE = 20.0  # the largest of some numbers over the least, for a scale of logarithms
_FEW_VALUES = 5  # each of which has its tick


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_if_possible(folder: Path, trials: Sequence[Trial], sweep: Sweep) -> None:
    """Draw them where matplotlib is installed; what is wrong with that ends no sweep."""
    if not available():
        return
    try:
        draw(folder, trials, sweep)
    except Exception as error:  # noqa: BLE001 - of matplotlib's kind, and all else is written
        logging.getLogger(__name__).warning("no charts as PNG files: %s", error)


def draw(folder: Path, trials: Sequence[Trial], sweep: Sweep) -> list[Path]:
    """Draw the charts of a sweep into a folder, as its trials are now; the files.

    Those of which nothing is known yet are left out: `against_money.png` where no node has a price.

    Raises:
        JobError: matplotlib is not installed.
        OSError: They cannot be written.
    """
    if not available():
        raise JobError("matplotlib is not installed, which draws the charts", hint=INSTALL)
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and it loads much

    scored = scored_trials(trials, sweep)
    best = {trial.number for trial in best_of(scored, sweep)}
    shown = [trial for trial in trials if trial.last is not None]
    measure = sweep.measure
    known = importances(scored, sweep)
    charts: dict[str, tuple[str, int, Callable[[Axes], None]]] = {
        "parallel_coordinates": (
            f"What each trial was given, and the {measure} it came to",
            len(shown),
            partial(_coordinates, shown=shown, sweep=sweep, best=best),
        ),
        "importance": (
            f"How much of the variance of {sweep.minimize[0]} each field explains",
            len(known),
            partial(_importance, known=known),
        ),
        "early_stops": (
            "How far each trial came",
            len(shown),
            partial(_steps, shown=shown, best=best),
        ),
    }
    for cost, name in (
        ("seconds", "over_seconds"),
        ("bytes", "against_bytes"),
        ("money", "against_money"),
    ):
        charts[name] = (
            f"{measure} {'over' if cost == 'seconds' else 'against'} {_COSTS[cost]}",
            sum(spent > 0 for trial in shown for spent, _ in points_of(trial, cost)),
            partial(_curves, shown=shown, sweep=sweep, best=best, cost=cost),
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, (title, count, chart) in charts.items():
        if not count:
            continue
        bars = name in {"importance", "early_stops"}
        tall = _FEW_INCHES + _BAR_INCHES * min(count, _MANY_BARS)
        drawing = Figure(
            figsize=(_INCHES[0], tall) if bars else _INCHES, dpi=_DPI, layout="constrained"
        )
        axes = drawing.add_subplot()
        axes.set_title(title, loc="left", fontsize=11)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        chart(axes)
        files.append(folder / f"{name}.png")
        drawing.savefig(files[-1], metadata={"Software": None})
    return files


_COSTS = {"seconds": "seconds of training", "bytes": "bytes sent", "money": "money"}


def _coordinates(axes: Axes, shown: Sequence[Trial], sweep: Sweep, best: set[int]) -> None:
    names = [*sweep.space, "seconds", "measure"]
    scales = [_upright([told(trial, name) for trial in shown]) for name in names]
    for at, (place, ticks) in enumerate(scales):
        axes.axvline(at, color="#c6d0d8", linewidth=1, zorder=0)
        for text, value in ticks:
            axes.annotate(
                text,
                (at, place(value)),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=8,
                va="center",
                bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
                zorder=4,
            )
    for trial in _best_last(shown, best):
        values = [(at, told(trial, name)) for at, name in enumerate(names)]
        there = [(at, scales[at][0](value)) for at, value in values if value is not None]
        axes.plot(*zip(*there, strict=True), **_style(trial, best))
    titles = [sweep.measure if name == "measure" else name for name in names]
    axes.set_xticks(range(len(names)), [title.replace(".", ".\n", 1) for title in titles])
    axes.tick_params(length=0, labelsize=9)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(names) - 1 + 0.35)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _legend(axes, shown, best)


def _upright(values: Sequence[Any]) -> tuple[Callable[[Any], float], list[tuple[str, Any]]]:
    """Where a value stands on its line, from 0 to 1, and the ticks of that."""
    known = [value for value in values if value is not None]
    if known and all(is_number(value) for value in known):
        few = sorted({value for value in known if math.isfinite(value)})
        if not few:
            return (lambda _: 0.5), []
        ticks = few if len(few) <= _FEW_VALUES else [few[0], few[-1]]
        low, high = few[0], few[-1]
        of = math.log if low > 0 and high > _WIDE * low else float
        span = of(high) - of(low)
        place = (lambda v: (of(v) - of(low)) / span) if span else (lambda _: 0.5)
        return place, [(figure(float(value)), value) for value in ticks]
    order = sorted({str(value) for value in known})
    many = max(1, len(order) - 1)
    single = 0.5 if len(order) == 1 else 0.0
    return lambda v: order.index(str(v)) / many + single, [(one, one) for one in order]


def _curves(axes: Axes, shown: Sequence[Trial], sweep: Sweep, best: set[int], cost: str) -> None:
    places = {trial.number: points_of(trial, cost) for trial in shown}
    every = [place for some in places.values() for place in some]
    for trial in _best_last(shown, best):
        if some := places[trial.number]:
            axes.plot(*zip(*some, strict=True), **_style(trial, best))
            axes.plot(*some[-1], "o", color=colour(trial, best), markersize=4)
    costs, measures = ([place[at] for place in every] for at in (0, 1))
    if cost != "seconds":
        front = cheapest(every, sweep.mode)
        line = stairs(front, max(costs))
        label = "Pareto front"
        axes.plot(*zip(*line, strict=True), color=FRONT, linestyle="--", linewidth=1.2, label=label)
    if sweep.target is not None:
        axes.axhline(sweep.target, color=TARGET, linestyle=":", linewidth=1.2, label="target")
    if min(measures) > 0 and max(measures) > _WIDE * min(measures):
        axes.set_yscale("log")
    if cost == "bytes":
        if max(costs) > _WIDE * min((one for one in costs if one > 0), default=math.inf):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: byte_count(max(value, 0.0)))
    axes.set_xlabel(_COSTS[cost])
    axes.set_ylabel(sweep.measure)
    _legend(axes, shown, best)


def _importance(axes: Axes, known: Sequence[tuple[str, float]]) -> None:
    names, values = [name for name, _ in known], [value for _, value in known]
    bars = axes.barh(names, values, color=OTHER, height=0.7)
    axes.bar_label(bars, [f"{value:.0%}" for value in values], padding=4, fontsize=9)
    axes.set_xlim(0.0, 1.1)
    _only_names(axes)


def _steps(axes: Axes, shown: Sequence[Trial], best: set[int]) -> None:
    furthest = sorted(shown, key=lambda trial: (-_step(trial), trial.number))[:_MANY_BARS]
    steps = [_step(trial) for trial in furthest]
    names = [f"{trial.number} {trial.status}" for trial in furthest]
    bars = axes.barh(names, steps, color=[colour(t, best) for t in furthest], height=0.7)
    axes.bar_label(bars, [str(step) for step in steps], padding=4, fontsize=9)
    axes.set_xlim(0.0, 1.1 * max(1, *steps))
    axes.set_xlabel("steps")
    _only_names(axes)


def _only_names(axes: Axes) -> None:
    """The first bar above, and no scale: each has its number."""
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=9)
    axes.spines["bottom"].set_visible(False)


def _step(trial: Trial) -> int:
    return trial.last.step if trial.last else 0


def _best_last(shown: Sequence[Trial], best: set[int]) -> list[Trial]:
    return sorted(shown, key=lambda trial: trial.number in best)


def _style(trial: Trial, best: set[int]) -> dict[str, Any]:
    is_best = trial.number in best
    return {
        "color": colour(trial, best),
        "linewidth": 2.2 if is_best else 1.1,
        "alpha": 1.0 if is_best else 0.7,
        "zorder": 3 if is_best else 2,
    }


def _legend(axes: Axes, shown: Sequence[Trial], best: set[int]) -> None:
    """What the colours say, of those that are there, and the lines that have names."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - see `draw`

    there = {colour(trial, best) for trial in shown}
    said = {BEST: "best", ENDED: "ended early", OTHER: "other trials"}
    handles, labels = axes.get_legend_handles_labels()
    lines = [Line2D([], [], color=one, linewidth=2) for one in said if one in there]
    names = [name for one, name in said.items() if one in there]
    drawing = axes.get_figure()
    assert drawing is not None  # noqa: S101 - `draw` has put them there
    drawing.legend(
        [*lines, *handles], [*names, *labels], loc="outside lower center", ncols=5, frameon=False
    )
