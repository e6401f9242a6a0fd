"""The page of the ablation, from its runs.

    python -m benchmarks.papers.page

Writes the tables of `docs/papers.md` and the chart beside it anew, from
`benchmarks/results/papers`.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.papers.scenario import ROWS
from benchmarks.racing.chart import Bar, Group, draw

PAGE, CHART = ROOT / "docs/papers.md", ROOT / "docs/pictures/benchmarks/papers.svg"
RESULTS = ROOT / "benchmarks/results/papers"
FILES = {"trunk-20": "20 Mbit/s between the zones", "trunk-100": "100 Mbit/s between the zones"}

HEADING = (
    "| | s to the target | from the first step | sooner than the baseline | samples/s |"
    " KB a sample | wait for data, ms a step | processors | memory, MB | cost, cents |"
    " loss, beside the baseline's |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
Run = Mapping[str, Any]


def table(runs: Sequence[Run]) -> tuple[list[str], float | None]:
    """Its lines, and how much sooner all together are; None: not known."""
    by = {name: [one for one in runs if one["row"] == name] for name in ROWS}
    base = median_of(by["baseline"], "seconds")
    lines = [HEADING]
    sooner = None
    for name, every in by.items():
        if not every:
            continue
        took = median_of(every, "seconds")
        ratio = base / took if base and took else None
        if name == "all":
            sooner = ratio
        why = next((one["why"] for one in every if one["why"]), "")
        cells = [
            name,
            why if took is None else f"{took:.0f}",
            _number(median_of(every, "from_first_step_s"), "{:.0f}"),
            _number(ratio, "{:.2f}"),
            _number(median_of(every, "samples_per_s"), "{:.0f}"),
            _number(median_of(every, "bytes_per_sample"), "{:.1f}", 1e-3),
            _number(median_of(every, "wait_s_per_step"), "{:.0f}", 1e3),
            _number(median_of(every, "cpu"), "{:.0f}%", 1e2),
            _number(median_of(every, "memory_bytes"), "{:.0f}", 1e-6),
            _number(median_of(every, "cost"), "{:.2f}", 1e2),
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
    return median_of(found, "part")


@dataclass(frozen=True)
class Claim:
    """A figure of the source papers, and what is held against it here.

    Attributes:
        what: In words.
        theirs: As they give it.
        row: Of the ablation, against the baseline.
        name: Of what is measured.
        form: How a change is written: of the ratio to the baseline, less 1.
    """

    what: str
    theirs: str
    row: str
    name: str
    form: str = "{:+.0%}"


CLAIMS = (
    Claim("dynamic allocation: time", "-25%", "+ allocation", "seconds"),
    Claim("all: time", "-33%; 30 h to 10 h", "all", "seconds"),
    Claim("all: samples/s", "+18%", "all", "samples_per_s"),
    Claim("data: wait for it", "-35%", "+ data", "wait_s_per_step"),
    Claim("communication: bytes", "-30% to -50%", "+ communication", "bytes_per_sample"),
    Claim("all: processors", "75% to 90-95%", "all", "cpu"),
    Claim("all: cost", "-25%", "all", "cost"),
)


def beside(runs: Sequence[Run]) -> list[str]:
    """Lines of a table: what the papers say, what was measured, and what is lost without it."""
    lines = [
        "| | the papers | by itself, beside the baseline | all, beside all but it |",
        "|---|---|---|---|",
    ]
    for claim in CLAIMS:
        kept = claim.row.replace("+", "all but")
        alone = _change(runs, "baseline", claim.row, claim)
        whole = "" if claim.row == "all" else _change(runs, kept, "all", claim)
        lines.append(f"| {claim.what} | {claim.theirs} | {alone} | {whole} |")
    return lines


def _change(runs: Sequence[Run], before: str, after: str, claim: Claim) -> str:
    """From one row to another, of what a claim is about."""
    base, ours = (
        median_of([one for one in runs if one["row"] == row], claim.name) for row in (before, after)
    )
    if claim.name == "cpu" and base is not None and ours is not None:
        return f"{base:.0%} to {ours:.0%}"
    if base and ours is not None:
        return claim.form.format(ours / base - 1.0)
    return "not known"


def median_of(runs: Sequence[Run], name: str) -> float | None:
    """The median of what runs have; None: one of them has nothing."""
    values = [one[name] for one in runs]
    return None if not values or None in values else statistics.median(values)


def chart(settings: Mapping[str, Sequence[Run]]) -> str:
    """Seconds to the target of each row; the spread is that of repeats."""
    groups = []
    for heading, runs in settings.items():
        bars = []
        for name, row in ROWS.items():
            every = [one for one in runs if one["row"] == name]
            if not every:
                continue
            took = median_of(every, "seconds")
            known = [one["seconds"] for one in every if one["seconds"] is not None]
            bars.append(
                Bar(
                    name=name,
                    value=took,
                    low=min(known, default=0.0),
                    high=max(known, default=0.0),
                    words="not there in time" if took is None else f"{took:.0f} s",
                    ours=not row.peer,
                )
            )
        groups.append(Group(heading=heading, bars=tuple(bars)))
    title = "The papers' strategies: seconds from command to the target"
    return draw(title, groups, axis="seconds", least_end=1.0)


def sections(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """What stands below the mark in the page."""
    if not settings:
        return "The runs have not been made yet: measured is the curve alone.\n"
    parts = ["![Seconds from command to the target, by row](pictures/benchmarks/papers.svg)", ""]
    for name, told in settings.items():
        runs, repeats = told["runs"], Counter(one["row"] for one in told["runs"]).values()
        few, many = min(repeats, default=0), max(repeats, default=0)
        times = f"medians of {many if few == many else f'{few} to {many}'} repeats"
        times = "one repeat" if many == 1 else times
        rows = f"[rows](../benchmarks/results/papers/{name}.json)"
        parts += [f"## {FILES[name]}", "", f"{times.capitalize()}, {rows}.", ""]
        parts += [*table(runs)[0], "", *beside(runs), ""]
    return "\n".join(parts).rstrip("\n") + "\n"


def found() -> dict[str, dict[str, Any]]:
    """The results that are there."""
    files = {name: RESULTS / f"{name}.json" for name in FILES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


MARK = "<!-- measured -->\n"


def main() -> None:
    """Write the page and the chart."""
    settings = found()
    head, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{head}{MARK}{sections(settings)}")
    if settings:
        CHART.write_text(chart({FILES[name]: told["runs"] for name, told in settings.items()}))


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)


if __name__ == "__main__":
    main()
