"""A run's updates change their way between two steps: real members, over real sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.clock import SystemClock
from raycloud.commands import Form, Meet
from raycloud.events import (
    ChangeApplied,
    MemberDone,
    Noticed,
    RoundsRefused,
    StepsCommitted,
    SyncPoint,
)
from raycloud.spec import Job
from raycloud.step.replica import Replica
from raycloud.step.travel import no_rounds, travel_by
from raycloud.sync.period import Choice
from raycloud.sync.residual import Residual
from raycloud.sync.strategy import Coded, changed_to
from tests.fellows import Fellows
from tests.live_tasks import Paced
from tests.lockstep import CPU, NetTask, job
from tests.tiers import variants
from tests.unit.test_recovery_catch_up import check_end

RING, TREE = SyncPoint(), SyncPoint(topology="tree")
DIRECT = SyncPoint(topology="direct")
INT4 = SyncPoint(topology="direct", codec="int4")
INT8 = SyncPoint(topology="tree", codec="int8")
ROUNDS = SyncPoint(topology="tree", codec="int4", period=8)
STEPS = 200  # more than are computed before the gate is there


def asked(folder: Path, *, double: bool = True, **changes: Any) -> Job:
    settings = {"gate": str(folder / "gate"), "pause_s": 0.005, "dropout": 0.0, "norm": True}
    settings["double"] = double
    values = {
        "task": Paced,
        "steps": STEPS,
        "settings": settings,
        "checkpoint": {"every_steps": None},
    }
    return job(**{**values, **changes})


class Changes:
    """Changes of the point, one after the other, each as the next generation."""

    def __init__(self, fellows: Fellows, members: tuple[int, ...], shares: tuple[int, ...]) -> None:
        self.fellows, self.members, self.shares = fellows, members, shares
        self.number, self.generation = 0, 0
        fellows.form(Form(generation=0, members=members, shares=shares, step=0))
        fellows.come_to(members[0], 3)

    def send(self, point: SyncPoint) -> Meet:
        self.number, self.generation = self.number + 1, self.generation + 1
        meet = Meet(
            generation=self.generation, members=self.members, shares=self.shares, sync=point
        )
        self.fellows.prepare(self.number, meet, self.members)
        return meet

    def make(self, point: SyncPoint, steps: int = 6) -> int:
        """Change to it, and compute some steps; the first of them."""
        self.send(point)
        self.fellows.until(ChangeApplied, self.members, more=self.number)
        applied = [one for one in self.fellows.of(ChangeApplied) if one.change == self.number]
        [step] = {one.step for one in applied}
        for member in self.members:
            self.fellows.come_to(member, step + steps)
        return step


def tensors(fellows: Fellows, member: int) -> dict[str, torch.Tensor]:
    """What all members must have alike."""
    return dict(fellows.replica(member).common_tensors())


def check_alike(fellows: Fellows, members: tuple[int, ...]) -> None:
    first, *others = [tensors(fellows, member) for member in members]
    for other in others:
        assert first.keys() == other.keys()
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.timeout(120)
def test_by_points_that_lose_nothing_the_result_is_that_of_one_process(tmp_path: Path) -> None:
    job = asked(tmp_path, steps=60)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0)
    changes = Changes(fellows, (0, 1, 2), (4, 3, 1))
    for point in (TREE, DIRECT, RING):
        changes.make(point, steps=3)
    check_end(fellows, job, (0, 1, 2), steps=60)
    told = fellows.of(StepsCommitted, 1)
    assert sum(one.last_step - one.first_step for one in told) == 60  # each once
    assert {one.generation for one in told} == {0, 1, 2, 3}


@pytest.mark.timeout(120)
def test_through_codecs_and_rounds_and_back_replicas_stay_alike(tmp_path: Path) -> None:
    job = asked(tmp_path, double=False)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0)
    changes, members = Changes(fellows, (0, 1, 2), (4, 3, 1)), (0, 1, 2)
    changes.make(INT4)
    kept = fellows.replica(1).residual
    assert kept is not None
    assert kept.norm > 0.0
    changes.make(ROUNDS, steps=20)
    assert fellows.replica(1).period == 8
    changes.make(INT8)
    assert fellows.replica(1).period == 1
    changes.make(RING)
    assert kept is fellows.replica(1).residual
    assert kept.norm == 0.0  # it went with the first gradients
    left = [one for one in fellows.of(Noticed, 1) if "left behind" in one.what]
    assert len(left) == 2  # into rounds, and out of them
    finish(fellows, job, members)
    told = fellows.of(StepsCommitted, 2)
    assert [a.last_step for a in told[:-1]] == [b.first_step for b in told[1:]]


def finish(fellows: Fellows, job: Job, members: tuple[int, ...]) -> None:
    (Path(job.settings["gate"])).touch()
    fellows.until(MemberDone, members)
    check_alike(fellows, members)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", variants(ROUNDS, TREE, INT4))
def test_a_member_that_is_lost_in_the_midst_of_a_change_is_not_missed(
    point: SyncPoint, tmp_path: Path
) -> None:
    """It comes to no meeting; the others go on by the point before, and then change."""
    job = asked(tmp_path, double=False)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0)
    changes = Changes(fellows, (0, 1, 2), (4, 3, 1))
    meet = Meet(generation=1, members=(0, 1, 2), shares=(4, 3, 1), sync=point)
    for rank in (0, 1):  # member 2 is never told
        meeting = replace(fellows._meeting(meet, rank), settled=1, planned=True, ahead=1)
        fellows.members[rank].form(meeting)
    fellows.come_to(0, (fellows.members[0].step or 0) + 2)
    fellows.members[2].abandon(1)
    fellows.form(Form(generation=2, members=(0, 1), shares=(5, 3), step=0, settled=1, sync=RING))
    changes.members, changes.shares, changes.number, changes.generation = (0, 1), (5, 3), 1, 2
    changes.send(point)
    fellows.until(ChangeApplied, (0, 1))
    finish(fellows, job, (0, 1))


@pytest.mark.timeout(120)
def test_a_change_that_only_some_have_made_is_taken_back(tmp_path: Path) -> None:
    """They are in the midst of a round, of which nothing counts: all go on step by step."""
    job = asked(tmp_path, double=False)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0)
    changes = Changes(fellows, (0, 1, 2), (4, 3, 1))
    step = changes.make(ROUNDS, steps=2)  # within the first round, or not far behind it
    fellows.members[2].abandon(1)
    told = Form(generation=2, members=(0, 1), shares=(5, 3), step=step, settled=1, sync=RING)
    fellows.form(told)
    (Path(job.settings["gate"])).touch()
    fellows.until(MemberDone, (0, 1))
    check_alike(fellows, (0, 1))
    assert fellows.replica(0).period == 1


class Counting(Paced):
    """Its optimizer keeps what is known not to be averaged only after a step."""

    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)

        def count(changed: Any, *_: Any) -> None:
            for of in changed.state.values():
                of["seen"] = of.get("seen", 0) + 1

        optimizer.register_step_post_hook(count)
        return optimizer


@pytest.mark.timeout(120)
def test_rounds_that_the_first_steps_rule_out_are_refused_and_told(tmp_path: Path) -> None:
    job = asked(tmp_path, double=False, task=Counting)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0, task=Counting)
    changes = Changes(fellows, (0, 1), (5, 3))
    changes.make(ROUNDS, steps=4)
    fellows.until(RoundsRefused, (0, 1))
    assert {one.why for one in fellows.of(RoundsRefused)} == {"AdamW keeps 'seen', of type int"}
    for member in (0, 1):  # it is known only once it is told what is in force
        mine = [e for e in fellows.events if getattr(e, "member", None) == member]
        refused = next(at for at, e in enumerate(mine) if isinstance(e, RoundsRefused))
        assert isinstance(mine[refused - 1], ChangeApplied | StepsCommitted)
        assert any(isinstance(e, ChangeApplied) for e in mine[:refused])
    assert fellows.replica(0).period == 1
    changes.make(replace(ROUNDS, period=1), steps=2)
    finish(fellows, job, (0, 1))
    assert len(fellows.of(RoundsRefused)) == 2


@pytest.mark.timeout(120)
def test_a_newcomer_joins_a_run_that_has_changed(tmp_path: Path) -> None:
    job = asked(tmp_path, double=False)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=1)
    changes = Changes(fellows, (0, 1), (5, 3))
    changes.make(ROUNDS, steps=10)
    changes.make(INT4, steps=4)
    meet = Meet(generation=3, members=(0, 1, 2), shares=(4, 3, 1), sync=INT4)
    fellows.prepare(3, meet, (0, 1))
    fellows.until(ChangeApplied, (0, 1), more=3)
    fellows.until(StepsCommitted, (2,))
    finish(fellows, job, (0, 1, 2))


def test_what_was_kept_goes_with_the_first_that_travel_as_they_are() -> None:
    kept = Residual()
    assert isinstance(changed_to(RING, kept), Coded)
    assert changed_to(INT4, kept).residual is kept
    assert not kept.passing
    assert changed_to(RING, kept)._codec is None
    assert kept.passing
    task = NetTask(double=False)
    replica = Replica(job(), task, device=CPU, steps=9, clock=SystemClock())
    travel_by(replica, INT4)
    before = replica.state.parts
    travel_by(replica, RING)
    assert replica.state.parts == before
    assert {"residual", "outer"} <= {part.name for part in before}
    assert replica.residual is not None
    assert replica.residual.own_tensors() == {}
    assert no_rounds(replica) == ""


def test_a_process_that_goes_on_by_another_point_has_its_period_before_it_loads() -> None:
    replica = Replica(job(), NetTask(double=False), device=CPU, steps=9, clock=SystemClock())
    travel_by(replica, replace(INT4, period=8))
    assert replica.rounds is not None
    assert replica.rounds.choice.period == 8
    momentum = [tensor.fill_(1.0) for tensor in replica.rounds.tensors().values()]
    replica.rounds.take(Choice(replica.rounds.choice.number + 1, 8, 8))  # what all agree on
    assert momentum
    assert all(bool((tensor == 1.0).all()) for tensor in momentum)
