"""The benchmark as continuous integration runs it: a scenario in seconds, on real links."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.racing.results import load
from benchmarks.racing.scenarios import SCENARIOS
from benchmarks.testbed import missing
from tests.testbed.commands import LIMIT_S, said

HERE = ("S7",)  # nodes that die and come back; tests/testbed/test_strategies.py has others

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(LIMIT_S + 30),
]


def raced(path: Path, scenario: str, *more: str) -> dict[str, dict[str, Any]]:
    """The rows of a quick run, by contestant."""
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--scenario", scenario]
    said([*command, "--json", str(path), *more])
    return {row["contestant"]: row for row in load(path)}


@pytest.mark.full(only="a race on real links, from start to end")
@pytest.mark.parametrize("name", HERE)
def test_a_scenario(tmp_path: Path, name: str) -> None:
    row = raced(tmp_path / "rows.json", name)["raycloud"]
    assert row["failed"] is None
    assert row["updates"] >= 2
    assert row["samples_per_s"] > 0
    assert row["first_step_s"] > 0
    assert row["wire_bytes_total"] > 10_000, "gradients cross the links"
    happened = [what for fault in row["faults"] for what in fault["what"].split(", ")]
    assert len(row["pauses_s"]) == len(row["faults"])
    quick = SCENARIOS[name].squeezed()
    ends = sum(event.action == "drain" for event in quick.events)  # each brings its end along
    assert len(happened) + len(row["not_done"]) == len(quick.events) + ends
    assert bool(happened) == bool(quick.events)
    assert row["settings_of_testbed"]["title"] == SCENARIOS[name].title
    assert row["settings_of_testbed"]["window_s"] == row["window_s"] == 6
