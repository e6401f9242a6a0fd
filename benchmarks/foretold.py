"""What the simulation foretells against what was measured on the testbed, S1 to S9.

    python -m benchmarks.foretold --json FILE

Of each row of `benchmarks/results/S*.json` by raycloud as it is set by default, the limit of its
repeat says how fast each node computes without any exchange, by the same clock; the scenario says
cores, links and what happens when. Nothing is fitted to a row: what else the model has is in
`raycloud.planner.cost`, a worker's start takes the 1.6 processor seconds that decision 0019
measured, and 0.011 of a node's cores go to Ray and to what in a worker does not compute. Samples
per second are those of the scenario's window, in which it counts, as there, from 25 s after the
start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.racing.scenarios import GLOBAL_BATCH, SCENARIOS, Scenario
from raycloud.planner.cost import Profile
from raycloud.planner.described import PAYLOAD, Described
from raycloud.planner.inventory import ZONE_LABEL, Inventory, Node
from raycloud.planner.speed import Speed
from raycloud.simulate import Fault, Kind, simulate
from raycloud.simulate import Scenario as Simulation
from raycloud.simulate.costing import ClusterCosts
from raycloud.spec import Job

FORMAT = 1
RESULTS = Path(__file__).parent / "results"
_PARAMETERS = 1_902_720  # of `benchmarks.workload.Transformer`
_STATE = 12  # bytes of a parameter: itself, and AdamW's two moments
_START_CORE_S = 1.6  # processor seconds until a worker is ready
_BESIDE_CORES = 0.011  # of a node: its raylet's, and a worker's that neither computes nor sends
_BEFORE_S = 25.0
_SAMPLES = 100_000
_CALL_S = 0.1
_ONE_SINCE = "2026-11-24T22:45"  # from then on a micro-batch of a race is one sample, and was four
_WHOLE = 1e-6  # of a share's seconds: that do not depend on the share, so that passes are fused


def described(scenario: Scenario, rates: Mapping[str, float], fastest: float) -> Described:
    """The nodes of a scenario, with all that ever come; speed 1 is the fastest's."""
    nodes = scenario.everyone.nodes
    trunk = scenario.spec.trunks[0] if scenario.spec.trunks else None
    return Described(
        inventory=Inventory(
            nodes=tuple(
                Node(name=node.name, host=node.name, cpus=node.cores or 1.0,
                     labels={ZONE_LABEL: node.zone})
                for node in nodes
            )
        ),
        speed={node.name: rates[node.name] / fastest for node in nodes},
        bytes_per_s={
            node.name: PAYLOAD / 8 * min(
                node.egress_bits_per_s or 1e12, trunk.rate_bits_per_s if trunk else 1e12
            )
            for node in nodes
        },
        # Out of one zone and into the other is once over the trunk.
        delay_s={node.name: trunk.delay_s / 2 for node in nodes} if trunk else {},
    )  # fmt: skip


def faults(scenario: Scenario) -> Iterator[Fault]:
    """What happens to a scenario's nodes, in virtual time."""
    number = {node.name: at for at, node in enumerate(scenario.everyone.nodes)}
    events = sorted(scenario.events, key=lambda event: event.at_s)
    for at, event in enumerate(events):
        later = [one for one in events[at + 1 :] if one.node == event.node]
        told = {"at_s": _BEFORE_S + event.at_s, "node": number[event.node]}
        until_s = later[0].at_s - event.at_s if later else 1e6
        if event.action == "throttle" and event.cores and later:
            usual = scenario.everyone.nodes[number[event.node]].cores or 1.0
            factor = (usual - _BESIDE_CORES) / (event.cores - _BESIDE_CORES)
            yield Fault(kind=Kind.SLOW, lasts_s=until_s, factor=factor, **told)
        elif event.action == "kill-process":
            yield Fault(kind=Kind.DIE, **told)
        elif event.action == "freeze":
            yield Fault(kind=Kind.FREEZE, lasts_s=until_s, **told)
        elif event.action == "cut":
            yield Fault(kind=Kind.CUT, lasts_s=until_s, **told)
        elif event.action == "kill-node":
            yield Fault(kind=Kind.LEAVE, lasts_s=until_s, **told)
        elif event.action == "drain":
            yield Fault(kind=Kind.NOTICE, lasts_s=event.deadline_s or 0.0, **told)
    if scenario.later:
        first = min(event.at_s for event in events if event.action == "add")
        many = len(scenario.everyone.nodes)
        yield Fault(at_s=_BEFORE_S + first, kind=Kind.HOLD, many=many)


