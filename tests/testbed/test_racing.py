"""Races that break, on real beds: what was measured is kept, and who is at fault is said."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.racing.alone import Limit
from benchmarks.racing.contestant import Attempt, environment
from benchmarks.racing.meters import Meters
from benchmarks.racing.race import race
from benchmarks.racing.running import Race
from benchmarks.racing.scenarios import Scenario, Settings
from benchmarks.testbed import NodeSpec, Process, Spec, Testbed
from benchmarks.testbed.events import Event
from tests.testbed.conftest import MakeBed

pytestmark = pytest.mark.timeout(240)  # on a busy machine imports alone take many seconds

SETTINGS = replace(Settings.quick(), per_worker=2, target_loss=0.0)
SCENARIO = Scenario(
    name="S1", title="one node", spec=Spec(nodes=(NodeSpec(name="n1"),)), window_s=5.0
)
# Notes five updates, keeps the parameters of the fifth, and fails.
FAILING = """
import sys
from pathlib import Path
from benchmarks.journal import Journal
from benchmarks.workload import build_model
notes = Journal(Path(sys.argv[1]), snapshots=Path(sys.argv[2]))
model = build_model(small=True)
for update in range(1, 6):
    notes.note(update=update, samples=2)
    notes.snapshot(model, update)
sys.exit(3)
"""


class Alone(Limit):
    """What the limit's nodes do, as a contestant without Ray."""

    name = "alone"


class Failing(Alone):
    """One whose process ends."""

    def joined(self, bed: Testbed, attempt: Attempt, node: str) -> Sequence[Process]:
        """Start it there."""
        command = [sys.executable, "-c", FAILING, str(attempt.journals), str(attempt.snapshots)]
        log = attempt.logs / f"{node}.log"
        return [bed[node].start(command, environment=environment(attempt), log=log)]


class Refusing(Alone):
    """One that cannot be started."""

    def start(self, bed: Testbed, attempt: Attempt) -> Sequence[Process]:
        """It cannot be."""
        raise ValueError("no place for it")


def test_what_was_kept_before_a_contestant_failed_is_evaluated(tmp_path: Path) -> None:
    settings = replace(SETTINGS, warm_up_updates=100)
    seen = race(Failing(), SCENARIO, settings, tmp_path).observation
    assert seen.failed.startswith("ended with status 3")
    assert seen.window is None
    assert [update for update, _ in seen.losses] == [5]


@pytest.mark.full
def test_a_testbed_that_breaks_later_leaves_what_was_measured(tmp_path: Path) -> None:
    twice = Event(at_s=1.0, action="add", node="n1")
    settings = replace(SETTINGS, target_loss=None)
    seen = race(Alone(), replace(SCENARIO, events=(twice,)), settings, tmp_path)
    assert seen.observation.failed.startswith("testbed: add of 'n1': it is there")
    assert seen.observation.journals
    assert seen.observation.window is not None
    start_s, end_s = seen.observation.window
    assert 1.0 <= end_s - start_s < 5.0, "nobody is blamed for what came after"
    assert seen.used is not None


def test_a_contestant_that_was_never_started_has_no_row(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no place for it"):
        race(Refusing(), SCENARIO, SETTINGS, tmp_path)


@pytest.mark.full
def test_a_node_counts_from_the_moment_it_is_added(make_bed: MakeBed, tmp_path: Path) -> None:
    coming = NodeSpec(name="n2")
    attempt = Attempt(
        directory=tmp_path,
        nodes=("n1",),
        most_nodes=2,
        global_batch=2,
        per_worker=2,
        learning_rate=0.1,
        elastic=True,
    )
    run = Race(
        bed=make_bed(NodeSpec(name="n1")),
        contestant=Failing(),
        scenario=SCENARIO,
        attempt=attempt,
        settings=SETTINGS,
    )
    began_s = time.monotonic()
    run.happen([Event(at_s=1.0, action="add", node="n2", spec=coming)])
    assert "n2" in run.bed.nodes
    assert [change.part for change in run.changes] == [1.0]
    assert run.changes[0].t_s == run.faults[0].t_s
    took_s = time.monotonic() - began_s
    assert run.changes[0].t_s - began_s < took_s / 2, "making it takes nearly all of that"


@pytest.mark.full
def test_what_others_use_is_counted_exactly(make_bed: MakeBed) -> None:
    bed = make_bed(NodeSpec(name="n1", cores=0.2))
    meters = Meters(bed)
    began_s, mine_s = time.monotonic(), time.process_time()
    while time.process_time() - mine_s < 0.5:
        pass
    used = meters.read()
    seconds = (time.monotonic() - began_s) * (os.cpu_count() or 1)
    assert 0.5 <= used.outside * seconds <= seconds * 1.05
