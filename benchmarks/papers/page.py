"""The table of the ablation, from its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.papers.runs import middle
from benchmarks.papers.scenario import ROWS

HEADING = (
    "| | s to the target | from the first step | sooner than the baseline | samples/s |"
    " KB a sample | wait for data, ms a step | processors | memory, MB | cost | loss, beside the"
    " baseline's |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
Run = Mapping[str, Any]


def table(runs: Sequence[Run]) -> tuple[list[str], float | None]:
    """Its lines, and how much sooner all together are; None: not known."""
    by = {name: [one for one in runs if one["row"] == name] for name in ROWS}
    base = middle(by["baseline"], "seconds")
    lines = [HEADING]
    sooner = None
    for name, every in by.items():
        if not every:
            continue
        took = middle(every, "seconds")
        ratio = base / took if base and took else None
        if name == "all":
            sooner = ratio
        why = next((one["why"] for one in every if one["why"]), "")
        cells = [
            name,
            why if took is None else f"{took:.0f}",
            _number(middle(every, "from_first_step_s"), "{:.0f}"),
            _number(ratio, "{:.2f}"),
            _number(middle(every, "samples_per_s"), "{:.0f}"),
            _number(middle(every, "bytes_per_sample"), "{:.1f}", 1e-3),
            _number(middle(every, "wait_s_per_step"), "{:.0f}", 1e3),
            _number(middle(every, "cpu"), "{:.0f}%", 1e2),
            _number(middle(every, "memory_bytes"), "{:.0f}", 1e-6),
            _number(middle(every, "cost"), "{:.4f}"),
            _number(loss_beside(by["baseline"], every), "{:+.1%}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines, sooner


def loss_beside(base: Sequence[Run], runs: Sequence[Run]) -> float | None:
    """By which part the held-out loss is more, at the last step that both have seen: the median."""
    found = []
    for one in runs:
        for other in base:
            if one["repeat"] == other["repeat"]:
                mine, its = ({look[0]: look[2] for look in run["looks"]} for run in (one, other))
                if both := mine.keys() & its.keys():
                    found.append({"part": mine[max(both)] / its[max(both)] - 1.0})
    return middle(found, "part")


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)
