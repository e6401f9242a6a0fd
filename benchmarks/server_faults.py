"""How long training stands still where a server is lost: `python -m benchmarks.server_faults`.

As root. Four machines of the testbed with servers on each and workers on three of them: rows of a
table in shards with a copy each, servers that sum the gradients of dense layers in lockstep, and
servers that keep the parameters, to which workers go at most three steps ahead. The fourth machine
has servers only. Once one of them is killed, once the whole machine is cut off, each in the middle
of steps. Said is the longest time between two updates of a worker in the seconds after it, and the
usual one before it. The exit status is 1 where the longest takes 0.5 s more, or, cut off, 1.5 s.

At the end all steps are computed once more by one worker, whose servers nobody ends: where each
step is that of all workers together, the parameters are to be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from benchmarks.machine import describe
from benchmarks.tables import SAMPLES, environment, pauses, until
from benchmarks.testbed import NodeSpec, Spec, Testbed
from benchmarks.testbed.cluster import Cluster
from raycloud.checkpoint import latest, open_store
from raycloud.checkpoint.payload import load_tensors
from raycloud.events import Event, StepsCommitted
from raycloud.order import read_ledger

if TYPE_CHECKING:
    from benchmarks.testbed.machine import Machine

NODES, WORKERS, ROWS = 4, 3, 20_000
SERVERS = NODES + 1  # one on each, the head included
LEARNT = 100  # steps, before the first fault
WATCHED_S = 12.0  # after a fault
AT_MOST_S = {"killed": 0.5, "cut off": 1.5}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "rows": {"servers": {"shards": SERVERS, "copies": 1}},
    "lockstep": {"sync": {"topology": "servers"}, "servers": SERVERS},
    "stale": {"sync": {"topology": "servers", "staleness": 3}, "servers": SERVERS},
}
_ENDS_S = 300.0
_LIKE = 1e-4  # values of fp32, whose sums have other orders
Row = dict[str, Any]


def job_of(way: str, steps: int, workers: int, journals: Path) -> Row:
    """The job of a way, whose workers note their updates."""
    told: Row = {
        "format": 1,
        "task": "benchmarks.tables:TimedWide",
        "settings": {"rows": ROWS, "dense": way != "rows", "journals": str(journals)},
        "steps": steps,
        "global_batch": SAMPLES,
        "micro_batch": SAMPLES // 32,
        "elastic": {"min_workers": 1, "max_workers": workers},
        "checkpoint": {"every_steps": None},
    }
    return told | WAYS[way]


def started(bed: Testbed, cluster: Cluster, place: Path, job: Row) -> tuple[Any, Path]:
    """The command that drives a run of this job, and the run's directory."""
    (place / "journals").mkdir(parents=True)
    (place / "job.yaml").write_text(yaml.safe_dump(job))
    command = [str(Path(sys.executable).with_name("raycloud")), "train", str(place / "job.yaml")]
    command += ["--run-dir", str(place / "run"), "--plain", "--address", cluster.address]
    log = place / "driver.log"
    return bed.head.start(command, environment=cluster.environment, log=log), place / "run"


def has_come(event: Event, *, step: int) -> bool:
    """Whether an event says that so many steps are done."""
    return isinstance(event, StepsCommitted) and event.last_step >= step


