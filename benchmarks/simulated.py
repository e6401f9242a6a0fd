"""Simulated jobs: how they scale, how long plans take, and what policies gain on real traces.

    python -m benchmarks.simulated --data DIRECTORY --json FILE [--chart SVG]

DIRECTORY holds `cluster/openb_node_list_all_node.csv`, 1,523 nodes of a production cluster,
`straggler/job_*_norm.csv`, batch times of workers of real jobs, and `spot/*.json`, how many spot
machines one user could hold (Alibaba, clusterdata; SkyPilot, spot-traces).

The curve is one job, as large a batch for each worker whatever their number, on nodes of 8 cores
with 10 Gbit/s. Each point is a run on the virtual clock, with control and faults as large clusters
tell of them. All but the seconds of plans and runs is the same on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.packing import read_nodes
from raycloud.planner.cost import Profile
from raycloud.planner.described import Described, read_table
from raycloud.planner.inventory import Inventory
from raycloud.planner.placement import place
from raycloud.planner.plan import workers
from raycloud.planner.speed import Speed
from raycloud.report.simulated import curves
from raycloud.simulate.jobs import Circumstances, carried_out, planned, policies, resized
from raycloud.simulate.policies import FORESIGHT, LAST
from raycloud.simulate.traces import Held, Paced, read_trace
from raycloud.spec import Job

FORMAT = 1
NODES = (4, 10, 30, 100, 300, 1000, 2000, 5000)
WAYS: dict[str, dict[str, Any]] = {
    "ring": {"sync": {"topology": "ring"}},
    "tree": {"sync": {"topology": "tree"}},
    "servers": {"sync": {"topology": "servers"}},
    "rounds": {"sync": {"topology": "direct", "codec": "int4", "period": 16}},
}
PLANS = ((1523, 1.0), (10_000, 5.0))  # nodes, and the seconds that a plan may take
OFFERED = ((16, 16), (64, 16), (64, 64))  # micro-batches of a worker, and of those to its backup
CONTROLLED = (16, 64)  # micro-batches of a worker, of whole runs
_ZONES = 4
_EACH = 8  # micro-batches of a worker
_STEPS = 2000
_MEASURED = Profile(
    samples=10**8,
    parameters=25 * 10**6,
    gradient_bytes=10**8,
    state_bytes=3 * 10**8,
    speeds=(Speed(fixed_s=0.05, micro_batch_s=0.125),),
)


def job(**fields: Any) -> Job:
    """That is scaled: a second of computing a step."""
    told = {"task": "tasks.toy:Toy", "steps": _STEPS, "micro_batch": 4, **fields}
    return Job(**{"global_batch": 4 * 4 * _EACH, "elastic": {"max_workers": 4}, **told})


def cluster() -> Described:
    """Four nodes in as many zones."""
    lines = (f"n{zone},8,10000,0.1,z{zone},3.0" for zone in range(_ZONES))
    table = "\n".join(["name,cpus,mbit_s,delay_ms,zone,price_per_hour", *lines])
    return read_table(table, "cluster")


def curve(way: str, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A point for each number of nodes."""
    for nodes in numbers:
        fields = dict(WAYS[way])
        if way == "servers":
            fields["servers"] = min(nodes, 1024)  # the most there are
        asked = job(**fields, resources={"worker": {"cpus": 8}})
        sized, there = resized(asked, cluster(), nodes=nodes, weak=True)
        began_s = time.process_time()
        found = carried_out(sized, _MEASURED, there, Circumstances())
        alone = sized.global_batch / nodes / _MEASURED.speeds[0].seconds(_EACH)
        yield {
            "nodes": nodes,
            "step_s": found.step_s,
            "exposed_s": found.exposed_s,
            "samples_per_s": found.samples_per_s,
            "of_alone": found.samples_per_s / (nodes * alone),
            "goodput": found.goodput,
            "utilization": found.utilization,
            "cost": found.cost,
            "status": found.status,
            "recoveries": found.recoveries,
            "broken": list(found.broken),
            "seconds": time.process_time() - began_s,
        }


def plans(path: Path) -> Iterator[dict[str, Any]]:
    """Plans for the nodes of a file, and for 10,000 like them: each made twice, and the same."""
    nodes = tuple(replace(node, host=node.name) for node in read_nodes(path))
    for count, most_s in PLANS:
        known = Described(inventory=Inventory(nodes=nodes)).repeated(count)
        for what, resources in (("CPUs", {"cpus": 4}), ("a GPU", {"cpus": 4, "gpus": 1})):
            asked = job(
                global_batch=4 * 10**5,
                elastic={"max_workers": 10**5},
                resources={"worker": resources},
            )
            made, took_s = [], []
            for _ in range(2):
                began_s = time.process_time()
                on = place(known.inventory, workers(asked, known.inventory), asked.resources.worker)
                made.append(planned(asked, _MEASURED, known, on))
                took_s.append(time.process_time() - began_s)
            yield {
                "nodes": count,
                "with": what,
                "workers": len(made[0].members),
                "seconds": max(took_s),
                "at_most_s": most_s,
                "same": made[0] == made[1],
            }


