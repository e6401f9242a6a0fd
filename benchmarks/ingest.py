"""Feeding: raycloud's data pipeline against others, and against the floors it is held to.

    python -m benchmarks.ingest --json FILE

Whatever is compared takes turns within a repeat, and the first turn goes round from repeat to
repeat. Every run is a fresh process tree on the same two CPUs that has worked on a small data set
before it is timed. What a peer cannot do here is said, never left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.feeding import clicks, epochs, memory, mixing, sequence, training
from benchmarks.feeding.floors import Verdict, table
from benchmarks.feeding.images import DEFAULT, find
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.machine import describe
from benchmarks.processes import CommandFailedError

FORMAT = 1
CPUS = 2
SECTIONS: Mapping[str, Callable[[Setting], Outcome]] = {
    "epochs": epochs.measure,
    "waiting": training.measure_waiting,
    "memory": memory.measure,
    "order": sequence.measure,
    "shuffle": mixing.measure_shuffle,
    "stratified": mixing.measure_strata,
    "clicks": clicks.measure,
    "cifar": training.measure_cifar,
}
ON_REQUEST = ("cifar",)  # takes ten minutes
CLICKS = DEFAULT.parent / "clicks" / "online_shoppers_intention.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; 1 where a section failed, or a floor was not reached."""
    asked = _parse(arguments)
    cpus = set(sorted(os.sched_getaffinity(0))[:CPUS])
    os.sched_setaffinity(0, cpus)  # inherited by all that is started
    found: dict[str, Outcome] = {}
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="ingest") as place:
        images = find(asked.images, Path(place), quick=asked.quick)
        _say(f"{images.rows} images: {images.kind}")
        setting = Setting(
            images=images,
            clicks=CLICKS if CLICKS.exists() else None,
            environments=asked.environments,
            repeats=asked.repeats,
            quick=asked.quick,
            say=_say,
        )
        for name in asked.only:
            _say(f"\n{name}")
            try:
                found[name] = SECTIONS[name](setting)
            except (CommandFailedError, ValueError) as error:
                failures[name] = str(error)
                _say(f"{name} failed: {error}")
    verdicts = [one for outcome in found.values() for one in outcome.verdicts]
    if asked.json is not None:
        record = {
            "format": FORMAT,
            "machine": describe(cpus),
            "images": images.record(),
            "repeats": asked.repeats,
            "quick": asked.quick,
            "sections": {name: outcome.record for name, outcome in found.items()},
            "verdicts": [one.record() for one in verdicts],
            "failures": failures,
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    _say("\n" + "\n\n".join(filter(None, (outcome.text for outcome in found.values()))))
    _say("\n" + table(verdicts))
    for name, why in failures.items():
        print(f"\n{name} failed: {why}", file=sys.stderr)
    return 1 if failures or _short(verdicts) else 0


def _short(verdicts: Sequence[Verdict]) -> bool:
    return any(one.passes is False for one in verdicts)


def _say(line: str) -> None:
    print(line, flush=True)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}; known: {', '.join(SECTIONS)}")
    return names


def _environments() -> Path:
    """Where environments of peers are kept: outside of the checkout, and found again."""
    home: Any = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "raycloud-benchmarks"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    usual = tuple(name for name in SECTIONS if name not in ON_REQUEST)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ingest", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only", type=_sections, default=usual, help=f"sections, of {', '.join(SECTIONS)}"
    )
    parser.add_argument("--images", type=Path, help="directory of Parquet files with JPEGs")
    parser.add_argument("--environments", type=Path, default=_environments())
    parser.add_argument("--quick", action="store_true", help="one repeat, a tenth of the images")
    asked = parser.parse_args(arguments)
    if asked.quick:
        asked.repeats = 1
    if asked.repeats < 1:
        parser.error("--repeats must be positive")
    return asked


if __name__ == "__main__":
    sys.exit(main())
