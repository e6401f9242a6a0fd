"""What dynamic allocation gains by how unequal the nodes are: four, of which one is slower.

    python -m benchmarks.papers.unequal --json FILE [--chart SVG]

Each point is two runs on the virtual clock, with planner and control as they are, with equal shares
and with those that follow the speeds. Exchanges take next to nothing. With a slowest node of 1 / r
of the others' speed, equal shares take r times as long as equal nodes, and shares in proportion
4 / (3 + 1 / r): that is the bound, missed by what is no whole micro-batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raycloud.planner.cost import Profile
from raycloud.planner.described import read_table
from raycloud.planner.speed import Speed
from raycloud.report.simulated import curves
from raycloud.simulate.jobs import Circumstances, carried_out
from raycloud.spec import Job

FORMAT = 1
RATIOS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
NODES, EACH, MICRO_BATCH = 4, 16, 4
_PROFILE = Profile(
    samples=10**6,
    parameters=1,
    gradient_bytes=4,
    state_bytes=12,
    speeds=(Speed(fixed_s=0.0, micro_batch_s=1.0 / EACH),),
)


def gains() -> Iterator[dict[str, float]]:
    """A point for each ratio."""
    for ratio in RATIOS:
        table = f"name,count,speed,mbit_s\nfast,{NODES - 1},1,10000\nslow,1,{1 / ratio},10000\n"
        took = {}
        for shares in ("equal", "auto"):
            job = Job(
                task="tasks.toy:Toy", steps=300, micro_batch=MICRO_BATCH,
                global_batch=MICRO_BATCH * EACH * NODES,
                elastic={"min_workers": NODES, "max_workers": NODES, "shares": shares},
            )  # fmt: skip
            took[shares] = carried_out(
                job, _PROFILE, read_table(table, "n.csv"), Circumstances()
            ).step_s
        yield {
            "ratio": ratio,
            "equal_s": took["equal"],
            "levelled_s": took["auto"],
            "gain": took["equal"] / took["auto"],
            "bound": ratio * (NODES - 1 + 1 / ratio) / NODES,
        }


def main() -> None:
    """Simulate, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    asked = parser.parse_args()
    points = [{name: round(value, 4) for name, value in one.items()} for one in gains()]
    for one in points:
        print(json.dumps(one))
    if asked.json is not None:
        asked.json.write_text(json.dumps({"format": FORMAT, "points": points}, indent=1) + "\n")
    if asked.chart is not None:
        lines: dict[str, Any] = {
            "measured on the virtual clock": [(one["ratio"], one["gain"]) for one in points],
            "bound": [(one["ratio"], one["bound"]) for one in points],
        }
        how = "the slowest of four nodes is so many times slower"
        asked.chart.write_text(curves(lines, how, "times as fast as equal shares") + "\n")


if __name__ == "__main__":
    main()
