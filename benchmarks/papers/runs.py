"""One run of one row: a testbed, Ray on it, a server of images, and what is seen of the run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from benchmarks.machine import ROOT
from benchmarks.papers.scenario import CORES, ZONES, Row, Setting
from benchmarks.testbed import Testbed
from benchmarks.testbed.cluster import Cluster
from raycloud.events import Evaluated, StepsCommitted
from raycloud.report.log import Tail

if TYPE_CHECKING:
    from benchmarks.testbed import Process

PORT = 8700
CLIP_NORM = 5.0
SHAPE = {"width": 32, "lr": 0.4}  # of `jobs/cifar.py`
_LEAST = 2  # crossings of the trunk, by a ring
_LOOK_S = 0.1
_SERVES_S = 30.0
_RAYCLOUD = Path(sys.executable).with_name("raycloud")


@dataclass(frozen=True, kw_only=True)
class Look:
    """The held-out images, after a step."""

    step: int
    accuracy: float
    loss: float


@dataclass
class Seen:
    """What a run has said so far.

    Attributes:
        steps: Done.
        looks: At the held-out images.
        waited_s: For batches, of all workers; `waits` steps of a worker are in it.
        memory_bytes: The most that a worker took.
    """

    steps: int = 0
    looks: list[Look] = field(default_factory=list)
    waited_s: float = 0.0
    waits: int = 0
    memory_bytes: int = 0


class Followed(Protocol):
    """A run whose words are read."""

    seen: Seen

    def read(self) -> None:
        """What is new."""
        ...


class RaycloudLog:
    """The events of a run of raycloud."""

    def __init__(self, run: Path) -> None:
        self._tail, self.seen = Tail(run / "events.jsonl"), Seen()

    def read(self) -> None:
        """What is new in the log of events."""
        seen = self.seen
        for entry in self._tail.read():
            event = entry[1]
            if isinstance(event, StepsCommitted):
                seen.steps = max(seen.steps, event.last_step)
                seen.waited_s += event.data_s
                seen.waits += event.last_step - event.first_step
                seen.memory_bytes = max(seen.memory_bytes, event.memory_bytes)
            elif isinstance(event, Evaluated):
                told = event.metrics
                look = Look(step=event.step, accuracy=told["accuracy"], loss=told["loss"])
                seen.looks.append(look)


class RayTrainLog:
    """What Ray Train's workers have said: a file each."""

    def __init__(self, log: Path, workers: int) -> None:
        self._at = {Path(f"{log}-{rank}.jsonl"): 0 for rank in range(workers)}
        self.seen = Seen()

    def read(self) -> None:
        """What is new in the files."""
        for rank, (log, at) in enumerate(self._at.items()):
            if log.exists():
                with log.open("rb") as file:
                    file.seek(at)
                    block = file.read()
                whole = block[: block.rfind(b"\n") + 1]
                self._at[log] += len(whole)
                for line in whole.splitlines():
                    self._take(rank, json.loads(line))

    def _take(self, rank: int, told: Mapping[str, Any]) -> None:
        seen = self.seen
        seen.waits, seen.waited_s = seen.waits + 1, seen.waited_s + told["waited_s"]
        seen.memory_bytes = max(seen.memory_bytes, told["bytes"])
        if rank == 0:
            seen.steps = told["step"]
            if "accuracy" in told:
                look = Look(step=told["step"], accuracy=told["accuracy"], loss=told["loss"])
                seen.looks.append(look)


@dataclass(frozen=True)
class Bed:
    """Where a run takes place.

    Attributes:
        setting: What all rows have in common.
        images: CIFAR-10's files.
        place: An empty directory with a short path.
        keep: Where logs are copied; None: nowhere.
    """

    setting: Setting
    images: Path
    place: Path
    keep: Path | None


