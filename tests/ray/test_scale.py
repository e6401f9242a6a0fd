"""A run whose workers are changed from outside, replaced, or waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ray.util import placement_group_table

import raycloud
from raycloud.events import (
    CapacityChanged,
    Event,
    GenerationFormed,
    MemberLost,
    Noticed,
    RangeChanged,
    Recovered,
    StepsCommitted,
)
from raycloud.report.runs import ask_driver
from tests.live import asked, check_result, of_kind
from tests.live_tasks import Steady
from tests.ray.test_regroup import Opening, Trouble, kill

CPUS = 4
STEPS = 300


class Asking:
    """Asks the run in a directory for other workers, as `raycloud scale` does, at some steps."""

    def __init__(self, directory: Path, wishes: dict[int, str], told: Callable[[Event], None]):
        self.directory, self.wishes, self.told = directory, dict(wishes), told

    def __call__(self, event: Event) -> None:
        self.told(event)
        if isinstance(event, StepsCommitted):
            for step in [s for s in self.wishes if s <= event.last_step]:
                ask_driver(self.directory, self.wishes.pop(step))


@pytest.mark.full(only="a killed worker is replaced, on Ray")
@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_is_replaced(tmp_path: Path, ray_tmpdir: Path) -> None:
    """Before others have run here whose seats would have its places."""
    gate = tmp_path / "gate"
    settings = {"gate": str(gate), "norm": True}
    elastic = {"min_workers": 1, "max_workers": 2}
    job = asked("Paced", 2, steps=200, elastic=elastic, settings=settings)
    opening = Opening(gate, 2, Trouble(ray_tmpdir, [20], kill))
    before = placement_group_table()
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=opening)
    check_result(run, job, Steady(norm=True), 200)
    places = {name: one for name, one in placement_group_table().items() if name not in before}
    assert [one["state"] for one in places.values()] == ["REMOVED"] * 2  # it has the dead one's
    log = run.events
    [lost] = of_kind(MemberLost, log)
    groups = [set(e.members) for e in of_kind(GenerationFormed, log)]
    assert groups[0] == {0, 1}
    assert {0, 1} - {lost.member} in groups
    assert groups[-1] == {0, 1, 2} - {lost.member}
    assert run.summary["workers"] == 2
    assert sum(e.micro_batches for e in of_kind(StepsCommitted, log) if e.member == 2) > 0
    assert len(of_kind(Recovered, log)) == 1


@pytest.mark.full(only="workers are changed from outside while a run goes on")
@pytest.mark.usefixtures("warm")
def test_workers_are_changed_while_the_run_goes_on(tmp_path: Path) -> None:
    gate, run_dir = tmp_path / "gate", tmp_path / "run"
    job = asked(
        "Paced",
        2,
        steps=STEPS,
        elastic={"min_workers": 1, "max_workers": 2},
        settings={"gate": str(gate)},
    )
    asking = Asking(run_dir, {10: "1", 40: "1:3"}, Opening(gate, 3, lambda _: None))
    run = raycloud.train(job, run_dir=run_dir, observer=asking)
    check_result(run, job, Steady(), STEPS)
    log = run.events
    ranges = [(e.min_workers, e.max_workers) for e in of_kind(RangeChanged, log)]
    assert ranges == [(1, 1), (1, 3)]
    sizes = [len(e.members) for e in of_kind(GenerationFormed, log)]
    assert sizes[0] == 2
    assert 1 in sizes
    assert max(sizes[sizes.index(1) :]) == 3
    assert not of_kind(MemberLost, log)
    for member in (2, 3):  # both that came after that have computed
        assert sum(e.micro_batches for e in of_kind(StepsCommitted, log) if e.member == member)


@pytest.mark.full
@pytest.mark.usefixtures("warm")
def test_where_too_few_are_left_they_wait_for_another(tmp_path: Path, ray_tmpdir: Path) -> None:
    gate = tmp_path / "gate"
    job = asked(
        "Paced",
        2,
        steps=STEPS,
        elastic={"min_workers": 2, "max_workers": 2},
        settings={"gate": str(gate)},
    )
    opening = Opening(gate, 2, Trouble(ray_tmpdir, [20], kill))
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=opening)
    check_result(run, job, Steady(), STEPS)
    log = run.events
    [lost] = of_kind(MemberLost, log)
    groups = [set(e.members) for e in of_kind(GenerationFormed, log)]
    assert groups[0] == {0, 1}
    assert all(len(group) == 2 for group in groups)
    assert groups[-1] == {0, 1, 2} - {lost.member}
    assert any("waiting for more" in e.what for e in of_kind(Noticed, log))
    assert not of_kind(CapacityChanged, log)
    steps = [e for e in of_kind(StepsCommitted, log) if e.member not in {lost.member, 2}]
    assert sum(e.last_step - e.first_step for e in steps) == STEPS  # none was computed twice
