"""A part of a replica that somebody adds: one class, which members in trouble carry along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.commands import Back, Form
from raycloud.errors import CheckpointError, TaskError
from raycloud.events import MemberCaughtUp, MemberDone
from raycloud.step.replica import PARTS, Replica
from raycloud.step.stateful import (
    Commit,
    ReplicaState,
    Stateful,
)
from tests.fellows import Fellows
from tests.lockstep import Fleet, NetTask, job
from tests.unit.test_recovery_catch_up import begin
from tests.unit.test_recovery_restore import Save, asked, formed, saved

DECAY = 0.9
EXACT = 1e-12


class Average(Stateful):
    """An exponential moving average of the weights, as after each step."""

    name = "average"

    def __init__(self, replica: Replica) -> None:
        self._live = dict(replica.model.named_parameters())
        self._mean = {name: p.detach().clone() for name, p in self._live.items()}
        self.commits = 0

    def commit(self, step: Commit) -> None:
        self.commits += 1
        for name, mean in self._mean.items():
            mean.lerp_(self._live[name].detach(), 1.0 - DECAY)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._mean)

    def values(self) -> dict[str, Any]:
        return {"commits": self.commits}

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        self.commits = values["commits"]
        for name, mean in self._mean.items():
            mean.copy_(tensors[name])

    def begin(self) -> None:
        self.commits = 0
        for name, mean in self._mean.items():
            mean.copy_(self._live[name].detach())


@pytest.fixture(autouse=True)
def _added() -> Iterator[None]:
    PARTS.append(Average)
    yield
    PARTS.remove(Average)


def averages(state: ReplicaState) -> dict[str, torch.Tensor]:
    """What it is in the state, beside the count."""
    return {n: t for n, t in state.tensors().items() if n.startswith("average/")}


def apart(one: Replica, other: Replica) -> float:
    mine, theirs = averages(one.state), averages(other.state)
    assert mine.keys() == theirs.keys()
    assert one.state.values()["parts"] == other.state.values()["parts"]
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


@pytest.mark.parametrize("during", ["lane", "gradients", "after"])
def test_it_is_part_of_each_step_also_where_a_member_dies(during: str) -> None:
    alone, several = (Fleet(job(), NetTask(norm=True), shares) for shares in ((8,), (3, 3, 2)))
    for step in range(6):
        alone.step(step)
        if step == 3:
            several.lose(1, step, during=during)
        else:
            several.step(step)
    reference = alone.replicas[0]
    assert all(apart(replica, reference) < EXACT for replica in several.replicas)
    assert reference.state.values()["parts"]["average"] == {"format": 1, "commits": 6}
    model = dict(reference.model.named_parameters())
    held = averages(reference.state)
    assert max(float((held[f"average/{n}"] - p).detach().abs().max()) for n, p in model.items()) > 0


def test_a_step_that_does_not_count_is_none_of_its() -> None:
    fleet = Fleet(job(), NetTask(), (8,))
    fleet.step(0)
    before = {name: t.clone() for name, t in averages(fleet.replicas[0].state).items()}
    fleet.compute(1)
    fleet.replicas[0].discard()
    now = averages(fleet.replicas[0].state)
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert fleet.replicas[0].state.values()["parts"]["average"]["commits"] == 1


def finished(fellows: Fellows, folder: Path, *members: int) -> list[Replica]:
    (folder / "gate").touch()
    fellows.until(MemberDone, members)
    return [fellows.replica(member) for member in members]


@pytest.fixture
def undisturbed(tmp_path: Path) -> Replica:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    fellows = Fellows(folder / "kept", asked(folder), 1, joining=0)
    fellows.form(Form(generation=0, members=(0,), shares=(8,), step=0))
    return finished(fellows, folder, 0)[0]


def test_a_newcomer_is_handed_it_and_catches_up(tmp_path: Path, undisturbed: Replica) -> None:
    fellows = Fellows(tmp_path / "kept", asked(tmp_path), 2)
    begin(fellows)
    fellows.until(MemberCaughtUp, (2,))
    first, *others = finished(fellows, tmp_path, 0, 1, 2)
    assert [apart(first, other) for other in others] == [0.0, 0.0]
    assert apart(first, undisturbed) < EXACT


def test_those_that_go_back_have_it_from_the_checkpoint(
    tmp_path: Path, undisturbed: Replica
) -> None:
    asks, folder = asked(tmp_path), tmp_path / "kept"
    fellows = Fellows(folder, asks, 2)
    step = saved(fellows, asks, folder, Save())
    fellows.come_to(0, step + 4)
    back, three = Back(step=step, generation=1), (0, 1, 2)
    fellows.form(
        Form(generation=1, members=three, shares=(3, 3, 2), step=step, settled=1, back=back)
    )
    assert formed(fellows, 1) == step
    first, *others = finished(fellows, tmp_path, *three)
    assert [apart(first, other) for other in others] == [0.0, 0.0]
    assert apart(first, undisturbed) < EXACT


def test_where_a_state_does_not_know_it_it_begins_from_the_weights_that_come() -> None:
    """Also where it has committed since: those that go back and those that come are alike."""
    fleet = Fleet(job(), NetTask(), (8,))
    fleet.step(0)
    replica = fleet.replicas[0]
    tensors = {n: t.clone() for n, t in replica.state.tensors().items() if "average" not in n}
    values = {k: v for k, v in replica.state.values().items() if k != "parts"}
    fleet.step(1)
    replica.state.load(tensors, values)
    held = averages(replica.state)
    assert all(torch.equal(t, tensors[n.replace("average", "model")]) for n, t in held.items())
    assert replica.state.values()["parts"]["average"]["commits"] == 0


def test_state_of_another_part_or_format_is_refused() -> None:
    state = Fleet(job(), NetTask(), (8,)).replicas[0].state
    tensors, values = state.tensors(), state.values()
    for shown, told in (
        ({**tensors, "median/weight": torch.zeros(1)}, {}),
        (tensors, {"median": {"format": 1}}),
    ):
        with pytest.raises(TaskError, match="state of 'median', which this run has not"):
            state.load(shown, {**values, "parts": {**values["parts"], **told}})
    with pytest.raises(CheckpointError, match="'average' in format 2, not 1"):
        state.load(tensors, {**values, "parts": {"average": {"format": 2}}})
    assert state.values() == values
    for taken in ("average", "model", "a/b"):
        another = Stateful()
        another.name = taken
        with pytest.raises(ValueError, match="names of their own"):
            ReplicaState((*state.parts, another))
