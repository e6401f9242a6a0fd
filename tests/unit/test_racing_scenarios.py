"""The nine scenarios as they were agreed on, and as they are when there is little time."""

from __future__ import annotations

import json

import pytest

from benchmarks.racing.scenarios import (
    GLOBAL_BATCH,
    PER_WORKER,
    SCENARIOS,
    Scenario,
    Settings,
    in_words,
)
from benchmarks.testbed.schedule import Schedule

EVERY = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


def cores(scenario: Scenario) -> list[float | None]:
    return [node.cores for node in scenario.spec.nodes]


def happening(scenario: Scenario) -> list[tuple[float, str]]:
    return [(event.at_s, in_words(event)) for event in scenario.events]


def test_nodes_and_links() -> None:
    assert list(SCENARIOS) == [f"S{i}" for i in range(1, 10)]
    for name, quotas, bits_per_s in (
        ("S1", [0.4] * 4, 1e9),
        ("S2", [0.8, 0.4, 0.2, 0.2], 1e8),
        ("S3", [0.8, 0.4, 0.2, 0.2], 2e7),
        *((f"S{i}", [0.4] * 4, 1e9) for i in (4, 5, 6, 7, 9)),
        ("S8", [0.4] * 2, 1e9),
    ):
        scenario = SCENARIOS[name]
        assert cores(scenario) == quotas
        rates = {(n.egress_bits_per_s, n.ingress_bits_per_s) for n in scenario.everyone.nodes}
        assert rates == {(bits_per_s, bits_per_s)}
        assert len(scenario.everyone.nodes) == 4
    assert [node.zone for node in SCENARIOS["S9"].spec.nodes] == ["a", "a", "b", "b"]
    (trunk,) = SCENARIOS["S9"].spec.trunks
    assert (trunk.zones, trunk.rate_bits_per_s, trunk.delay_s) == (("a", "b"), 2e7, 0.04)
    assert all(node.spot for node in SCENARIOS["S7"].spec.nodes)


def test_what_happens() -> None:
    assert all(SCENARIOS[name].events == () for name in ("S1", "S2", "S3", "S9"))
    assert happening(SCENARIOS["S4"]) == [
        (20, "throttle n1 (0.1 cores)"),
        (40, "throttle n1 (0.4 cores)"),
    ]
    assert happening(SCENARIOS["S5"]) == [
        (15, "kill-process n1"),
        (45, "kill-process n2"),
        (75, "kill-process n3"),
        (105, "kill-process n4"),
    ]
    assert happening(SCENARIOS["S6"]) == [
        *((10, "freeze n2"), (30, "thaw n2")),
        *((60, "cut n3 (both)"), (80, "mend n3")),
        *((110, "cut n4 (in)"), (130, "mend n4")),
    ]
    assert happening(SCENARIOS["S8"]) == [
        *((20, "add n3"), (20, "add n4")),
        (70, "drain n2 (20 s notice)"),
    ]
    elastic = [name for name, scenario in SCENARIOS.items() if scenario.elastic]
    assert elastic == ["S5", "S6", "S7", "S8"], "a slow node is no fault"


def test_the_spot_window_goes_through_no_node_at_all() -> None:
    scenario = SCENARIOS["S7"]
    there, fewest = 4, 4
    for event in scenario.events:
        there += 1 if event.action == "add" else -1
        fewest = min(fewest, there)
    assert fewest == 0
    assert scenario.window_s == 240
    assert "an hour a minute" in scenario.notes[-1]
    assert "us-east-1f" in scenario.notes[-1]


def test_what_a_reader_has_to_know() -> None:
    for said, names in (
        ("make smaller updates", ["S5", "S6", "S7", "S8"]),
        ("wait 30 s for each other", ["S6"]),
        ("joins Ray before its quota is set", ["S7", "S8"]),
        ("get SIGTERM", ["S8"]),
    ):
        found = [one.name for one in SCENARIOS.values() if said in " ".join(one.notes)]
        assert found == names


@EVERY
def test_events_can_happen_within_the_window(scenario: Scenario) -> None:
    for one in (scenario, scenario.squeezed()):
        Schedule(one.events).check(one.spec)
        assert all(event.at_s < one.window_s for event in one.events)
        assert one.window_s < one.limit_s
        assert json.loads(json.dumps(one.describe())) == one.describe(), "plain values"


@EVERY
def test_squeezed(scenario: Scenario) -> None:
    quick = scenario.squeezed()
    assert 2 <= len(quick.spec.nodes) <= len(quick.everyone.nodes) <= 3
    assert all((node.cores or 1) >= 0.4 for node in quick.everyone.nodes)
    assert {e.action for e in quick.events} == {e.action for e in scenario.events}
    assert quick.window_s == 6
    assert quick.elastic == scenario.elastic
    assert {z for t in quick.spec.trunks for z in t.zones} <= {n.zone for n in quick.spec.nodes}


@EVERY
def test_batches_are_divided_evenly(scenario: Scenario) -> None:
    assert GLOBAL_BATCH % len(scenario.spec.nodes) == 0
    assert Settings.quick().global_batch % len(scenario.squeezed().spec.nodes) == 0
    if scenario.name != "S8":
        assert PER_WORKER * len(scenario.spec.nodes) == GLOBAL_BATCH
