"""Which rows a command takes for its own, and which it refuses."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run
from benchmarks.racing.results import Results, ResultsError
from benchmarks.racing.scenarios import SCENARIOS, Settings

pytestmark = pytest.mark.unit

SCENARIO = SCENARIOS["S8"]
MACHINE = {"cpu": "fast", "cores": 2}
COMMIT = {"commit": "abc", "changed_since_commit": False}


def asked(**changed: Any) -> run.Asked:
    usual = run.Asked(
        scenarios=(SCENARIO,),
        contestants=("limit", "torchrun"),
        first=0,
        repeats=1,
        settings=Settings(learning_rate=0.1, target_loss=2.5),
        learning_rates={},
        machine=MACHINE | COMMIT,
        json=None,
        again=False,
        quick=False,
        keep=None,
    )
    return replace(usual, **changed)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Those of both contestants."""
    found = Results(tmp_path / "rows.json")
    for name in ("limit", "torchrun"):
        found.add(
            {
                "scenario": "S8",
                "repeat": 0,
                "contestant": name,
                "commit": "abc",
                "machine": MACHINE,
                "settings": asdict(asked().settings),
                "settings_of_testbed": SCENARIO.describe(),
            }
        )
    return Results(found.path)


def test_a_row_of_the_same_run_is_left_out(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    run.check_rows(SCENARIO, asked(), results)
    assert run.run_scenario(SCENARIO, asked(), results) == []
    said = capsys.readouterr().out.splitlines()
    assert [line.endswith("is there already") for line in said] == [True, True]


def test_other_words_and_another_commit_are_let_pass_and_the_commit_is_said(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = replace(SCENARIO, title="another", notes=("another",))
    other = asked(machine={**MACHINE, "commit": "def", "changed_since_commit": True})
    run.check_rows(scenario, other, results)
    assert run.run_scenario(scenario, other, results) == []
    assert "is there already, of another commit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        (
            {"learning_rates": {"torchrun": 0.2}},
            r"torchrun is of another run: settings\.learning_rate is 0\.1, now 0\.2;",
        ),
        (
            {"settings": Settings(learning_rate=0.1, target_loss=2.4)},
            r"limit is of another run: settings\.target_loss is 2\.5, now 2\.4;",
        ),
    ],
)
def test_a_row_of_another_run_is_refused(
    results: Results, changed: dict[str, Any], differs: str
) -> None:
    with pytest.raises(ResultsError, match=differs + r".* --again, .* --json"):
        run.check_rows(SCENARIO, asked(**changed), results)


def test_a_repeat_on_two_machines_is_refused_also_where_the_other_contestants_are_not_asked(
    results: Results,
) -> None:
    slow = {"cpu": "slow", "cores": 2, **COMMIT}
    other = asked(machine=slow, contestants=("limit", "torchft"))
    Results(results.path).add({**results.rows[0], "contestant": "ray-train"})
    there = Results(results.path)
    with pytest.raises(ResultsError, match=r'machine\.cpu is "fast", now "slow"; .* --json'):
        run.check_rows(SCENARIO, other, there)


@pytest.mark.parametrize(("hours", "refused"), [(0.9, False), (1.1, True)])
def test_a_repeat_goes_on_only_while_its_limit_is_fresh(
    results: Results, hours: float, refused: bool
) -> None:
    """The machine that it was measured on was a tenth faster three hours earlier."""
    began = (datetime.now(tz=UTC) - timedelta(hours=hours)).isoformat(timespec="seconds")
    results.add({**results.rows[0], "began": began})
    there = Results(results.path)
    run.check_rows(SCENARIO, asked(), there)  # nothing is to be run
    other = asked(contestants=("limit", "torchft"))
    run.check_rows(SCENARIO, replace(other, again=True), there)  # the limit, too
    alone = asked(contestants=("torchrun",), again=True)
    for contestants in (other, alone):
        if not refused:
            run.check_rows(SCENARIO, contestants, there)
            continue
        with pytest.raises(ResultsError, match=r"limit of S8 repeat 0 was .*1\.1 h.*--first"):
            run.check_rows(SCENARIO, contestants, there)


def test_a_complete_repeat_may_be_of_another_machine(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    other = asked(machine={"cpu": "slow", "cores": 2, **COMMIT}, repeats=2)
    run.check_rows(SCENARIO, other, results)
    run.check_rows(SCENARIO, replace(other, repeats=1), results)
    assert run.run_scenario(SCENARIO, replace(other, repeats=1), results) == []
    assert "is there already" in capsys.readouterr().out


def test_a_row_of_another_testbed_is_refused(results: Results) -> None:
    scenario = replace(SCENARIO, window_s=90.0)
    with pytest.raises(ResultsError, match=r"settings_of_testbed\.window_s is 120\.0, now 90\.0;"):
        run.check_rows(scenario, asked(), results)
