"""How long `raycloud plan` takes on unlike nodes, and whether its shares are the true ones.

    python -m benchmarks.surveying [--cores 0.8,0.4,0.2,0.2] [--json FILE]

As root, on the testbed: the work of the races is planned twice on nodes of these cores, first with
nothing kept, then with what the first plan has kept. The seconds are those of the whole command:
the driver's start, the workers', their measures, and the end of it all. Shares are held against the
cores that nodes have. Exit status 1: a share is more than a tenth of a step off, or the second plan
takes more than ten seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, describe
from benchmarks.racing.contestant import Attempt
from benchmarks.racing.raycloud_contestants import Raycloud
from benchmarks.racing.scenarios import GLOBAL_BATCH
from benchmarks.testbed import NodeSpec, Spec, Testbed
from benchmarks.testbed.cluster import Cluster
from raycloud.planner.plan import Plan, from_json

FORMAT = 1
FLOOR_S, OFF = 10.0, 0.1  # of the second plan; of a step's micro-batches
_RAYCLOUD = Path(sys.executable).with_name("raycloud")
_LIMIT_S = 170.0


def planned(cores: Sequence[float], bits_per_s: float, folder: Path) -> list[dict[str, Any]]:
    """Each plan: its seconds, and shares by node, with what a node's cores would make them."""
    nodes = tuple(
        NodeSpec(
            name=f"n{at}", cores=one, egress_bits_per_s=bits_per_s, ingress_bits_per_s=bits_per_s
        )
        for at, one in enumerate(cores, 1)
    )
    names = tuple(node.name for node in nodes)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RAYCLOUD_CACHE": str(folder / "cache"),
    }
    attempt = Attempt(
        directory=folder,
        nodes=names,
        most_nodes=len(names),
        global_batch=GLOBAL_BATCH,
        per_worker=GLOBAL_BATCH // len(names),
        learning_rate=1e-3,
        elastic=False,
    )
    job = folder / "job.yaml"
    job.write_text(json.dumps(Raycloud("raycloud").job(attempt)))
    found = []
    with (
        Testbed(Spec(nodes=nodes)) as bed,
        Cluster(bed, directory=folder / "ray", environment=environment) as cluster,
    ):
        cluster.join(*names)
        bed.limit()
        by_id = {node: name for name, node in cluster.node_ids().items()}
        for turn in ("new", "kept"):
            log = folder / f"{turn}.json"
            began_s = time.monotonic()
            words = [str(_RAYCLOUD), "plan", str(job), "--json"]
            process = bed.head.start(words, environment=dict(cluster.environment), log=log)
            code = process.wait(_LIMIT_S)
            took_s = time.monotonic() - began_s
            said = log.read_text()
            if code:
                raise SystemExit(f"raycloud plan ended with {code}:\n{said[-3000:]}")
            plan = from_json(said[said.index("{") :])
            found.append({"turn": turn, "seconds": round(took_s, 2), **_told(plan, by_id, nodes)})
    return found


def _told(plan: Plan, by_id: dict[str, str], nodes: Sequence[NodeSpec]) -> dict[str, Any]:
    cores = {node.name: node.cores or 0.0 for node in nodes}
    whole = sum(cores.values())
    shares = {by_id[one.node]: one.share for one in plan.members}
    true = {name: plan.micro_batches * own / whole for name, own in cores.items()}
    return {
        "shares": dict(sorted(shares.items())),
        "true": {name: round(one, 2) for name, one in true.items()},
        "off": max(abs(shares[name] - one) for name, one in true.items()) / plan.micro_batches,
        "step_s": plan.predicted.step_s,
        "exchange_s": plan.predicted.exchange_s,
        "kept_s": plan.kept_s,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 where a floor is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.surveying", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cores", type=_cores, default=(0.8, 0.4, 0.2, 0.2))
    parser.add_argument("--mbit-s", type=float, default=100.0)
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rp") as place:
        found = planned(asked.cores, 1e6 * asked.mbit_s, Path(place))
    for one in found:
        print(
            f"{one['turn']}: {one['seconds']:.1f} s, shares {one['shares']}, by cores "
            f"{one['true']}, a step {one['step_s']:.3f} s"
        )
    if asked.json is not None:
        record = {
            "format": FORMAT,
            "machine": describe(os.sched_getaffinity(0)),
            "cores": asked.cores,
            "mbit_s": asked.mbit_s,
            "plans": found,
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(found[-1]["seconds"] > FLOOR_S or max(one["off"] for one in found) > OFF)


def _cores(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
