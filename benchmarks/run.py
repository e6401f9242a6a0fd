"""Races contestants in a scenario on a testbed and keeps a row of each run.

    python -m benchmarks.run --scenario S2 --contestants raycloud,ray-train --repeats 3

Each repeat begins with the limit: every node computing alone. Contestants take turns within a
repeat, and the first turn goes round from repeat to repeat. A row is written as soon as its run is
done, and a run whose row is there is left out, so a run that was broken off goes on; a row of other
settings is an error, and so is a repeat on two machines, or one whose limit is an hour old: what is
compared is of one machine at one time. Needs root and iproute2, and
`python -m benchmarks.testbed check` says what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import ROOT, describe, load
from benchmarks.peers.environments import NotInstalledError
from benchmarks.predicted import of_log
from benchmarks.racing import measures
from benchmarks.racing.race import NOT_ITS_OWN, measure_limit, place_for, race
from benchmarks.racing.registry import CONTESTANTS
from benchmarks.racing.results import (
    LIMIT,
    OURS,
    SOFTWARE,
    Results,
    ResultsError,
    Row,
    differing,
    is_ours,
)
from benchmarks.racing.running import BROKEN
from benchmarks.racing.scenarios import SCENARIOS, Scenario, Settings
from benchmarks.testbed import MissingError, missing
from benchmarks.throughput import turns
from benchmarks.workload import LEARNING_RATE

if TYPE_CHECKING:
    from benchmarks.racing.contestant import Contestant

RESULTS = ROOT / "benchmarks" / "results"
REFERENCE = RESULTS / "reference.json"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for.

    Attributes:
        scenarios: In this order.
        contestants: Their names; the limit runs first where it is one of them.
        first: Repeat to begin with: those before may be of another machine.
        repeats: Of each, those before the first included.
        settings: For all contestants.
        learning_rates: By contestant, where it differs.
        machine: As `benchmarks.machine.describe` gives it before the first run: what is edited
            meanwhile is not what the processes of this command have read.
        json: The results' file; None: one per scenario in the default directory.
        again: Run what has a row already.
        quick: Does it work?
        keep: Directory for what the runs leave; None: it is deleted.
    """

    scenarios: tuple[Scenario, ...]
    contestants: tuple[str, ...]
    first: int
    repeats: int
    settings: Settings
    learning_rates: Mapping[str, float]
    machine: Mapping[str, Any]
    json: Path | None
    again: bool
    quick: bool
    keep: Path | None


def run_scenario(scenario: Scenario, asked: Asked, results: Results) -> list[str]:
    """All repeats of a scenario; what could not be run for reasons that are no contestant's."""
    broken = []
    for repeat, name in _order(asked):
        there = None if asked.again else results.find(scenario.name, repeat, name)
        if there is not None:
            since = "" if there["commit"] == asked.machine["commit"] else ", of another commit"
            line = f"{scenario.name} repeat {repeat}  {name:<18} is there already{since}"
            print(line, flush=True)
            continue
        print(f"{scenario.name} repeat {repeat}  {name:<18} ...", flush=True)
        try:
            row = _row(scenario, repeat, name, asked, results)
        except BROKEN as error:
            broken.append(f"{scenario.name} repeat {repeat} {name}: {error}")
            print(f"  no row: the testbed broke: {error}", flush=True)
            continue
        print(f"  {_in_short(row)}", flush=True)
        try:
            results.add(row)
        except ResultsError:
            print(json.dumps(row), flush=True)  # minutes of work: not lost with a full disk
            raise
        if any(why in (row["failed"] or "") for why in NOT_ITS_OWN):
            broken.append(f"{scenario.name} repeat {repeat} {name}: {row['failed']}")
    return broken


def check_rows(scenario: Scenario, asked: Asked, results: Results) -> None:
    """Check that the rows that are there go with what would be run; another commit is let pass.

    A repeat that is complete may be of another machine: its rows are compared with its own limit.

    Raises:
        ResultsError: One is of other settings, or its repeat would go on, and is of another machine
            or has an old limit.
    """
    for repeat, its in groupby(_order(asked), key=itemgetter(0)):
        names = [name for _, name in its]
        there = {row["contestant"]: row for row in results.of(scenario.name, repeat)}
        runs = set(names) if asked.again else set(names) - there.keys()
        if runs and LIMIT not in runs:
            results.check_fresh(scenario.name, repeat, datetime.now(tz=UTC))
        for name, row in there.items():
            if name in runs:
                continue
            differs = _settings_differ(row, scenario, asked) if name in names else []
            differs += differing("machine", row, asked.machine) if runs else []
            if differs:
                raise ResultsError(
                    f"{results.path}: the row of {scenario.name} repeat {repeat} {name} is of"
                    f" another run: {'; '.join(differs)}; run all with --again, begin with another"
                    " repeat by --first, or name another file by --json"
                )


