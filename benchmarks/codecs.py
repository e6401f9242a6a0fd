"""How fast codecs are on one core, against copying the same memory in the same run.

    python -m benchmarks.codecs --json FILE

Each ratio is of bytes of fp32 a second: 1.0 is as fast as `Tensor.copy_` of as many values. The
values are as gradients are, far from 1 and of a different size in each block. What is timed takes
turns, and the median of the ratios within a turn counts, so that a machine that is busy for a while
slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import describe
from raycloud.step.device import keep_freed_memory
from raycloud.sync.codecs import CODECS, Codec, TopK

COUNT = 1 << 21  # values: 8 MiB, more than the cores' own caches hold
FLOORS = {  # of encode and add
    "bf16": (1.0, 0.0),
    "int8": (1.0, 0.6),
    "int4": (0.5, 0.4),
}


def seconds(act: Callable[[], object], *, times: int = 3) -> float:
    """Of one call: the best of a few."""
    found = []
    for _ in range(times):
        began_s = time.perf_counter()
        act()
        found.append(time.perf_counter() - began_s)
    return min(found)


def speeds(codec: Codec, turns: int) -> dict[str, float]:
    """Encode and add of a codec, as ratios to memcpy; and how many times fewer bytes it sends."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(COUNT, generator=generator) * 1e-4
    codes = torch.empty(codec.bound(COUNT), dtype=torch.uint8)
    to, copy = torch.zeros(COUNT), torch.zeros(COUNT)
    ratios: dict[str, list[float]] = {"encode": [], "add": [], "subtract": []}
    for _ in range(turns):
        copied_s = seconds(lambda: copy.copy_(values))
        ratios["encode"].append(copied_s / seconds(lambda: codec.encode(values, codes)))
        ratios["add"].append(copied_s / seconds(lambda: codec.add(codes, to)))
        ratios["subtract"].append(copied_s / seconds(lambda: codec.subtract(codes, to)))
    found = {name: statistics.median(of) for name, of in ratios.items()}
    return {**found, "times_fewer_bytes": 4 * COUNT / codec.bound(COUNT)}


def main() -> None:
    """Measure all codecs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    every: dict[str, Codec] = {**CODECS, **{f"topk {n}": TopK(n) for n in (8, 32)}}
    rows = {name: speeds(codec, asked.turns) for name, codec in every.items()}
    print(f"{'codec':8}{'fewer bytes':>12}{'encode':>9}{'add':>9}{'subtract':>10}   floors")
    for name, row in rows.items():
        floor = " ".join(f"{x:g}" for x in FLOORS.get(name, ()))
        print(
            f"{name:8}{row['times_fewer_bytes']:12.2f}{row['encode']:9.2f}{row['add']:9.2f}"
            f"{row['subtract']:10.2f}   {floor}"
        )
    if asked.json:
        asked.json.write_text(
            json.dumps({"machine": describe(os.sched_getaffinity(0)), "codecs": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