def run_once(there: Bed, row: Row) -> dict[str, Any]:
    """One run, until the target or its limit.

    Ray draws the ids of nodes. Where zones are not known raycloud's ring follows them, and crosses
    the trunk twice or four times: all such runs have it cross twice.
    """
    while (found := _run_once(there, row)) is None:
        pass
    return found


def crossings(ids: Mapping[str, str]) -> int:
    """How often a ring in the order of these ids, by node, goes from one zone to the other.

    >>> crossings({"n1": "a", "n2": "b", "n3": "c", "n4": "d"})
    4
    """
    zones = [ZONES[int(name[1:]) - 1] for name in sorted(ids, key=ids.__getitem__)]
    return sum(one != other for one, other in zip(zones, [*zones[1:], zones[0]], strict=True))


def _run_once(there: Bed, row: Row) -> dict[str, Any] | None:
    """The same; None: the ring would cross the trunk more often than it must."""
    zones_known = row.scheduling
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'jobs'}",
        "RAYCLOUD_CACHE": str(there.place / "cache" / "head"),  # nothing is there of runs before
    }  # fmt: skip
    with (
        Testbed(there.setting.spec(zones_known=zones_known)) as bed,
        Cluster(bed, directory=there.place / "ray", environment=environment) as cluster,
    ):
        for name in bed.nodes:  # each has a disk of its own
            cluster.join(name, more={"RAYCLOUD_CACHE": str(there.place / "cache" / name)})
        ids = cluster.node_ids()
        blind = not (zones_known or row.peer)
        if blind and crossings({name: ids[name] for name in bed.nodes}) > _LEAST:
            return None
        bed.limit()
        serving = [sys.executable, "-m", "benchmarks.papers.serving", "--port", str(PORT)]
        serving += ["--file", str(there.images / "cifar10-train-0.parquet")]
        serving += ["--rows", str(there.setting.images)]
        serving += ["--bits-per-s", str(there.setting.images_mbit * 1e6)]
        server = bed.head.start(serving, environment=environment, log=there.place / "server.log")
        _await(server)
        start = _peer if row.peer else _raycloud
        process, followed = start(there, row, bed, cluster)
        try:
            return _followed(there.setting, bed, process, followed)
        finally:
            if there.keep is not None:
                _copy(there.place, there.keep)


def _await(server: Process) -> None:
    """Until it says that it listens; `RuntimeError`: it has ended."""
    ends_s = time.monotonic() + _SERVES_S
    while "listening" not in server.log.read_text():
        if server.poll() is not None or time.monotonic() > ends_s:
            raise RuntimeError(f"the server of images did not start: {server.log.read_text()}")
        time.sleep(_LOOK_S)


def _url(bed: Testbed) -> str:
    return f"http://{bed.head.address}:{PORT}"


def _job(there: Bed, row: Row, url: str) -> dict[str, Any]:
    setting = there.setting
    return {
        "format": 1,
        "name": "papers",
        "task": f"benchmarks.papers.task:{'Kept' if row.data else 'Fetched'}",
        "settings": {"url": url, "held_out": str(there.images / "cifar10-test-0.parquet"), **SHAPE},
        "steps": setting.steps,
        "global_batch": setting.batch,
        "micro_batch": setting.micro_batch,
        "clip_norm": CLIP_NORM,
        "elastic": {
            "min_workers": 1 if row.scheduling else len(CORES),
            "max_workers": len(CORES),
            "shares": "auto" if row.allocation else "equal",
        },
        "sync": "auto" if row.communication else "exact",
        "data": {"stratify": "label"} if row.data else {},
        "evaluate": {"every_steps": setting.look, "batch": 250},
        "checkpoint": {"every_steps": 100_000},
    }