def _settings_differ(row: Row, scenario: Scenario, asked: Asked) -> list[str]:
    settings = asdict(_settings_of(row["contestant"], asked))
    return [
        *differing("settings", row, settings),
        *differing("settings_of_testbed", row, scenario.describe()),
    ]


def _order(asked: Asked) -> list[tuple[int, str]]:
    """(repeat, contestant) of all runs of a scenario, one after the other."""
    others = [name for name in asked.contestants if name != LIMIT]
    order = list(turns(others, asked.repeats)) if others else []
    if LIMIT in asked.contestants:
        order += [(repeat, LIMIT) for repeat in range(asked.repeats)]
    order = [(repeat, name) for repeat, name in order if repeat >= asked.first]
    return sorted(order, key=lambda turn: (turn[0], turn[1] != LIMIT))  # else turns stay


def _settings_of(name: str, asked: Asked) -> Settings:
    rate = asked.learning_rates.get(name, asked.settings.learning_rate)
    return replace(asked.settings, learning_rate=rate)


def _row(
    scenario: Scenario, repeat: int, name: str, asked: Asked, results: Results
) -> dict[str, Any]:
    """Run one contestant once."""
    contestant = CONTESTANTS[name]
    settings = _settings_of(name, asked)
    began, load_before = datetime.now(tz=UTC), load()
    try:
        versions = contestant.prepare()
    except NotInstalledError as error:
        never = measures.Observation(t0_s=0.0, failed=f"not installed: {error}"[:300])
        found, versions = measures.row(never, None), {}
    else:
        with place_for(asked.keep, f"{scenario.name}-{repeat}-{name}") as place:
            if name == LIMIT:
                found = _limit(contestant, scenario, settings, place)
            else:
                speeds = (results.find(scenario.name, repeat, LIMIT) or {}).get("rates")
                found = _measured(contestant, scenario, settings, place, speeds or None)
    commit, changed = (asked.machine[field] for field in SOFTWARE)
    return {
        "scenario": scenario.name,
        "contestant": name,
        "repeat": repeat,
        **found,
        "began": began.isoformat(timespec="seconds"),
        "load_before": load_before,
        "commit": commit,
        "changed": changed,
        "versions": dict(versions),
        "machine": {k: v for k, v in asked.machine.items() if k not in SOFTWARE},
        "settings": asdict(settings),
        "settings_of_testbed": scenario.describe(),
    }


def _measured(
    contestant: Contestant,
    scenario: Scenario,
    settings: Settings,
    place: Path,
    speeds: Mapping[str, float] | None,
) -> dict[str, Any]:
    seen = race(contestant, scenario, settings, place)
    used = seen.used
    unknown = {} if used else {"wire_bytes": None, "wire_bytes_total": None, "trunk_bytes": None}
    predictions = of_log(place / "run" / "events.jsonl") if is_ours(contestant.name) else []
    return {
        **measures.row(seen.observation, speeds),
        **unknown,
        "not_done": list(seen.not_done),
        "congestion_control": seen.congestion_control,
        **({"predictions": predictions} if predictions else {}),
        "machine_use": {"steal": used.steal, "outside": used.outside} if used else None,
    }


def _limit(
    contestant: Contestant, scenario: Scenario, settings: Settings, place: Path
) -> dict[str, Any]:
    """The limit's row: the rate of each node, and of those of the start together."""
    speeds = measure_limit(contestant, scenario, settings, place)
    nothing = measures.Observation(t0_s=0.0, failed=speeds.failed)
    found = measures.row(nothing, None) | {"rates": dict(speeds.by_node)}
    if not speeds.failed:
        together = sum(speeds.by_node[node.name] for node in scenario.spec.nodes)
        found |= {"samples_per_s": together, "limit_samples_per_s": together}
        found |= {"ratio_to_limit": 1.0, "window_s": settings.limit_window_s}
    return found


