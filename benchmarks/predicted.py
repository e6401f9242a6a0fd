"""Predictions of raycloud's runs beside what came true: seconds of a step, S1 to S9.

    python -m benchmarks.predicted RESULTS... [--json FILE]

RESULTS are files of `benchmarks.run`, whose rows of raycloud hold what their runs predicted
(`predictions`), or folders of runs, whose logs are read. A prediction is held against the median
step, from commit to commit, of all members until the next one was made or another generation
formed. The first steps of a generation measure its start and are left out, as `planner.seen` does.

The prediction before the start is the last one before the first step. It is held against all steps
until one that rests on steps, or until a member was lost: shares may be others by then. Exit status
1: one misses a floor of what is asked (20% off before the start, 7% after 20 steps, in the interval
85 of 100 times).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.racing.results import ResultsError, is_ours, load
from raycloud.errors import RunDirectoryError
from raycloud.events import Event, MemberLost, Predicted, StepsCommitted
from raycloud.planner.seen import weighted_median
from raycloud.report.log import read_events

FORMAT = 1
BEFORE, AFTER, COVERED = 0.2, 0.07, 0.85
_SKIPPED = 5  # steps of a generation, of each member
_FEWEST = 10  # steps that say what a step takes


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A prediction beside what came true.

    Attributes:
        generation: Of the prediction; `step`, the one from which on it was made.
        seen: It rests on steps of the run; else it was made before the start.
        step_s: As predicted; likely from `low_s` to `high_s`.
        measured_s: The median of `steps` steps; each member's count.
    """

    generation: int
    step: int
    seen: bool
    step_s: float
    low_s: float
    high_s: float
    measured_s: float
    steps: int

    @property
    def error(self) -> float:
        """By which part of what was measured the prediction was more."""
        return self.step_s / self.measured_s - 1.0

    @property
    def covered(self) -> bool:
        """What was measured is in the interval."""
        return self.low_s <= self.measured_s <= self.high_s


class _Open:
    """A prediction whose steps are still coming."""

    def __init__(self, said: Predicted) -> None:
        self.said = said
        self.reports: list[tuple[float, int]] = []

    def close(self) -> Iterator[Held]:
        steps = sum(count for _, count in self.reports)
        if steps >= _FEWEST:
            said = self.said
            yield Held(
                generation=said.generation,
                step=said.step,
                seen=said.seen,
                step_s=said.step_s,
                low_s=said.low_s,
                high_s=said.high_s,
                measured_s=weighted_median(self.reports),
                steps=steps,
            )


def beside(events: Iterable[Event]) -> Iterator[Held]:
    """Each prediction of a run that enough steps followed, in their order."""
    before: _Open | None = None  # the start's
    now: _Open | None = None  # the newest that rests on steps
    skipped: dict[tuple[int, int], int] = {}  # steps, by generation and member
    started = False
    for event in events:
        match event:
            case Predicted(seen=False):
                if now is not None:
                    yield from now.close()
                    now = None
                if not started:
                    before = _Open(event)
            case Predicted():
                for one in filter(None, (before, now)):
                    yield from one.close()
                before, now = None, _Open(event)
            case StepsCommitted():
                started = True
                steps, key = event.last_step - event.first_step, (event.generation, event.member)
                if skipped.get(key, 0) < _SKIPPED:
                    skipped[key] = skipped.get(key, 0) + steps
                    continue
                for one in filter(None, (before, now)):
                    one.reports.append((event.typical_s, steps))
            case MemberLost() if before is not None:
                yield from before.close()
                before = None
            case _:
                pass
    for one in filter(None, (before, now)):
        yield from one.close()


def of_log(path: Path) -> list[dict[str, Any]]:
    """What a run's log holds of it, JSON-ready; nothing where there is none that can be read."""
    try:
        return [asdict(one) for one in beside(event for _, event in read_events(path))]
    except RunDirectoryError:
        return []


def rows(path: Path) -> Iterator[tuple[str, Sequence[Held]]]:
    """What a file of results or a folder of runs holds: of each run its scenario, or its place."""
    if path.is_file():
        for row in load(path):
            if is_ours(row["contestant"]) and row.get("predictions"):
                yield _name(row), [Held(**one) for one in row["predictions"]]
        return
    for log in sorted(path.rglob("events.jsonl")):
        if found := of_log(log):
            name = path.resolve().name / log.parent.relative_to(path)
            yield str(name), [Held(**one) for one in found]


def _name(row: Mapping[str, Any]) -> str:
    """Also on which machine, and of which commit, where the row says so."""
    told = row.get("machine", {}).get("cpu", ""), row.get("commit", "")[:8]
    return ", ".join(
        [f"{row['scenario']} {row['contestant']} repeat {row['repeat']}", *filter(None, told)]
    )


def summed(found: Sequence[tuple[str, Sequence[Held]]]) -> dict[str, Any]:
    """The errors of all runs, JSON-ready, and which part of all predictions the intervals held."""
    every = [one for _, held in found for one in held]
    by_seen = {seen: [abs(o.error) for o in every if o.seen == seen] for seen in (False, True)}
    told = [
        {
            "run": name,
            "predictions": [
                {**asdict(one), "error": round(one.error, 4), "covered": one.covered}
                for one in held
            ],
        }
        for name, held in found
    ]
    return {
        "format": FORMAT,
        "before_worst": max(by_seen[False], default=None),
        "before_median": _median(by_seen[False]),
        "after_worst": max(by_seen[True], default=None),
        "after_median": _median(by_seen[True]),
        "covered": sum(one.covered for one in every) / len(every) if every else None,
        "runs": told,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def meets(told: Mapping[str, Any]) -> bool:
    """Whether all floors are met by what `summed` says."""
    return bool(
        told["before_worst"] is not None
        and told["before_worst"] <= BEFORE
        and (told["after_worst"] or 0.0) <= AFTER
        and told["covered"] >= COVERED
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each prediction, and what they come to; 1: a floor is missed; 2: no runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    try:
        found = [one for path in asked.results for one in rows(path)]
    except ResultsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if not found:
        sys.stderr.write("no run of raycloud there tells what it predicted\n")
        return 2
    told = summed(found)
    for name, held in found:
        for one in held:
            sys.stdout.write(
                f"{name}: generation {one.generation} from step {one.step}, "
                f"{'by steps' if one.seen else 'before the start'}: {one.step_s:.3f} s "
                f"({one.low_s:.3f} to {one.high_s:.3f}), measured {one.measured_s:.3f}: "
                f"{one.error:+.1%}{'' if one.covered else ', outside'}\n"
            )
    sys.stdout.write(
        f"off at most: before the start {_percent(told['before_worst'])}, by steps "
        f"{_percent(told['after_worst'])}; in the interval {_percent(told['covered'])}\n"
    )
    if asked.json is not None:
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(not meets(told))


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


if __name__ == "__main__":
    sys.exit(main())
