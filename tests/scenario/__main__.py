"""Training under faults as a command: `python -m tests.scenario --seed 7`, or `--seeds 0:100`.

It tells the story of a seed. Where a promise was broken it says which, and exits with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests/conftest.py; read by torch

if TYPE_CHECKING:
    from tests.scenario.run import Outcome


FAULTS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the seeds that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.scenario", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all that is left to chance")
    parser.add_argument("--seeds", help="FIRST:LAST, each of these but the last; no stories")
    parser.add_argument("--faults", type=int, default=FAULTS, help=f"how many (default {FAULTS})")
    asked = parser.parse_args(arguments)
    if asked.seeds is None:
        return _one(asked.seed, asked.faults, loud=True)
    first, _, last = asked.seeds.partition(":")
    return max([_one(seed, asked.faults, loud=False) for seed in range(int(first), int(last))])


def _one(seed: int, faults: int, *, loud: bool) -> int:
    from tests.scenario.run import drawn, play

    began_s, scenario = time.monotonic(), drawn(seed, count=faults)
    with tempfile.TemporaryDirectory() as folder:
        outcome = play(scenario, Path(folder))
    if loud:
        _say(*outcome.story)
    _say(*told(seed, outcome, faults), f"  {time.monotonic() - began_s:.1f} real seconds")
    return 1 if outcome.wrong else 0


def told(seed: int, outcome: Outcome, faults: int = FAULTS) -> list[str]:
    """What came of it, in lines; with the command that repeats it where a promise was broken."""
    lines = [
        f"seed {seed}: {outcome.status} after {outcome.virtual_s:.0f} virtual seconds, "
        f"{outcome.befallen} faults, {outcome.starts} starts, {outcome.generations} generations, "
        f"{outcome.recoveries} recoveries, {outcome.members} members, {outcome.returned} returned, "
        f"{outcome.mistaken} given up that were well, {outcome.apart:.1e} apart, "
        f"digest {outcome.digest}",
        *(f"BROKEN: {wrong}" for wrong in outcome.wrong),
    ]
    if outcome.wrong:
        also = "" if faults == FAULTS else f" --faults {faults}"
        lines.append(f"repeat: python -m tests.scenario --seed {seed}{also}")
    return lines


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