def _in_short(row: Mapping[str, Any]) -> str:
    """A row for people."""
    if row["samples_per_s"] is None:
        return f"failed: {row['failed']}"
    parts = [f"{row['samples_per_s']:.1f} samples/s"]
    if row["ratio_to_limit"] is not None:
        parts.append(f"{row['ratio_to_limit']:.3f} of the limit")
    if row["first_step_s"] is not None:
        parts.append(f"first step {row['first_step_s']:.1f} s")
    if row["time_to_target_s"] is not None:
        parts.append(f"target {row['time_to_target_s']:.1f} s")
    if row["pauses_s"]:
        said = ["none" if pause is None else f"{pause:.1f}" for pause in row["pauses_s"]]
        parts.append(f"pauses {', '.join(said)} s; lost {row['lost_steps']}")
    return "; ".join(parts) + (f"; failed: {row['failed']}" if row["failed"] else "")


def _settings(target: float | None, *, quick: bool) -> Settings:
    """Learning rate as benchmarks.racing.reference found it, if it has been run; and the target."""
    if quick:
        return Settings.quick()
    if not REFERENCE.exists():
        print(f"no {REFERENCE}: no target; run benchmarks.racing.reference", file=sys.stderr)
        return Settings(learning_rate=LEARNING_RATE)
    found = json.loads(REFERENCE.read_text())
    return Settings(
        learning_rate=found["learning_rate"],
        target_loss=found["target_loss"] if target is None else target,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Race; 1 where the testbed broke, 2 where there can be none."""
    asked = _parse(arguments)
    if why := missing():
        print(f"no testbed here: {why}", file=sys.stderr)
        return 2
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere) if asked.quick else RESULTS
        paths = [asked.json or folder / f"{scenario.name}.json" for scenario in asked.scenarios]
        try:
            files = {path: Results(path) for path in paths}
            for file in files.values():
                file.check_writable()
            for scenario, path in zip(asked.scenarios, paths, strict=True):
                check_rows(scenario, asked, files[path])
            for scenario, path in zip(asked.scenarios, paths, strict=True):
                broken += run_scenario(scenario, asked, files[path])
        except (ResultsError, MissingError) as error:
            print(error, file=sys.stderr)
            return 2
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


def _parse(arguments: Sequence[str] | None) -> Asked:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = f"of {', '.join(SCENARIOS)}"
    parser.add_argument("--scenario", type=_scenarios, help=f"one or several {known}")
    parser.add_argument("--contestants", type=_contestants, help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=0, help="leave out the repeats before this one"
    )
    parser.add_argument("--json", type=Path, help="file for the rows; quick: none is kept without")
    parser.add_argument("--quick", action="store_true", help="does it work? tiny, and no target")
    parser.add_argument("--target", type=float, help="held-out loss in place of the reference's")
    parser.add_argument("--limit", type=float, help="seconds that a run may take, in place of 360")
    parser.add_argument("--again", action="store_true", help="run also what has a row already")
    parser.add_argument("--keep", type=Path, help="directory for the runs' logs and journals")
    parser.add_argument(
        *("--learning-rate", "-l"),
        type=_learning_rate,
        action="append",
        default=[],
        metavar="CONTESTANT=RATE",
    )
    asked = parser.parse_args(arguments)
    if not 0 <= asked.first < asked.repeats:
        parser.error("--first must be at least 0 and less than --repeats")
    if asked.scenario is None and not asked.quick:
        parser.error(f"--scenario is missing: {known}; only --quick takes all by itself")
    names = asked.contestants or ((OURS,) if asked.quick else tuple(CONTESTANTS))
    if not asked.quick:
        names = (LIMIT, *(name for name in names if name != LIMIT))
    scenarios = asked.scenario or tuple(SCENARIOS.values())
    if asked.limit is not None:
        scenarios = tuple(replace(one, limit_s=asked.limit) for one in scenarios)
    return Asked(
        scenarios=tuple(one.squeezed() for one in scenarios) if asked.quick else scenarios,
        contestants=names,
        first=asked.first,
        repeats=asked.repeats,
        settings=_settings(asked.target, quick=asked.quick),
        learning_rates=dict(asked.learning_rate),
        machine=describe(os.sched_getaffinity(0)),
        json=asked.json,
        again=asked.again,
        quick=asked.quick,
        keep=asked.keep,
    )


def _scenarios(text: str) -> tuple[Scenario, ...]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; known: {', '.join(SCENARIOS)}")
    return tuple(SCENARIOS[name] for name in names)


def _contestants(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in CONTESTANTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}; known: {', '.join(CONTESTANTS)}")
    return names


def _learning_rate(text: str) -> tuple[str, float]:
    name, _, rate = text.partition("=")
    try:
        return _contestants(name)[0], float(rate)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give CONTESTANT=RATE") from None


if __name__ == "__main__":
    sys.exit(main())
