"""The papers' ablation: what each strategy gains by itself, and what is lost without it.

    python -m benchmarks.papers --images DIRECTORY --json FILE [--trunk-mbit 20] [--repeats 3]
        [--only NAME ...] [--keep DIRECTORY] [--quick]

As root, on the testbed. A repeat is a run of each row; runs that the file has are not done again.
Exit status 1: all strategies together are less than three times sooner at the target than none.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, load
from benchmarks.papers.page import table
from benchmarks.papers.runs import Bed, run_once
from benchmarks.papers.scenario import ROWS, Setting

FORMAT = 1
SOONER = 3.0


def main() -> int:
    """Measure what is not in the file, keep it, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--images", type=Path, required=True, help="CIFAR-10's Parquet files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trunk-mbit", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--keep", type=Path, help="logs of the runs stay there")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    asked = parser.parse_args()
    for name in ("train-0", "test-0"):
        if not (asked.images / f"cifar10-{name}.parquet").is_file():
            parser.error(f"--images {asked.images}: holds no cifar10-{name}.parquet")
    if asked.json and not asked.json.resolve().parent.is_dir():
        parser.error(f"--json {asked.json}: there is no such directory; make it first")
    setting = Setting(trunk_mbit=asked.trunk_mbit)
    setting = setting.quick() if asked.quick else setting
    told: dict[str, Any] = {"format": FORMAT, "setting": setting.describe(), "runs": []}
    if asked.json and asked.json.exists():
        told = json.loads(asked.json.read_text())
        if told.get("format") != FORMAT or told["setting"] != setting.describe():
            parser.error(f"--json {asked.json}: holds runs of another setting; name another file")
    done = {(one["repeat"], one["row"]) for one in told["runs"]}
    for repeat in range(asked.repeats):
        for name in asked.only:
            if (repeat, name) in done:
                continue
            with tempfile.TemporaryDirectory(prefix="p", ignore_cleanup_errors=True) as place:
                keep = asked.keep and asked.keep / f"{name}-{repeat}".replace(" ", "-")
                bed = Bed(setting, asked.images.resolve(), Path(place), keep)
                before = load()
                found = run_once(bed, ROWS[name])
            machine = describe(os.sched_getaffinity(0))
            head = {"repeat": repeat, "row": name, "machine": machine, "load_before": before}
            told["runs"].append({**head, **found})
            print(f"repeat {repeat}, {name}: {found['seconds'] or found['why']}", flush=True)
            if asked.json:
                draft = asked.json.with_suffix(".draft")
                draft.write_text(json.dumps(told, indent=1) + "\n")
                draft.replace(asked.json)
    lines, sooner = table(told["runs"])
    print("\n".join(lines))
    return 0 if sooner is not None and sooner >= SOONER else 1


if __name__ == "__main__":
    sys.exit(main())