def named(machine: Machine, name: str) -> list[int]:
    """The processes of actors of this class on a machine."""
    every = ((pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in machine.processes())
    return [pid for pid, line in every if f"ray::{name}".encode() in line]


def faults(bed: Testbed, cluster: Cluster, place: Path, way: str) -> list[Row]:
    """The pause of each fault in one run, and whether the run's result is right."""
    driver, run = started(bed, cluster, place, job_of(way, 1_000_000, WORKERS, place / "journals"))
    found = []
    try:
        until(run, partial(has_come, step=LEARNT))
        every = bed.nodes.values()
        idle = next(one for one in every if not named(one, "MemberActor"))
        for fault in AT_MOST_S:
            began_s = time.monotonic()
            if fault == "killed":
                idle.signal(named(idle, "ServerActor")[0], signal.SIGKILL)
            else:
                idle.cut()
            threading.Event().wait(WATCHED_S)
            row = pauses(place / "journals", began_s, began_s + WATCHED_S)
            found.append({"way": way, "fault": fault, **row})
    finally:
        os.kill(driver.pid, signal.SIGTERM)
        driver.wait(_ENDS_S)
    ledger = read_ledger((run / "ledger").read_text().splitlines(keepends=True))
    result: Row = {"exact_ledger": ledger.audit().exact, "steps": ledger.next_step}
    if way != "stale":
        idle.mend()
        again = place / "again"
        job = job_of(way, ledger.next_step, 1, again / "journals")
        driver, other = started(bed, cluster, again, job)
        if driver.wait(_ENDS_S) != 0:
            raise RuntimeError((again / "driver.log").read_text()[-3000:])
        result["apart"] = apart(run, other)
    return [row | result for row in found]


def apart(one: Path, other: Path) -> float:
    """The largest difference between the values of two runs' newest checkpoints, rows included."""
    (a, b), most = map(values, (one, other)), 0.0
    if a.keys() != b.keys():
        raise RuntimeError(f"{one} and {other} have other values: {sorted(a.keys() ^ b.keys())}")
    for name in a:
        most = max(most, float(np.abs(a[name] - b[name]).max(initial=0.0)))
    return most


def values(run: Path) -> dict[str, np.ndarray]:
    """The parameters, and each row by table and id, in a run's newest checkpoint."""
    store = open_store(str(run / "checkpoints"))
    manifest = latest(store).manifest
    if manifest is None:
        raise RuntimeError(f"{run} has no checkpoint")
    tensors = load_tensors(store, manifest).items()
    found = {name: one.numpy() for name, one in tensors if name.startswith("model/")}
    for name in store.names(f"step-{manifest.step:08d}"):
        if "/tables-" in name:
            with np.load(run / "checkpoints" / name) as file:
                for key in file.files:
                    if key.endswith("/ids"):
                        table = key.removesuffix("/ids")
                        rows = zip(file[key].tolist(), file[f"{table}/rows"], strict=True)
                        found |= {f"{table}/{one}": row for one, row in rows}
    return found


def wrong(row: Row) -> bool:
    """Whether a row does not show what is promised."""
    late = row["longest_s"] - row["usual_s"] > AT_MOST_S[row["fault"]]
    return late or not row["exact_ledger"] or row.get("apart", 0.0) > _LIKE


def keep(asked: argparse.Namespace, rows: list[Row]) -> None:
    """Write what there is so far."""
    told = {name: value for name, value in vars(asked).items() if name not in {"json", "keep"}}
    kept = {"machine": describe(os.sched_getaffinity(0)), "asked": told, "rows": rows}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    """Measure each way, as often as is asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--cores", type=float, default=0.4)
    parser.add_argument("--bits-per-s", type=float, default=1e8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="logs of the runs stay there")
    asked = parser.parse_args()
    if asked.keep and asked.keep.exists() and any(asked.keep.iterdir()):
        parser.error(f"--keep {asked.keep}: is not empty; name another folder")
    link = {"egress_bits_per_s": asked.bits_per_s, "ingress_bits_per_s": asked.bits_per_s}
    nodes = tuple(NodeSpec(name=f"n{at}", **link) for at in range(NODES))
    found: list[Row] = []
    for repeat in range(asked.repeats):
        for way in asked.ways:
            with (
                tempfile.TemporaryDirectory(prefix="t") as folder,
                Testbed(Spec(nodes=nodes)) as bed,
                Cluster(bed, directory=Path(folder) / "c", environment=environment()) as one,
            ):
                one.join(*bed.nodes)
                for node in bed.nodes.values():
                    node.throttle(asked.cores)
                place = (asked.keep or Path(folder)).resolve() / f"{way}-{repeat}"
                found += faults(bed, one, place, way)
            for row in found[-len(AT_MOST_S) :]:
                pause_s, rest = row["longest_s"] - row["usual_s"], row.get("apart", "not compared")
                print(
                    f"{way}, a server {row['fault']}: {pause_s:.3f} s beyond a usual step of "
                    f"{row['usual_s']:.3f} s; {row['steps']} steps, ledger exact: "
                    f"{row['exact_ledger']}, apart from one process: {rest}",
                    flush=True,
                )
            if asked.json:
                keep(asked, found)
    sys.exit(any(map(wrong, found)))


if __name__ == "__main__":
    main()
