"""Every view of a run tells the same of its recoveries: `status`, `report`, `compare`, `audit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.events import (
    Event,
    GenerationFormed,
    MemberLost,
    MemberSpawned,
    Recovered,
    RolledBack,
    RunFinished,
    RunStarted,
)
from raycloud.order import Commit, commit_record, header_record, ledger_line
from raycloud.report.recoveries import NAMES
from tests.logs import STARTED_T, commit, entries, ready, run_directory

T = STARTED_T + 20
GOES_ON = Recovered(generation=1, lost=(), cause="why", detected_s=1.0, resumed_s=2.0)


def formed(generation: int, *members: int) -> GenerationFormed:
    shares = (1,) * len(members)
    return GenerationFormed(generation=generation, members=members, shares=shares, first_step=10)


def recovered(*lost: int, steps: int = 0) -> Recovered:
    return Recovered(
        generation=1, lost=lost, cause="why", detected_s=1.0, resumed_s=2.0, lost_steps=steps
    )


def at(step: int) -> dict[str, int]:
    return {"epoch": 0, "start": 8 * step, "stop": 8 * step + 8}


STOPPED: list[Event] = [RunFinished(status="stopped", steps=10)]
KILLED: list[Event] = []
LOGS: dict[str, tuple[list[Event], dict[str, int]]] = {
    "undisturbed": (STOPPED, {}),
    "resumed after a stop": (
        [
            *STOPPED,
            RunStarted(job="gpt", version="0.1.0", resumed_from_step=10),
            MemberSpawned(member=2),
            ready(2),
            formed(1, 2),
        ],
        {"resumed": 1},
    ),
    "resumed twice, and never went on": (
        [
            *KILLED,
            RunStarted(job="gpt", version="0.1.0", resumed_from_step=8),
            RunFinished(status="failed", steps=8, error="no room"),
            RunStarted(job="gpt", version="0.1.0", resumed_from_step=8),
        ],
        {"resumed": 2},
    ),
    "taken over after the driver's death": (
        [
            *KILLED,
            RunStarted(job="gpt", version="0.1.0", taken_over=(0, 1)),
            GOES_ON,
        ],
        {"taken_over": 1},
    ),
    "taken over without one": (
        [
            *KILLED,
            RunStarted(job="gpt", version="0.1.0", taken_over=(0,)),
            MemberLost(member=1, reason="it did not outlive its driver"),
            formed(1, 0),
            recovered(1),
        ],
        {"taken_over": 1, "lost": 1},
    ),
    "a worker lost": (
        [MemberLost(member=1, reason="its node died"), formed(1, 0), recovered(1)],
        {"lost": 1},
    ),
    "met anew": ([formed(1, 0, 1), recovered()], {"met_anew": 1}),
    "rolled back": (
        [RolledBack(step=8), formed(1, 0, 1), commit(0, 8, 9, generation=1), recovered(steps=2)],
        {"rolled_back": 1},
    ),
    "all lost, and rolled back": (
        [
            MemberLost(member=0, reason="gone"),
            MemberLost(member=1, reason="gone"),
            RolledBack(step=8),
            formed(1, 2),
            recovered(0, 1, steps=2),
        ],
        {"lost": 2},
    ),
}


def run_of(path: Path, more: list[Event]) -> Path:
    told = [entry for entry in entries() if not isinstance(entry[1], RunFinished)]
    told += [(T + n, event) for n, event in enumerate(more)]
    run_directory(path, "steps: 100\n", told)
    ledger = [header_record(1000)]
    ledger += [
        commit_record(Commit(first_step=n, last_step=n + 1, generation=0, **at(n)))
        for n in range(10)
    ]
    (path / "ledger").write_text("".join(map(ledger_line, ledger)))
    return path


def call(*arguments: object) -> str:
    return CliRunner().invoke(cli.app, list(map(str, arguments))).stdout


def record(*arguments: object) -> Any:
    return json.loads(call(*arguments, "--json"))


@pytest.mark.parametrize("log", LOGS)
def test_all_views_tell_the_same_recoveries(tmp_path: Path, log: str) -> None:
    more, due = LOGS[log]
    run = run_of(tmp_path / "gpt-1", more)
    whole = {name: due.get(name, 0) for name in NAMES.values()}
    text = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in whole.items() if n) or "none"

    card = record("status", run)["runs"][0]
    told = record("report", run)["recoveries"]
    audited = record("audit", run)
    compared = record("compare", run, run)["runs"]
    assert {name: card[name] for name in whole} == whole
    assert card["recoveries"] == len(told) == sum(whole.values())
    assert audited["recoveries"] == told
    assert audited["counts"] == whole
    assert [one["outcomes"]["recoveries"] for one in compared] == [whole, whole]
    assert len(audited["members_lost"]) == whole["lost"]
    assert len(audited["resumes"]) == whole["resumed"]

    assert f"  recoveries     {text}\n" in call("status", run)
    assert text in call("compare", run, run)
    assert f"  recoveries    {text}\n" in call("audit", run)
    report = next(line for line in call("report", run).splitlines() if "  recoveries  " in line)
    assert all(f"{part} (" in report for part in text.split(", ")) or text == "none"
