"""How well an epoch is shuffled, and how near to the data set's mix stratified partitions are."""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.feeding.floors import Verdict
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.machine import ROOT
from raycloud.clock import SystemClock
from raycloud.data.cache import BlockCache
from raycloud.data.partition import equal_rows, partition_count
from raycloud.on_ray.tasks import resolve
from raycloud.order import Layout, Order
from raycloud.spec import load_job
from raycloud.step.contract import construct
from tests.one_process import prepare_here
from tests.shuffling import displacement, neighbours_together

BATCH = 128
LANES = (1, 4)  # micro-batches of 128 and of 32
WINDOWS = (1, 4, 16)
PARTITION_BYTES = 16 * 2**20
NEAR = 100
CLICKS = ROOT / "jobs" / "clicks.yaml"


def measure_shuffle(setting: Setting) -> Outcome:
    """How well the images are mixed, by lanes and window, against a permutation of all rows."""
    rows = setting.images.rows
    largest = PARTITION_BYTES * rows // setting.images.decoded_bytes
    found = []
    for lanes in LANES:
        starts = equal_rows(rows, partition_count(rows, largest, lanes))
        for window in WINDOWS:
            layout = Layout(partitions=starts, lanes=lanes, run=BATCH // lanes, window=window)
            found.append(_quality(f"{lanes} lanes, window {window}", rows, layout))
    found.append(_quality("whole permutation", rows, None))
    lines = [f"{'shuffle (1 is full)':<22}{'partitions':>12}{'neighbours':>12}{'displacement':>14}"]
    lines += [
        f"{one['name']:<22}{one['partitions']:>12}{one['neighbours_together']:>12.3f}"
        f"{one['displacement']:>14.3f}"
        for one in found
    ]
    default = next(one for one in found if one["name"] == "4 lanes, window 4")
    return Outcome(
        record={"rows": rows, "global_batch": BATCH, "near": NEAR, "found": found},
        text="\n".join(lines),
        verdicts=[
            Verdict(
                name="shuffle: neighbours in a step, against a full one",
                value=default["neighbours_together"],
                unit="x",
                note=f"pairs within {NEAR} rows, as jobs/cifar.yaml reads",
            )
        ],
    )


def _quality(name: str, rows: int, layout: Layout | None) -> dict[str, Any]:
    order = Order(samples=rows, seed=0, layout=layout)
    return {
        "name": name,
        "partitions": layout.count if layout else 0,
        "neighbours_together": neighbours_together(order, 1, BATCH, NEAR),
        "displacement": displacement(order, 1),
    }


def measure_strata(setting: Setting) -> Outcome:
    """The shares of both classes in every partition of `jobs/clicks.yaml`."""
    if setting.clicks is None:
        return Outcome(record={}, text="stratified: no clicks here to measure with", verdicts=[])
    job = load_job(CLICKS, [f"data.path={setting.clicks}"])
    task = construct(resolve(job), job)
    with tempfile.TemporaryDirectory(prefix="strata") as place:
        splits = task.data(job.data.path)
        samples = prepare_here(job, task, splits, BlockCache(Path(place)), SystemClock()).train
        index = samples.index
        classes = [int(samples[row][job.data.stratify]) for row in range(len(samples))]
    whole = Counter(classes)
    count = len(index.partitions) - 1
    worst = 0.0
    for start, stop in pairwise(index.partitions):
        here = Counter(classes[start:stop])
        worst = max(worst, *(abs(here[one] - total * 1.0 / count) for one, total in whole.items()))
    return Outcome(
        record={"rows": len(classes), "partitions": count, "classes": whole, "worst_rows": worst},
        text="",
        verdicts=[
            Verdict(
                name="stratified: rows off the exact share, at worst",
                value=worst,
                at_most=1.0,
                unit=" rows",
                note=f"{count} partitions, classes of {sorted(whole.values())} rows",
            )
        ],
    )