def stragglers(trace: Paced) -> dict[str, Any]:
    """What policies save, with as many micro-batches for each worker, and with backups."""
    table = f"name,count\nn,{trace.workers}\n"
    told: dict[str, Any] = {}
    for each, most in OFFERED:
        asked = job(
            global_batch=4 * each * trace.workers,
            elastic={"max_workers": trace.workers, "backup_micro_batches": most},
        )
        one = replace(_MEASURED, speeds=(Speed(fixed_s=0.0, micro_batch_s=1.0),))
        rows = {row.policy: row for row in policies(asked, one, read_table(table, "n.csv"), trace)}
        told[f"{each} each, {most} offered"] = {
            name: {
                "fractional": row.fractional,
                "of_lag_1": row.fractional / rows[LAST].fractional,
                "whole": row.whole,
                "backed_up": row.backed_up,
                "backed_up_of_foresight": (row.backed_up or 0.0) / rows[FORESIGHT].fractional,
                "elsewhere": row.elsewhere,
            }
            for name, row in rows.items()
        }
    return told


def by_control(trace: Paced, each: int) -> dict[str, Any]:
    """The same, carried out with the control of a run: seconds of as many steps as moments.

    A worker has `each` micro-batches, and offers all of them to its backup, where it has one.
    """
    table = read_table(f"name,count,mbit_s\nn,{trace.workers},10000\n", "n.csv")
    small = replace(
        _MEASURED, gradient_bytes=4, speeds=(Speed(fixed_s=0.0, micro_batch_s=1 / each),)
    )
    told = {}
    for name, fields in (
        ("equal", {"shares": "equal"}),
        ("control", {}),
        ("control and backups", {"backup_micro_batches": each}),
    ):
        asked = job(
            steps=len(trace.rows),
            global_batch=4 * each * trace.workers,
            elastic={"max_workers": trace.workers, **fields},
        )
        told[name] = carried_out(asked, small, table, Circumstances(trace=trace)).record()
    equal_s = told["equal"]["job_s"]
    return {
        name: {"job_s": one["job_s"], "saved": 1.0 - one["job_s"] / equal_s}
        for name, one in told.items()
    }


def spot(trace: Held) -> dict[str, Any]:
    """A job that takes about two days on machines that come and go as recorded."""
    table = read_table(f"name,count,mbit_s,price_per_hour\nn,{trace.most},10000,0.9\n", "n.csv")
    asked = job(
        steps=100_000,
        global_batch=4 * _EACH * trace.most,
        elastic={"min_workers": 1, "max_workers": trace.most},
    )
    found = carried_out(asked, _MEASURED, table, Circumstances(trace=trace)).record()
    names = ("job_s", "goodput", "utilization", "cost", "of_present", "recoveries", "broken")
    return {"machines": trace.most, **{name: found[name] for name in names}}


def _rounded(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _rounded(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [_rounded(value) for value in told]
    return float(f"{told:.4g}") if isinstance(told, float) else told


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; 1 where a plan takes too long or a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path)
    asked = parser.parse_args(arguments)
    record: dict[str, Any] = {"format": FORMAT, "machine": describe(os.sched_getaffinity(0))}
    record["plans"] = list(plans(asked.data / "cluster" / "openb_node_list_all_node.csv"))
    _say(record["plans"])
    record["stragglers"], record["stragglers_by_control"] = {}, {}
    for path in sorted((asked.data / "straggler").glob("job_*_norm.csv")):
        trace = read_trace(path)
        assert isinstance(trace, Paced)  # noqa: S101 - it is a CSV file
        record["stragglers"][path.stem] = stragglers(trace)
        record["stragglers_by_control"][path.stem] = {
            f"{each} each": by_control(trace, each) for each in CONTROLLED
        }
        _say(record["stragglers"][path.stem], record["stragglers_by_control"][path.stem])
    record["spot"] = {}
    for path in sorted((asked.data / "spot").glob("*[46]-node*.json")):
        trace = read_trace(path)
        assert isinstance(trace, Held)  # noqa: S101 - it is a JSON file
        record["spot"][path.stem] = spot(trace)
        _say(path.stem, record["spot"][path.stem])
    record["curve"] = {}
    for way in WAYS:
        record["curve"][way] = []
        for point in curve(way, NODES):
            record["curve"][way].append(point)
            _say(way, point)
    record = _rounded(record)
    if asked.json is not None:
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    if asked.chart is not None:
        asked.chart.write_text(chart(record["curve"]) + "\n")
    slow = [plan for plan in record["plans"] if plan["seconds"] > plan["at_most_s"]]
    unlike = [plan for plan in record["plans"] if not plan["same"]]
    broken = [point for points in record["curve"].values() for point in points if point["broken"]]
    return int(bool(slow or unlike or broken))


def chart(found: dict[str, list[dict[str, Any]]]) -> str:
    """The curve as a drawing."""
    lines = {
        way: [(point["nodes"], 100 * point["of_alone"]) for point in points]
        for way, points in found.items()
    }
    return curves(lines, "nodes", "% of what the nodes compute alone")


def _say(*told: Any) -> None:
    sys.stderr.write(" ".join(json.dumps(_rounded(one)) for one in told) + "\n")


if __name__ == "__main__":
    sys.exit(main())
