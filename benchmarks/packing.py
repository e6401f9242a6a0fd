"""Packing of real pods onto the nodes of a real cluster: which rule places more GPUs, and how fast.

    python -m benchmarks.packing --nodes CSV --pods CSV --json FILE

The files are those of Alibaba's cluster-trace-gpu-v2023. Pods come in the order of the file and
stay. Each rule packs them twice: until one does not fit, which is what is compared; and to the end
of the file, pods that do not fit left out. Where all fit, the file comes again until one does not.

By how much a rule is ahead at one pod that does not fit is partly luck. So the same is done for
orders in which the pods are drawn at random (`--shuffles`), as if they had come otherwise.

`fragmentation` knows what may come in one of two ways: `known` is told all pods of the file
beforehand, as its authors are; `seen`, what raycloud can do, knows only those that have come, and
looks again each time there are twice as many. As published each pod counts alike (`known by pod`);
here it counts by its GPUs. What is left is told by both measures.

Then gangs of unlike roles are planned for the nodes of the file, and for 10,000 nodes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from raycloud.planner.inventory import Inventory, Node, capacity
from raycloud.planner.packing import Bundle, Packing, Rule, pack
from raycloud.planner.placement import place
from raycloud.spec import RoleResources

FORMAT = 1
MIB = 2**20
MANY = 10_000
Weights = Callable[[Bundle], float]


def _by_gpu(_: Bundle) -> float:
    return 1.0


def _by_pod(pod: Bundle) -> float:
    return 1.0 / (pod.gpus or 1.0)


# The rule, what it is told beforehand, and what it finds out.
WAYS: dict[str, tuple[Rule, Weights | None, bool]] = {
    "fragmentation, seen": ("fragmentation", None, True),
    "fragmentation, known": ("fragmentation", _by_gpu, False),
    "fragmentation, known by pod": ("fragmentation", _by_pod, False),
    "best_fit": ("best_fit", None, False),
    "dot_product": ("dot_product", None, False),
    "least_dot_product": ("least_dot_product", None, False),
}
OTHERS = "best_fit", "dot_product", "least_dot_product"
# Of 1,523 nodes a gang takes most of what it asks for; it grows with the nodes.
ROLES = (
    (4000, Bundle(cpus=4, gpus=1, memory_bytes=2**34)),
    (500, Bundle(cpus=2, gpus=0.5, memory_bytes=2**33)),
    (1000, Bundle(cpus=8, memory_bytes=2**34)),
    (64, Bundle(cpus=4, memory_bytes=2**35)),
)


def read_nodes(path: Path) -> tuple[Node, ...]:
    """The nodes of a file."""
    with path.open() as lines:
        return tuple(
            Node(
                name=row["sn"],
                cpus=int(row["cpu_milli"]) / 1000,
                gpus=int(row["gpu"]),
                memory_bytes=int(row["memory_mib"]) * MIB,
                labels={"model": row["model"]},
            )
            for row in csv.DictReader(lines)
        )


def read_pods(path: Path) -> tuple[Bundle, ...]:
    """The pods of a file, in the order of arrival."""
    with path.open() as lines:
        rows = sorted(csv.DictReader(lines), key=lambda row: int(row["creation_time"]))
    return tuple(
        Bundle(
            cpus=int(row["cpu_milli"]) / 1000,
            gpus=int(row["num_gpu"]) * int(row["gpu_milli"]) / 1000,
            memory_bytes=int(row["memory_mib"]) * MIB,
        )
        for row in rows
    )


def until_one_does_not_fit(
    nodes: Sequence[Node], pods: Sequence[Bundle], way: str, *, again: bool = True
) -> dict[str, Any]:
    """What a rule has placed when a pod does not fit: pods and GPUs, and what it leaves.

    With `again` the pods come again where all fit.
    """
    packing, come = _packing(nodes, pods, way)
    placed, gpus, began_s = 0, 0.0, time.perf_counter()
    for pod in come(chain.from_iterable(repeat(pods)) if again else pods):
        if packing.place([pod]) is None:
            break
        placed += 1
        gpus += pod.gpus
    seconds = time.perf_counter() - began_s
    return {"pods": placed, "gpus": round(gpus, 2), "seconds": round(seconds, 2)} | _left(
        packing, pods
    )


def all_that_fit(nodes: Sequence[Node], pods: Sequence[Bundle], way: str) -> dict[str, Any]:
    """The same for all pods, of which those that do not fit are left out."""
    packing, come = _packing(nodes, pods, way)
    placed = [pod for pod in come(pods) if packing.place([pod]) is not None]
    gpus = sum(pod.gpus for pod in placed)
    return {"pods": len(placed), "gpus": round(gpus, 2)} | _left(packing, pods)


def _packing(nodes: Sequence[Node], pods: Sequence[Bundle], way: str) -> tuple[Packing, Any]:
    """A packing, and what tells it of pods as they come."""
    rule, known, sees = WAYS[way]
    typical = [] if known is None else [(pod, known(pod)) for pod in pods]
    packing = Packing(Inventory(nodes=tuple(nodes)), typical=typical, rule=rule)

    def come(pods: Iterable[Bundle]) -> Iterator[Bundle]:
        seen: list[Bundle] = []
        for pod in pods:
            seen.append(pod)
            if sees and len(seen) & (len(seen) - 1) == 0:
                packing.expect((one, 1.0) for one in seen)
            yield pod

    return packing, come


def _left(packing: Packing, pods: Sequence[Bundle]) -> dict[str, float]:
    """What is free, and of that lost, by all pods of the file."""
    left = {"free_gpus": round(packing.free_gpus, 2)}
    for name, weight in (("fragmented_gpus", _by_gpu), ("fragmented_gpus_by_pod", _by_pod)):
        packing.expect((pod, weight(pod)) for pod in pods)
        left[name] = round(packing.fragmentation(), 2)
    return left


def planned(nodes: Sequence[Node], count: int) -> dict[str, Any]:
    """Seconds to plan for so many nodes: like ones placed evenly, and a gang of unlike ones."""
    many = tuple(
        Node(
            name=f"{node.name}-{number}",
            cpus=node.cpus,
            gpus=node.gpus,
            memory_bytes=node.memory_bytes,
            labels=node.labels,
        )
        for number in range(-(-count // len(nodes)))
        for node in nodes
    )[:count]
    inventory, factor = Inventory(nodes=many), count / len(nodes)
    gang = [bundle for asked, bundle in ROLES for _ in range(int(asked * factor))]
    began_s = time.perf_counter()
    placed = pack(inventory, gang)
    packed_s = time.perf_counter() - began_s
    worker = RoleResources(cpus=4, gpus=1)
    room = capacity(inventory, worker)
    began_s = time.perf_counter()
    place(inventory, room, worker)
    alike_s = time.perf_counter() - began_s
    shuffled = random.Random(0).sample(many, len(many))
    return {
        "nodes": count,
        "bundles": len(gang),
        "seconds": round(packed_s, 3),
        "alike": room,
        "alike_seconds": round(alike_s, 3),
        "same_for_another_order_of_nodes": pack(Inventory(nodes=tuple(shuffled)), gang) == placed,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write and print; 1 where a rule is better than ours, or a plan takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--pods", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shuffles", type=int, default=5)
    asked = parser.parse_args(arguments)
    nodes, pods = read_nodes(asked.nodes), read_pods(asked.pods)
    record: dict[str, Any] = {
        "format": FORMAT,
        "machine": describe(os.sched_getaffinity(0)),
        "nodes": len(nodes),
        "gpus": sum(node.gpus for node in nodes),
        "pods": len(pods),
        "gpus_asked": round(sum(pod.gpus for pod in pods), 2),
        "plans": [planned(nodes, len(nodes)), planned(nodes, MANY)],
        "in_order": {},
        "all_that_fit": {},
        "shuffled": {},
    }
    for plan in record["plans"]:
        _say(f"{plan}")
    orders = [random.Random(seed).sample(pods, len(pods)) for seed in range(asked.shuffles)]
    for way in WAYS:
        record["in_order"][way] = found = until_one_does_not_fit(nodes, pods, way)
        _say(f"in order, {way}: {found}")
        record["all_that_fit"][way] = found = all_that_fit(nodes, pods, way)
        _say(f"all that fit, {way}: {found}")
        rows = [until_one_does_not_fit(nodes, order, way) for order in orders]
        if rows:
            means = {name: round(statistics.mean(r[name] for r in rows), 1) for name in rows[0]}
            record["shuffled"][way] = {"means": means, "gpus": [row["gpus"] for row in rows]}
            _say(f"shuffled, {way}: {record['shuffled'][way]}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(record, indent=2) + "\n")
    gpus = {way: found["gpus"] for way, found in record["in_order"].items()}
    first = gpus["fragmentation, seen"]
    slow = [x["seconds"] for x, most in zip(record["plans"], (1.0, 5.0), strict=True)]
    well = first >= max(gpus[way] for way in OTHERS)
    return int(not well or slow[0] > 1.0 or slow[1] > 5.0)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