def foretold(scenario: Scenario, rates: Mapping[str, float], *, micro_batch: int = 1) -> float:
    """Samples per second of the scenario's window, simulated."""
    nodes = scenario.everyone.nodes
    rates = {node.name: rates[node.name] * _part(node.cores or 1.0) for node in nodes}
    fastest = max(rates.values())
    there, known = scenario.spec.nodes, described(scenario, rates, fastest)
    share_s = GLOBAL_BATCH / len(nodes) / fastest
    speed = Speed(fixed_s=_WHOLE * share_s, micro_batch_s=micro_batch / fastest)
    measured = Profile(
        samples=_SAMPLES,
        parameters=_PARAMETERS,
        gradient_bytes=4 * _PARAMETERS,
        state_bytes=_STATE * _PARAMETERS,
        speeds=(speed,),
    )
    elastic = {"min_workers": 1 if scenario.elastic else len(there), "max_workers": len(nodes)}
    job = Job(
        task="benchmarks.racing.raycloud_task:Race",
        steps=1_000_000,
        global_batch=GLOBAL_BATCH,
        micro_batch=micro_batch,
        elastic=elastic,
    )
    costs = ClusterCosts(
        job, measured, known, tuple(node.name for node in nodes), (1,) * len(nodes)
    )
    begins_s, ends_s = _BEFORE_S, _BEFORE_S + scenario.window_s
    rate, _ = known.link([node.name for node in nodes])
    outcome = simulate(
        Simulation(
            seed=1,
            members=len(nodes),
            least=elastic["min_workers"],
            samples=_SAMPLES,
            global_batch=GLOBAL_BATCH,
            micro_batch=micro_batch,
            lasts_s=ends_s + 1.0,
            every_steps=10,
            faults=tuple(sorted(faults(scenario))),
            there=len(there),
            delay_s=_CALL_S,
            build_s=_START_CORE_S / min(node.cores or 1.0 for node in nodes),
            spread=0.1,
            costing=costs,
            follow_s=max(0.25, measured.state_bytes / (rate or 1e9)),
            marks_s=(begins_s, ends_s),
        )
    )
    if outcome.broken:
        raise RuntimeError(f"{scenario.name}: {outcome.broken}")
    return (outcome.marks[1] - outcome.marks[0]) * GLOBAL_BATCH / scenario.window_s


def _part(cores: float) -> float:
    """Of the speed that a node has by itself, as the limit measures it, what computing gets."""
    return (cores - _BESIDE_CORES) / cores


def rows(path: Path) -> Iterator[tuple[Mapping[str, Any], Mapping[str, float]]]:
    """Each whole row of raycloud in a file, with the nodes' rates of its repeat's limit."""
    found = json.loads(path.read_text())["rows"]
    limits = {row["repeat"]: row["rates"] for row in found if row["contestant"] == "limit"}
    for row in found:
        if row["contestant"] == "raycloud" and not row["failed"] and row["repeat"] in limits:
            yield row, limits[row["repeat"]]


def compared() -> list[dict[str, Any]]:
    """Of each scenario what was measured and foretold, by repeat, and the median of the errors."""
    told = []
    for name, scenario in SCENARIOS.items():
        each = []
        for row, rates in rows(RESULTS / f"{name}.json"):
            micro_batch = 1 if row["began"] >= _ONE_SINCE else 4
            expected = foretold(scenario, rates, micro_batch=micro_batch)
            measured = row["samples_per_s"]
            each.append(
                {
                    "repeat": row["repeat"],
                    "micro_batch": micro_batch,
                    "cpu": row["machine"]["cpu"],
                    "measured": round(measured, 2),
                    "foretold": round(expected, 2),
                    "error": round(expected / measured - 1.0, 4),
                }
            )
        errors = [one["error"] for one in each]
        told.append(
            {
                "scenario": name,
                "title": scenario.title,
                "median_error": round(statistics.median(errors), 4),
                "worst_error": max(errors, key=abs),
                "rows": each,
            }
        )
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write and print; 1 where a median is off by more than 10%."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    told = compared()
    for one in told:
        for row in one["rows"]:
            sys.stdout.write(
                f"{one['scenario']} {row['cpu']:26} measured {row['measured']:6.2f}, foretold "
                f"{row['foretold']:6.2f}: {row['error']:+.1%}\n"
            )
        sys.stdout.write(f"{one['scenario']} median {one['median_error']:+.1%}\n")
    if asked.json is not None:
        record = {"format": FORMAT, "scenarios": told}
        asked.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(abs(one["median_error"]) > 0.1 for one in told))


if __name__ == "__main__":
    sys.exit(main())
