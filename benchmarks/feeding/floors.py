"""What a figure is held to, and how it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from benchmarks.statistics import paired_ratio, student_quantile


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One measured figure.

    Attributes:
        name: What was measured, and against what.
        value: The figure; of several repeats their (geometric) mean.
        low: Lower end of its 95% interval; None from a single measurement.
        high: Upper end.
        at_least: The floor.
        at_most: The ceiling. With neither, the figure is only reported.
        unit: What to print behind the number.
        note: What one should know.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""
    note: str = ""

    @property
    def passes(self) -> bool | None:
        """Whether the figure keeps to its floor; None where it has none."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    def record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {**asdict(self), "passes": self.passes}


def ratio(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    at_least: float | None = None,
    note: str = "",
) -> Verdict:
    """The ratio of two figures, paired by repeat."""
    found = paired_ratio(ours, theirs)
    return Verdict(
        name=name,
        value=found.mean,
        low=found.low,
        high=found.high,
        at_least=at_least,
        unit="x",
        note=note,
    )


def mean(
    name: str, values: Sequence[float], *, at_most: float | None = None, unit: str = " %"
) -> Verdict:
    """The mean of a figure over repeats, with Student's interval."""
    middle, low, high = fmean(values), None, None
    if len(values) > 1:
        error = stdev(values) / math.sqrt(len(values))
        half = student_quantile(0.975, len(values) - 1) * error
        low, high = middle - half, middle + half
    return Verdict(name=name, value=middle, low=low, high=high, at_most=at_most, unit=unit)


def table(verdicts: Sequence[Verdict]) -> str:
    """Verdicts for people, one a line."""
    width = max((len(one.name) for one in verdicts), default=0)
    lines = []
    for one in verdicts:
        interval = "" if one.low is None else f"[{one.low:.4g}, {one.high:.4g}]"
        floor = ""
        if one.at_least is not None:
            floor = f">= {one.at_least:g}"
        elif one.at_most is not None:
            floor = f"<= {one.at_most:g}"
        word = {None: "", True: "pass", False: "SHORT"}[one.passes]
        lines.append(
            f"{one.name:<{width}}  {one.value:>9.4g}{one.unit:<6} {interval:<22} {floor:<10} "
            f"{word:<6}{one.note}".rstrip()
        )
    return "\n".join(lines)
