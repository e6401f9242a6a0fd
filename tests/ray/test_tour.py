"""How updates travel, changed in real runs: tours of several ways, wishes, and a death in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import raycloud
from raycloud.events import Event, StepsCommitted, SyncChanged, SyncMeasured, SyncPoint
from raycloud.report.runs import ask_for_point
from tests.live import asked, check_result, exact_steps, of_kind
from tests.live_tasks import Steady
from tests.ray.test_regroup import Trouble, kill

CPUS = 4
STEPS = 400

pytestmark = pytest.mark.usefixtures("cluster")


class Ending:
    """Lets a run compute as fast as it can once a tour is over, or it has come to a point."""

    def __init__(self, gate: Path, last: SyncPoint | None = None) -> None:
        self.gate, self.last = gate, last

    def __call__(self, event: Event) -> None:
        over = isinstance(event, SyncChanged) and (
            event.toured if self.last is None else SyncPoint(**event.point) == self.last
        )
        if over:
            self.gate.touch()


def test_a_tour_measures_each_way_and_the_result_is_that_of_one_process(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    points = ["topology=ring", "topology=direct", "topology=tree"]
    settings = {"gate": str(gate), "pause_s": 0.005}
    job = asked("Paced", 2, steps=STEPS, sync={"tour": points}, settings=settings)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=Ending(gate))
    check_result(run, job, Steady(), STEPS)
    log = run.events
    measured = [SyncPoint(**one.point).topology for one in of_kind(SyncMeasured, log)]
    assert measured == ["ring", "direct", "tree"]
    last = of_kind(SyncChanged, log)[-1]
    assert last.toured
    assert last.why.startswith("after a tour: ")
    told = run.summary["toured"]
    assert [one["point"] for one in told] == ["exact", "direct", "tree"]
    assert all(one["predicted_s"] > 0 and one["measured_s"] > 0 for one in told)
    assert run.summary["sync"] == str(SyncPoint(**last.point))
    names = {one["name"] for one in run.summary["compared"]}
    assert {"step_s", "job_s", "bytes_sent"} <= names


class Wishing:
    """Asks the run in a directory for another way of updates, as `raycloud set` does."""

    def __init__(self, directory: Path, wishes: dict[int, str], told: Callable[[Event], None]):
        self.directory, self.wishes, self.told = directory, dict(wishes), told

    def __call__(self, event: Event) -> None:
        self.told(event)
        if isinstance(event, StepsCommitted):
            for step in [s for s in self.wishes if s <= event.last_step]:
                ask_for_point(self.directory, self.wishes.pop(step).split())


@pytest.mark.full(only="a worker is killed while a real run changes how its updates travel")
def test_a_worker_is_killed_in_the_midst_of_a_change(tmp_path: Path, ray_tmpdir: Path) -> None:
    gate, run_dir = tmp_path / "gate", tmp_path / "run"
    settings = {"gate": str(gate), "double": False, "pause_s": 0.01}
    elastic = {"min_workers": 1, "max_workers": 3}
    job = asked("Paced", 3, steps=STEPS, elastic=elastic, settings=settings)
    ending = Ending(gate, SyncPoint(topology="tree"))
    trouble = Trouble(ray_tmpdir, [14], kill)

    def told(event: Event) -> None:
        trouble(event)
        ending(event)

    wishes = {10: "codec=int4 topology=direct", 60: "codec=int4 period=8", 120: "topology=tree"}
    run = raycloud.train(job, run_dir=run_dir, observer=Wishing(run_dir, wishes, told))
    assert run.status == "finished"
    assert exact_steps(run.directory) == STEPS
    points = [SyncPoint(**one.point) for one in of_kind(SyncChanged, run.events)]
    assert [(p.codec, p.period) for p in points] == [("int4", 1), ("int4", 8), ("none", 1)]
