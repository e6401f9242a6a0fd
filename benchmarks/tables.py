"""Rows on servers against the same table as a parameter: `python -m benchmarks.tables`, as root.

Machines of the testbed behind links of `--bits-per-s`: a table of `--rows` rows of 32 values, of
which a step names some 1%. Once with `raycloud.Embedding` (plain, and with int8 gradients), a
server on each machine; once as `torch.nn.Embedding`, whose gradients travel round a ring. All take
turns in one run. Says samples a second, and the bytes that a worker sends in a step, also as a part
of the table's own bytes in fp32.

With `--reshard`: rows of 50 MB, what is kept beside them included, are moved from two servers to
three and to one while training goes on. Says the longest time between two updates meanwhile, and
the usual one. The exit status is 1 where the difference is more than 0.3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
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
from raycloud.errors import RunDirectoryError
from raycloud.events import Event, Noticed, StepsCommitted
from raycloud.report.log import read_events
from raycloud.spec.rundir import ask_servers

WIDTH, NAMED = 32, 10  # values of a row, ids of a sample
SAMPLES = 1024  # of a step
SETTLES = 3  # steps that do not count
_ENDS_S = 600.0
_ROW_BYTES = 4 * WIDTH + 4 + 8 + 8  # of a row, with its square, id and last step
_MOVED_BYTES = 50_000_000
_LEARNT = 200  # steps, after which nearly all rows are there
_AT_MOST_S = 0.3
_LOOK_S = 0.1


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


class Timed(torch.optim.SGD):
    """Notes when it made each step."""

    def __init__(self, parameters: Any, rate: float, journal: str) -> None:
        super().__init__(parameters, rate)
        self._journal = Path(journal)

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - it takes none
        """See `Optimizer.step`."""
        super().step()
        with self._journal.open("a") as file:
            file.write(f"{time.monotonic()}\n")


class TimedWide(Wide):
    """Writes the time of each update, of each worker, to files in `journals`."""

    def __init__(self, *, rows: int, dense: bool, journals: str) -> None:
        super().__init__(rows=rows, dense=dense)
        self.journals = journals

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """One that notes when it is used."""
        return Timed(model.parameters(), 0.1, f"{self.journals}/{os.getpid()}")


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


def told(run: Path) -> list[Event]:
    """The events of a run so far."""
    try:
        return [event for _, event in read_events(run / "events.jsonl")]
    except RunDirectoryError:
        return []


def until(run: Path, what: Any) -> None:
    """Wait for an event of a run of which `what` is true."""
    ends_s = time.monotonic() + _ENDS_S
    while not any(map(what, told(run))):
        if time.monotonic() > ends_s:
            raise RuntimeError(f"{run} has not come that far in {_ENDS_S:g} s")
        threading.Event().wait(_LOOK_S)


def moved(cluster: Cluster, bed: Testbed, place: Path) -> list[dict[str, float]]:
    """The longest and the usual time between two updates, for each change of servers."""
    nodes, rows = len(bed.nodes), _MOVED_BYTES // _ROW_BYTES
    journals, run = place / "journals", place / "run"
    journals.mkdir(parents=True)
    job = {
        "format": 1,
        "task": "benchmarks.tables:TimedWide",
        "settings": {"rows": rows, "dense": False, "journals": str(journals)},
        "steps": 1_000_000,
        "global_batch": SAMPLES,
        "micro_batch": SAMPLES // 32,
        "servers": 2,
        "elastic": {"min_workers": nodes, "max_workers": nodes, "shares": "equal"},
        "checkpoint": {"every_steps": None},
    }
    (place / "job.yaml").write_text(yaml.safe_dump(job))
    program = str(Path(sys.executable).with_name("raycloud"))
    command = [program, "train", str(place / "job.yaml"), "--run-dir", str(run)]
    command += ["--plain", "--address", cluster.address]
    log = place / "driver.log"
    driver = bed.head.start(command, environment=cluster.environment, log=log)
    try:
        until(run, lambda e: isinstance(e, StepsCommitted) and e.last_step >= _LEARNT)
        found = []
        for servers in (3, 1):
            began_s = time.monotonic()
            ask_servers(run, servers)
            begin, end = f"servers: {servers} in", "from now on"
            until(run, partial(_is_told, begin=begin, end=end))
            found.append((servers, began_s, time.monotonic()))
            threading.Event().wait(2.0)
    finally:
        os.kill(driver.pid, signal.SIGTERM)
    driver.wait(_ENDS_S)
    return [
        {"servers": servers, **pauses(journals, began_s, ended_s), "seconds": ended_s - began_s}
        for servers, began_s, ended_s in found
    ]


def _is_told(event: Event, *, begin: str, end: str) -> bool:
    if not isinstance(event, Noticed):
        return False
    return event.what.startswith(begin) and event.what.endswith(end)


def pauses(journals: Path, began_s: float, ended_s: float) -> dict[str, float]:
    """Of the worker that stood still longest: the longest time between two updates, the usual.

    One that stands still at the end has stood since its last update.
    """
    worst = {"longest_s": 0.0, "usual_s": 0.0}
    for one in journals.iterdir():
        every = [float(line) for line in one.read_text().splitlines()]
        times = [*(at for at in every if at < ended_s), ended_s]
        between = [(b, b - a) for a, b in pairwise(times)]
        within = [gap for at, gap in between if began_s <= at <= ended_s]
        if within and max(within) > worst["longest_s"]:
            usual_s = statistics.median(gap for at, gap in between if at < began_s)
            worst = {"longest_s": max(within), "usual_s": usual_s}
    return worst


def reshard(asked: argparse.Namespace) -> None:
    """Measure the pauses, and end with 1 where one is too long."""
    link = {"egress_bits_per_s": asked.bits_per_s, "ingress_bits_per_s": asked.bits_per_s}
    nodes = tuple(NodeSpec(name=f"n{at}", **link) for at in range(asked.nodes))
    found: list[dict[str, float]] = []
    for _ in range(asked.repeats):
        with (
            tempfile.TemporaryDirectory(prefix="t") as folder,
            Testbed(Spec(nodes=nodes)) as bed,
            Cluster(bed, directory=Path(folder) / "c", environment=environment()) as one,
        ):
            one.join(*bed.nodes)
            for node in bed.nodes.values():
                node.throttle(asked.cores)
            found += moved(one, bed, Path(folder) / "run")
    for row in found:
        pause_s = row["longest_s"] - row["usual_s"]
        print(
            f"to {row['servers']:.0f} servers: {pause_s:.3f} s beyond a usual step of "
            f"{row['usual_s']:.3f} s, all done after {row['seconds']:.1f} s"
        )
    if asked.json:
        machine = describe(os.sched_getaffinity(0))
        kept = {"machine": machine, "asked": vars(asked) | {"json": None}, "moves": found}
        asked.json.write_text(json.dumps(kept, indent=1) + "\n")
    sys.exit(any(row["longest_s"] - row["usual_s"] > _AT_MOST_S for row in found))


def main() -> None:
    """Measure all, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cores", type=float, default=0.5)
    parser.add_argument("--bits-per-s", type=float, default=1e8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--reshard", action="store_true")
    asked = parser.parse_args()
    if asked.reshard:
        reshard(asked)
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in CONTESTANTS}
    link = {"egress_bits_per_s": asked.bits_per_s, "ingress_bits_per_s": asked.bits_per_s}
    nodes = tuple(NodeSpec(name=f"n{at}", **link) for at in range(asked.nodes))
    for repeat in range(asked.repeats):
        for name, given in CONTESTANTS.items():
            with (
                tempfile.TemporaryDirectory(prefix="t") as folder,
                Testbed(Spec(nodes=nodes)) as bed,
                Cluster(bed, directory=Path(folder) / "c", environment=environment()) as one,
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


def environment() -> dict[str, str]:
    """What is passed on of the caller's shell."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    main()
