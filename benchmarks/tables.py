"""Rows on servers against the same table as a parameter: `python -m benchmarks.tables`, as root.

Machines of the testbed behind links of `--bits-per-s`: a table of `--rows` rows of 32 values, of
which a step names some 1%. Once with `raycloud.Embedding` (plain, and with int8 gradients), a
server on each machine; once as `torch.nn.Embedding`, whose gradients travel round a ring. All take
turns in one run. Says samples a second, and the bytes that a worker sends in a step, also as a part
of the table's own bytes in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

import raycloud
from benchmarks.machine import ROOT, describe
from benchmarks.testbed import NodeSpec, Spec, Testbed
from benchmarks.testbed.cluster import Cluster
from raycloud import Splits, Task
from raycloud.events import StepsCommitted
from raycloud.report.log import read_events

WIDTH, NAMED = 32, 10  # values of a row, ids of a sample
SAMPLES = 1024  # of a step
SETTLES = 3  # steps that do not count
_ENDS_S = 600.0


class Wide(Task):
    """The mean of a sample's rows, through one layer."""

    def __init__(self, *, rows: int, dense: bool) -> None:
        self.rows, self.dense = rows, dense

    def model(self) -> nn.Module:
        """A table, and a layer."""
        table = nn.Embedding(self.rows, WIDTH) if self.dense else raycloud.Embedding(WIDTH)
        return nn.ModuleDict({"table": table, "last": nn.Linear(WIDTH, 1)})

    def data(self, path: str | None) -> Splits:  # noqa: ARG002 - it needs none
        """Numbers, from which ids are drawn."""
        return Splits(train=range(100_000))

    def batch(self, samples: Sequence[int], rng: Any) -> Tensor:  # noqa: ARG002 - each has its own
        """Ids, of shape (samples, ids of each)."""
        drawn = [np.random.default_rng(one).integers(0, self.rows, NAMED) for one in samples]
        return torch.from_numpy(np.stack(drawn))

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        """Of something that can be learnt."""
        found = model["last"](model["table"](batch).mean(1))[:, 0]
        return (found - (batch[:, 0] % 2)).square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """One without moments: the ring is what is compared."""
        return torch.optim.SGD(model.parameters(), 0.1)


CONTESTANTS: dict[str, dict[str, Any]] = {
    "rows": {"dense": False, "codec": "none"},
    "rows, int8": {"dense": False, "codec": "int8"},
    "ring": {"dense": True, "codec": "none"},
}


def measured(cluster: Cluster, bed: Testbed, place: Path, **asked: Any) -> dict[str, float]:
    """Samples a second and bytes a step of one contestant."""
    nodes = len(bed.nodes)
    job = {
        "format": 1,
        "task": "benchmarks.tables:Wide",
        "settings": {"rows": asked["rows"], "dense": asked["dense"]},
        "steps": asked["steps"],
        "global_batch": SAMPLES,
        "micro_batch": SAMPLES // 32,
        "servers": 0 if asked["dense"] else nodes,
        "elastic": {"min_workers": nodes, "max_workers": nodes, "shares": "equal"},
        "sync": {"codec": asked["codec"]},
        "checkpoint": {"every_steps": None},
    }
    place.mkdir()
    (place / "job.yaml").write_text(yaml.safe_dump(job))
    program = str(Path(sys.executable).with_name("raycloud"))
    command = [program, "train", str(place / "job.yaml"), "--run-dir", str(place / "run")]
    command += ["--plain", "--address", cluster.address]
    log = place / "driver.log"
    driver = bed.head.start(command, environment=cluster.environment, log=log)
    if driver.wait(_ENDS_S) != 0:
        raise RuntimeError(log.read_text()[-3000:])
    return rates(place / "run" / "events.jsonl", nodes)


def rates(log: Path, members: int) -> dict[str, float]:
    """What a run's log says of the steps that count."""
    told = [(t, event) for t, event in read_events(log) if isinstance(event, StepsCommitted)]
    ends = sorted({event.last_step: t for t, event in told}.items())
    after = [(step, t) for step, t in ends if step >= SETTLES]
    (first, begun), (last, ended) = after[0], after[-1]
    counted = [event for _, event in told if event.first_step >= first]
    steps = (last - first) * members
    return {
        "samples_per_s": SAMPLES * (last - first) / (ended - begun),
        "bytes_a_step": sum(event.bytes_sent for event in counted) / steps,
    }


def main() -> None:
    """Measure all, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cores", type=float, default=0.5)
    parser.add_argument("--bits-per-s", type=float, default=1e8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in CONTESTANTS}
    link = {"egress_bits_per_s": asked.bits_per_s, "ingress_bits_per_s": asked.bits_per_s}
    nodes = tuple(NodeSpec(name=f"n{at}", **link) for at in range(asked.nodes))
    for repeat in range(asked.repeats):
        for name, given in CONTESTANTS.items():
            with (
                tempfile.TemporaryDirectory(prefix="t") as folder,
                Testbed(Spec(nodes=nodes)) as bed,
                Cluster(bed, directory=Path(folder) / "c", environment=_environment()) as one,
            ):
                one.join(*bed.nodes)
                for node in bed.nodes.values():
                    node.throttle(asked.cores)
                steps = 8 if given["dense"] else 60
                place = Path(folder) / f"{repeat}"
                row = measured(one, bed, place, rows=asked.rows, steps=steps, **given)
            found[name].append(row)
            part = row["bytes_a_step"] / (4 * WIDTH * asked.rows)
            print(
                f"{name:12}{row['samples_per_s']:10.1f} samples/s{part:9.3%} of the table's bytes"
            )
    middle = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for name, rows in found.items()
    }
    ratio = middle["rows"]["samples_per_s"] / middle["ring"]["samples_per_s"]
    print(f"rows against the ring: {ratio:.1f} times the samples a second")
    if asked.json:
        told = {
            "machine": describe(os.sched_getaffinity(0)),
            "asked": vars(asked) | {"json": None},
            "rows": found,
        }
        asked.json.write_text(json.dumps(told, indent=1) + "\n")


def _environment() -> dict[str, str]:
    """Of the caller's shell only this is passed on."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    main()