def _raycloud(there: Bed, row: Row, bed: Testbed, cluster: Cluster) -> tuple[Process, Followed]:
    path, run = there.place / "job.yaml", there.place / "run"
    path.write_text(yaml.safe_dump(_job(there, row, _url(bed)), sort_keys=False))
    command = [str(_RAYCLOUD), "train", str(path), "--plain", "--run-dir", str(run)]
    command += ["--address", cluster.address]
    log = there.place / "driver.log"
    return bed.head.start(command, environment=dict(cluster.environment), log=log), RaycloudLog(run)


def _peer(there: Bed, _: Row, bed: Testbed, cluster: Cluster) -> tuple[Process, Followed]:
    setting, log = there.setting, there.place / "steps"
    told = {
        "url": _url(bed), "held_out": str(there.images / "cifar10-test-0.parquet"), "shape": SHAPE,
        "steps": setting.steps, "batch": setting.batch, "clip_norm": CLIP_NORM,
        "look": setting.look, "log": str(log),
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.papers.ray_train", "--address", cluster.address]
    command += ["--storage", str(there.place / "storage"), "--workers", str(len(CORES))]
    command += ["--told", json.dumps(told)]
    out = there.place / "driver.log"
    return bed.head.start(command, environment=dict(cluster.environment), log=out), RayTrainLog(
        log, len(CORES)
    )


def _spent(bed: Testbed) -> tuple[float, int]:
    """Processor seconds of all nodes, and bytes that they were sent."""
    nodes = bed.nodes.values()
    return sum(n.cpu_s() for n in nodes), sum(n.traffic().received_bytes for n in nodes)


def _followed(
    setting: Setting, bed: Testbed, process: Process, followed: Followed
) -> dict[str, Any]:
    seen, began_s, start = followed.seen, time.monotonic(), _spent(bed)
    first_s, steps_before, why = 0.0, 0, ""
    quota, quota_s, changed_s = sum(CORES), 0.0, began_s
    slow = [(setting.slow_s[0], setting.slow_cores), (setting.slow_s[1], CORES[0])]
    while True:
        ended = process.poll()
        followed.read()  # all that it has said, where it has ended
        now_s = time.monotonic()
        if not first_s and seen.steps:
            first_s, steps_before = now_s, seen.steps
        if first_s and slow and now_s - first_s >= slow[0][0]:
            quota_s += quota * (now_s - changed_s)
            changed_s = now_s
            bed["n1"].throttle(slow[0][1])
            quota = sum(CORES[1:]) + slow.pop(0)[1]
        if any(look.accuracy >= setting.accuracy for look in seen.looks):
            break
        if ended is not None:
            why = f"ended with {ended} after {seen.steps} steps"
        elif not first_s and now_s - began_s > setting.start_s:
            why = f"no step after {setting.start_s:g} s"
        elif first_s and now_s - first_s > setting.limit_s:
            why = f"not there after {setting.limit_s:g} s and {seen.steps} steps"
        if why:
            break
        time.sleep(_LOOK_S)
    (cpu_s, received), took_s = _spent(bed), now_s - first_s if first_s else 0.0
    quota_s += quota * (now_s - changed_s)
    samples = seen.steps * setting.batch
    return {
        "seconds": None if why else now_s - began_s,
        "why": why,
        "from_first_step_s": None if why else took_s,
        "steps": seen.steps,
        "samples_per_s": (seen.steps - steps_before) * setting.batch / took_s if took_s else 0.0,
        "bytes_per_sample": (received - start[1]) / samples if samples else None,
        "wait_s_per_step": seen.waited_s / seen.waits if seen.waits else None,
        "cpu": (cpu_s - start[0]) / quota_s,
        "memory_bytes": seen.memory_bytes,
        "cost": None if why else (now_s - began_s) / 3600 * sum(CORES) * setting.price,
        "looks": [[look.step, look.accuracy, look.loss] for look in seen.looks],
    }


def _copy(place: Path, kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    names = ("driver.log", "server.log", "job.yaml", "run/events.jsonl", "steps-*.jsonl")
    for file in chain.from_iterable(place.glob(name) for name in names):
        shutil.copy(file, kept)
