"""The simulation as a command: `python -m raycloud.simulate --seed 7 --members 1000 --days 7`.

It prints what came of it. Where a promise was broken it prints which, the last lines of the log and
the command that repeats it, and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raycloud.clock import SystemClock
from raycloud.errors import RaycloudError
from raycloud.simulate.run import simulate
from raycloud.simulate.scenario import Scenario, large, small
from raycloud.simulate.traces import faults_of_trace, speeds_of_trace

_MODULE = "python -m raycloud.simulate"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate what the command line asks for; the exit code is 1 where a promise was broken."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked)
    except RaycloudError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_MODULE, description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all that is left to chance")
    parser.add_argument("--seeds", type=_range, help="FIRST:LAST, each of these but the last")
    parser.add_argument("--small", action="store_true", help="a few members, minutes, much happens")
    parser.add_argument("--members", type=int, default=1000, help="most members (default 1000)")
    parser.add_argument("--days", type=float, default=1.0, help="virtual days (default 1)")
    parser.add_argument("--faults-per-day", type=float, help="default: as large clusters tell")
    parser.add_argument("--spot", type=Path, help="a trace of how many nodes are there (JSON)")
    parser.add_argument("--speeds", type=Path, help="a trace of workers' batch times (CSV)")
    parser.add_argument("--json", action="store_true", help="numbers only, as JSON")
    return parser


def _range(text: str) -> range:
    first, _, last = text.partition(":")
    return range(int(first), int(last))


def _scenario(asked: argparse.Namespace, seed: int) -> Scenario:
    if asked.small:
        return small(seed)
    members, days = asked.members, asked.days
    scenario = large(seed, members=members, days=days, per_day=asked.faults_per_day)
    if asked.spot is not None:
        held = faults_of_trace(asked.spot, nodes=scenario.machines, until_s=scenario.lasts_s)
        faults = tuple(sorted([*scenario.faults, *held]))
        scenario = replace(scenario, faults=faults, least=1)
    if asked.speeds is not None:
        scenario = replace(scenario, speeds=speeds_of_trace(asked.speeds))
    return scenario


def _repeat(asked: argparse.Namespace, seed: int) -> str:
    words = [_MODULE, *(["--small"] if asked.small else []), "--seed", seed]
    names = ("members", "days", "faults_per_day", "spot", "speeds")
    for name in () if asked.small else names:
        if (value := getattr(asked, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value]
    return " ".join(map(str, words))


def _run(asked: argparse.Namespace) -> int:
    clock = SystemClock()
    began_s = clock.monotonic_s()
    statuses: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    recoveries = broken = 0
    seeds = range(asked.seed, asked.seed + 1) if asked.seeds is None else asked.seeds
    for seed in seeds:
        outcome = simulate(_scenario(asked, seed), clock)
        statuses[outcome.status] += 1
        faults.update(outcome.faults)
        recoveries += outcome.recoveries
        broken += bool(outcome.broken)
        if outcome.broken:
            repeat = f"repeat: {_repeat(asked, seed)}\n"
            print("\n".join([*outcome.tail, *outcome.told(), repeat]))
        elif asked.seeds is None:
            numbers = outcome.numbers()
            print(json.dumps(numbers) if asked.json else "\n".join(outcome.told()))
    if asked.seeds is not None:
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(faults.items()))
        ended = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
        print(f"{len(seeds)} seeds: {ended}; {recoveries} recoveries; faults: {told}")
    if asked.seeds is not None or not (broken or asked.json):
        print(f"{clock.monotonic_s() - began_s:.1f} real seconds")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
