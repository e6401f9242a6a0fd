"""Is raycloud still as fast as it was, against the limit and against its peers?

    python -m benchmarks.compare benchmarks/results/S2.json [...] [--baselines DIRECTORY]

Absolute speeds differ from day to day, so what is compared are ratios of one run: raycloud to the
limit, and raycloud to the fastest of the peers that both files hold, each paired by repeat, median
of the repeats. To a faster processor the same link is a thinner one, so repeats are compared with
those of the same processor, and one that has no baseline of its own has nothing to lose. Exit code
1 where one of them lost more than 10%, or where raycloud fails in more of its repeats than it did.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.machine import ROOT
from benchmarks.racing.results import (
    OURS,
    ResultsError,
    Row,
    best_peer,
    by_contestant,
    load,
    paired,
    peers,
    values,
    with_ratios,
)

TOLERATED = 0.10
BASELINES = ROOT / "benchmarks" / "baselines"
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One ratio now and as it was.

    Attributes:
        scenario: Where.
        processor: On which; empty where a row does not say.
        quantity: Which ratio.
        now: Its median over the repeats; None where it was not measured.
        before: The baseline's.
        tolerated: Part of it that may be lost.
    """

    scenario: str
    processor: str = ""
    quantity: str
    now: float | None
    before: float | None
    tolerated: float = TOLERATED

    @property
    def change(self) -> float | None:
        """Relative; None where one of the two is missing."""
        if self.now is None or not self.before:
            return None
        return self.now / self.before - 1

    @property
    def lost(self) -> bool:
        """Whether it fell by more than is tolerated, or is no longer there."""
        if self.before is None:
            return False
        return self.now is None or self.now < self.before * (1 - self.tolerated) - _ROUNDING


def compare(now: Sequence[Row], before: Sequence[Row]) -> list[Comparison]:
    """Both ratios of all in `now`, and the part of the repeats that did not fail.

    By scenario and processor.
    """
    now, before = with_ratios(now), with_ratios(before)
    found = []
    for where in sorted({_where(row) for row in now}):
        scenario, processor = where
        ours, theirs = ([row for row in rows if _where(row) == where] for rows in (now, before))
        both = _measured(ours) & _measured(theirs)
        found += [
            Comparison(
                scenario=scenario,
                processor=processor,
                quantity=f"{OURS} / limit",
                now=_to_limit(ours),
                before=_to_limit(theirs),
            ),
            Comparison(
                scenario=scenario,
                processor=processor,
                quantity=f"{OURS} / best peer",
                now=_to_best(ours, both),
                before=_to_best(theirs, both),
            ),
            Comparison(
                scenario=scenario,
                processor=processor,
                quantity=f"{OURS} not failed",
                now=_not_failed(ours),
                before=_not_failed(theirs),
                tolerated=0.0,
            ),
        ]
    return found


def table(comparisons: Sequence[Comparison]) -> str:
    """For people."""
    lines = [f"{'scenario':<10}{'ratio':<22}{'before':>8}{'now':>8}{'change':>9}"]
    for one in comparisons:
        change = "" if one.change is None else f"{one.change:+.1%}"
        verdict = "  lost" if one.lost else "" if one.before is not None else "  no baseline"
        lines.append(
            f"{one.scenario:<10}{one.quantity:<22}{_number(one.before):>8}{_number(one.now):>8}"
            f"{change:>9}{verdict:<15}{one.processor}".rstrip()
        )
    return "\n".join(lines)


def _where(row: Row) -> tuple[str, str]:
    return row["scenario"], (row.get("machine") or {}).get("cpu", "")


def _measured(rows: Sequence[Row]) -> frozenset[str]:
    return frozenset(name for name, theirs in peers(rows) if values(theirs, "samples_per_s"))


def _ours(rows: Sequence[Row]) -> list[Row]:
    return by_contestant(rows).get(OURS, [])


def _to_limit(rows: Sequence[Row]) -> float | None:
    return _median(list(values(_ours(rows), "ratio_to_limit").values()))


def _to_best(rows: Sequence[Row], among: frozenset[str]) -> float | None:
    return _median(paired(values(_ours(rows), "samples_per_s"), best_peer(rows, among)))


def _not_failed(rows: Sequence[Row]) -> float | None:
    ours = _ours(rows)
    good = [row for row in ours if not row.get("failed") and row.get("samples_per_s") is not None]
    return len(good) / len(ours) if ours else None


def _median(found: Sequence[float]) -> float | None:
    return median(found) if found else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _baseline(directory: Path, now: Sequence[Row]) -> list[Row]:
    """The rows of the baselines of the scenarios in `now`."""
    paths = (directory / f"{name}.json" for name in sorted({row["scenario"] for row in now}))
    return [row for path in paths if path.exists() for row in load(path)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; 1 where something was lost, 2 where a file cannot be read or compared."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("results", type=Path, nargs="+", help="files that benchmarks.run wrote")
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="directory of theirs")
    asked = parser.parse_args(arguments)
    try:
        now = [row for path in asked.results for row in load(path)]
        comparisons = compare(now, _baseline(asked.baselines, now))
    except ResultsError as error:
        print(error, file=sys.stderr)
        return 2
    if not comparisons:
        print(f"{asked.baselines}: no baseline of these scenarios to compare with", file=sys.stderr)
        return 2
    print(table(comparisons))
    lost = [one for one in comparisons if one.lost]
    if lost:
        print(f"\n{len(lost)} of {len(comparisons)} are lost: a ratio by more than {TOLERATED:.0%}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
