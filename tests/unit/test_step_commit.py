"""Commit: a step that is not finite, where the job goes back: what members say, and leave out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raycloud.errors import CheckpointError, DivergedError
from raycloud.order import NAN, Skip
from raycloud.spec import Job
from raycloud.step.commit import RollbackError, check_restored, newest_update
from tests.lockstep import NetTask, difference, job, plain_loop
from tests.poisoned import Looped, Poisoned
from tests.sockets import gloo_members, together
from tests.tiers import variants

STEPS = 9
EXACT = 1e-9
SHARES = [(8,), (5, 3), (3, 0, 4, 1)]


def rolling(**errors: Any) -> Job:
    return job(errors={"on_nan": "rollback"} | errors)


def ran(members: list[Looped], shares: tuple[int, ...]) -> None:
    """They compute all steps together."""
    with gloo_members(len(shares)) as gradients, gloo_members(len(shares)) as lanes:
        several = zip(members, gradients, lanes, strict=True)
        assert all(together(partial(one.run, g, lane, shares) for one, g, lane in several))


def raised(root: Path, asked: Job, task: NetTask, **state: Any) -> tuple[Looped, Exception]:
    """What ends the loop of one member that begins with this in its history."""
    member = Looped(root, asked, task, STEPS)
    for name, value in state.items():
        setattr(member.replica.history, name, value)
    with pytest.raises((RollbackError, DivergedError)) as told:
        ran([member], (8,))
    return member, told.value


@pytest.mark.parametrize("how", ["nan", "hidden"])
def test_it_is_said_which_step_and_nothing_of_it_stays(tmp_path: Path, how: str) -> None:
    member, error = raised(tmp_path, rolling(), Poisoned(bad=range(70), how=how))
    assert isinstance(error, RollbackError)
    assert (error.step, error.left_out, error.why) == (0, 0, "the loss is nan at step 0")
    assert member.replica.kept is None
    assert member.skips() == []
    reference = plain_loop(job(), Poisoned(how="memory", most=99), 0)
    assert difference(member.replica.model, reference) == 0.0


class Spoiled(NetTask):
    """Its optimizer makes a parameter infinite in the update after `updates`."""

    def __init__(self, updates: int) -> None:
        super().__init__(dropout=0.0, branch=False)
        self.updates = updates

    def model(self) -> nn.Module:
        model = super().model()
        if self.updates < 0:
            _spoil(model)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)

        def count(*_: Any) -> None:
            self.updates -= 1
            if self.updates == -1:
                _spoil(model)

        optimizer.register_step_post_hook(count)
        return optimizer


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(float("inf"))


def test_where_the_parameters_are_not_finite_the_update_before_is_why(tmp_path: Path) -> None:
    _, error = raised(tmp_path, rolling(), Spoiled(updates=2))
    assert isinstance(error, RollbackError)
    assert (error.step, error.left_out) == (3, 2)
    assert "at step 3, and the parameters are not finite before it" in error.why


def test_an_update_that_was_skipped_is_not_why() -> None:
    skips = tuple(Skip(step=s, epoch=0, start=s, stop=s + 1, why=NAN) for s in (5, 6, 2))
    assert newest_update(7, skips) == 4
    assert newest_update(0, skips) == -1


def test_a_model_that_begins_so_ends_the_run(tmp_path: Path) -> None:
    _, error = raised(tmp_path, rolling(), Spoiled(updates=-1))
    assert isinstance(error, DivergedError)
    assert "not finite before step 0" in error.message
    assert error.hint == "look at Task.model"


@pytest.mark.parametrize("shares", variants(*((shares,) for shares in reversed(SHARES))), ids=str)
@pytest.mark.parametrize("know", ["all", "one"])
def test_a_step_that_is_left_out_changes_nothing(
    tmp_path: Path, shares: tuple[int, ...], know: str
) -> None:
    """Also where some have not been told: all hear of it. Nobody that knows computes any of it."""
    tasks = [Poisoned(how="memory", most=99) for _ in shares]
    members = [Looped(tmp_path, rolling(), task, STEPS) for task in tasks]
    for member in members if know == "all" else members[:1]:
        member.replica.history.left_out = frozenset({3, 4, 70})
    ran(members, shares)
    clean = Poisoned(how="memory", most=99)
    reference = plain_loop(job(), clean, STEPS, passed_over=lambda span: span.step in {3, 4})
    for member in members:
        assert difference(member.replica.model, reference) <= EXACT
        assert [(s["step"], s["why"]) for s in member.skips()] == [(3, "nan"), (4, "nan")]
        assert all(skip["stop"] > skip["start"] for skip in member.skips())
    assert [what for member in members for what in member.notices()] == [
        f"step {step} was skipped: the run has gone back because of it" for step in (3, 4)
    ]


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_run_that_does_not_go_back_leaves_nothing_out(tmp_path: Path, on_nan: str) -> None:
    member = Looped(tmp_path, job(errors={"on_nan": on_nan}), Poisoned(how="memory", most=99), 5)
    member.replica.history.left_out = frozenset({3})
    ran([member], (8,))
    assert member.skips() == []


def test_no_more_is_left_out_than_is_allowed(tmp_path: Path) -> None:
    before = tuple(Skip(step=s, epoch=0, start=s, stop=s + 1, why=NAN) for s in (-1, -2))
    task = Poisoned(bad=range(70), how="nan")
    _, error = raised(tmp_path, rolling(most_nan_in_a_row=2), task, skips=before)
    assert isinstance(error, DivergedError)
    assert "errors.most_nan_in_a_row = 2 steps were skipped before" in error.message
    _, error = raised(tmp_path, rolling(most_skipped=2), task, skips=before)
    assert "errors.most_skipped = 2 steps were skipped before" in str(error)


def test_what_is_to_be_left_out_is_part_of_the_state(tmp_path: Path) -> None:
    mine, theirs = (Looped(tmp_path, rolling(), Poisoned(), STEPS).replica for _ in range(2))
    one, other = mine.state, theirs.state
    assert "left_out" not in one.values()
    mine.history.left_out = frozenset({7, 3})
    assert one.values()["left_out"] == [3, 7]
    other.load(one.tensors(), one.values())
    assert theirs.history.left_out == mine.history.left_out
    for wrong in ([-1], ["3"], 3, [True]):
        with pytest.raises(CheckpointError, match="steps to leave out cannot be used"):
            other.load(one.tensors(), {**one.values(), "left_out": wrong})
    assert theirs.history.left_out == mine.history.left_out


def test_a_checkpoint_that_is_not_finite_is_not_gone_on_from() -> None:
    model = nn.Linear(2, 1)
    check_restored(model, 6)
    _spoil(model)
    with pytest.raises(RollbackError, match="the checkpoint of step 6 is not finite") as told:
        check_restored(model, 6)
    assert (told.value.step, told.value.left_out) == (6, None)
