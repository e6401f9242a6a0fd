"""When a race is warm, and how long it waits for the last update."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.racing.commits import Commit
from benchmarks.racing.contestant import Attempt
from benchmarks.racing.registry import CONTESTANTS
from benchmarks.racing.running import ROUNDS, EndedError, Race, patience_s
from benchmarks.racing.scenarios import SCENARIOS, Settings
from benchmarks.testbed import Process, Testbed

pytestmark = pytest.mark.unit

SETTINGS = Settings(
    learning_rate=0.1,
    warm_up_updates=4,
    warm_up_rounds=2,
    warm_up_s=0.0,
    first_update_limit_s=60.0,
)


@pytest.fixture
def race(tmp_path: Path) -> Iterator[Race]:
    """Begun 100 s ago on n1 and n2, of a contestant that runs."""
    attempt = Attempt(
        directory=tmp_path,
        nodes=("n1", "n2"),
        most_nodes=2,
        global_batch=2,
        per_worker=1,
        learning_rate=0.1,
        elastic=False,
    )
    attempt.journals.mkdir()
    scenario = replace(SCENARIOS["S8"], events=(), limit_s=100.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as running:
        yield Race(
            bed=Testbed(scenario.spec),  # not entered: nothing is made
            contestant=CONTESTANTS["torchrun"],
            scenario=scenario,
            attempt=attempt,
            settings=SETTINGS,
            t0_s=time.monotonic() - 100.0,
            processes=[Process(running, tmp_path / "log")],
        )
        running.communicate()


def write(race: Race, node: str, times_s: Sequence[float]) -> None:
    """A journal with updates at these seconds after the start."""
    head = {"format": 1, "node": node, "pid": 1, "t_s": race.t0_s}
    notes = [
        {"t_s": race.t0_s + t_s, "update": update, "samples": 2, "cpu_s": 0.0}
        for update, t_s in enumerate(times_s, 1)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in (head, *notes))
    (race.attempt.journals / f"{node}-1.jsonl").write_text(lines)


def test_it_is_not_warm_before_every_node_has_taken_part(race: Race) -> None:
    write(race, "n1", range(10, 90))
    write(race, "n2", [])
    with pytest.raises(EndedError, match="not every node took part within 70 s"):
        race.warm_up()


def test_updates_count_from_when_every_node_has_taken_part(race: Race) -> None:
    write(race, "n1", range(10, 53))
    write(race, "n2", [50.5])
    with pytest.raises(EndedError, match="not warmed up within 100 s"):
        race.warm_up()
    write(race, "n1", range(10, 55))
    race.warm_up()


def test_rounds_are_fewer(race: Race) -> None:
    write(race, "n1", [10.0, 50.0, 90.0])
    write(race, "n2", [10.0, 50.0, 90.0])
    with pytest.raises(EndedError, match="not warmed up"):
        race.warm_up()
    for name in sorted(ROUNDS):
        race.contestant = CONTESTANTS[name]
        race.warm_up()


def test_steps_are_warm_only_once_a_compressed_one_is() -> None:
    settings = Settings(learning_rate=0.1)
    assert settings.warm_up_updates == 12, "PowerSGD compresses from the tenth on"
    assert (settings.warm_up_rounds, settings.warm_up_s) == (2, 10.0)


@pytest.mark.parametrize(
    ("times_s", "seconds"),
    [([], 15), ([1, 2, 3], 15), ([0, 33, 60], 49.5), ([0, 33, 60, 61, 62], 49.5), ([0, 99], 120)],
)
def test_a_round_that_the_end_cuts_is_waited_for(times_s: list[float], seconds: float) -> None:
    noted = [Commit(t_s=t, update=n, samples=8) for n, t in enumerate(times_s)]
    assert patience_s(noted, least_s=15.0, most_s=120.0) == seconds
