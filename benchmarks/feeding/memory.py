"""Training on more data than the object store holds, against a store that holds all of it.

`python -m benchmarks.feeding.memory` is one such run; the section starts it with either store.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

import raycloud
from benchmarks.feeding.contestants import RAY_VARIABLES, attempt, started
from benchmarks.feeding.floors import ratio
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.throughput import turns

if TYPE_CHECKING:
    from benchmarks.contestants import Attempt
    from benchmarks.feeding.images import ImageSet

TIMES_STORE = 5
LEAST_STORE_BYTES = 80 * 2**20  # Ray refuses less than 75 MB
AMPLE = 3  # times the data: half of it may pin blocks
EPOCHS = 3
WORKERS = 2


def measure(setting: Setting) -> Outcome:
    """Both stores, in turn."""
    times = _times(setting.images)
    data_bytes = setting.images.decoded_bytes * times**2
    stores = {"small": data_bytes // TIMES_STORE, "ample": data_bytes * AMPLE}
    rows = []
    for repeat, name in turns(tuple(stores), setting.repeats):
        with attempt() as place:
            summary = _run(place, setting.images, times=times, store_bytes=stores[name])
        rows.append({"store": name, "repeat": repeat, **summary})
        setting.say(f"memory, repeat {repeat}: {name:<6} {summary['samples_per_s']:8.0f} rows/s")
    rates = {
        name: [
            row["samples_per_s"]
            for row in sorted(rows, key=lambda row: int(row["repeat"]))
            if row["store"] == name
        ]
        for name in stores
    }
    note = f"{data_bytes / 2**20:.0f} MiB of data, {stores['small'] / 2**20:.0f} MiB of store"
    return Outcome(
        record={"data_bytes": data_bytes, "store_bytes": stores, "rows": rows},
        text="",
        verdicts=[
            ratio(
                f"memory: data {TIMES_STORE} x the store / all in memory",
                rates["small"],
                rates["ample"],
                at_least=0.5,
                note=note,
            )
        ],
    )


def _times(images: ImageSet) -> int:
    """How often pixels are repeated each way, so that a fifth of the data is a store Ray takes."""
    return max(2, math.ceil(math.sqrt(TIMES_STORE * LEAST_STORE_BYTES / images.decoded_bytes)))


def _run(place: Attempt, images: ImageSet, *, times: int, store_bytes: int) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "benchmarks.feeding.memory"),
        *("--images", str(images.directory), "--times", str(times)),
        *("--store-bytes", str(store_bytes), "--place", str(place.directory)),
    ]
    started(command, place, {**RAY_VARIABLES, "RAY_worker_niceness": "0"})
    summary = json.loads((place.run_directory / "summary.json").read_text())
    names = ("samples_per_s", "data_share", "steps", "samples", "notices", "recoveries", "wall_s")
    return {name: summary[name] for name in names}


def main() -> None:
    """Start a Ray with a store of the given size, and train on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--times", type=int, required=True)
    parser.add_argument("--store-bytes", type=int, required=True)
    parser.add_argument("--place", type=Path, required=True)
    asked = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=asked.store_bytes,
    )
    job = raycloud.Job(
        name="memory",
        task="benchmarks.feeding.tasks:Images",
        settings={"times": asked.times},
        epochs=EPOCHS,
        global_batch=256,
        micro_batch=64,
        data={"path": str(asked.images), "cache": {"path": str(asked.place / "cache")}},
        elastic={"min_workers": WORKERS, "max_workers": WORKERS, "shares": "equal"},
    )
    raycloud.train(job, run_dir=asked.place / "run")
    ray.shutdown()


if __name__ == "__main__":
    main()
