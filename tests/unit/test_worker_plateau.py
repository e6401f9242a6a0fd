"""A schedule that goes by what is measured: once after each measuring, by the same everywhere."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raycloud import Splits
from raycloud.checkpoint import decode
from raycloud.checkpoint.payload import read_part
from raycloud.checkpoint.store import LocalStore
from raycloud.errors import TaskError
from raycloud.events import ChangeApplied, MemberCaughtUp, MemberDone, PartWritten
from raycloud.metrics import Mean
from raycloud.net.lane import Lane
from raycloud.net.stream import Stream
from raycloud.order import Position
from raycloud.worker.context import Membership
from raycloud.worker.evaluate import measured_value
from raycloud.worker.loop import Loop
from tests.fellows import Fellows
from tests.live_tasks import Paced
from tests.lockstep import NetTask, difference, job
from tests.poisoned import Looped
from tests.sockets import gloo_members, together
from tests.unit.test_recovery_catch_up import begin

STEPS = 9


class Plateau(NetTask):
    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.5)


class PacedPlateau(Paced):
    """Halves its rate after each measuring that is not much better than the best."""

    def data(self, path: str | None) -> Splits:
        train = super().data(path).train
        return Splits(train=train, held_out=train[:7])

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.5)


def _asked(**changes: Any) -> Any:
    every = {"checkpoint": {"every_steps": 3}, "evaluate": {"every_steps": 3}}
    return job(task=Plateau, **{**every, **changes})


def _looped(root: Path, value: float, asked: Any = None) -> Looped:
    """A member that measures a weight of 1 and `value`."""
    one = Looped(root, asked or _asked(), Plateau(dropout=0.0), STEPS)
    one.measured = []  # type: ignore[attr-defined]

    def evaluate(step: int, seat: Any) -> Mapping[str, Any]:
        one.measured.append(step)  # type: ignore[attr-defined]
        return {"loss": Mean(total=value, weight=1.0).state()}

    one.parts = replace(one.parts, evaluate=evaluate)
    return one


def _together(made: list[Looped], what: Any = None) -> None:
    shares = (5, 3)[: len(made)] if len(made) > 1 else (8,)
    with gloo_members(len(made)) as gradients, gloo_members(len(made)) as lanes:
        several = zip(made, gradients, lanes, strict=True)
        together(partial(what or Looped.run, o, g, lane, shares) for o, g, lane in several)


def test_it_goes_by_the_mean_of_what_all_measured(tmp_path: Path) -> None:
    made = [_looped(tmp_path / str(k), value) for k, value in enumerate((1.0, 3.0))]
    _together(made)
    for one in made:
        schedule: Any = one.replica.scheduler
        assert one.measured == [3, 6, 9]  # type: ignore[attr-defined]
        assert one.replica.history.measured == (6, 2.0)  # what comes after the last step is idle
        assert (schedule.best, schedule.last_epoch, schedule.num_bad_epochs) == (2.0, 2, 1)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = _looped(tmp_path / "whole", 2.0, _asked(evaluate={"every_steps": 2}))
    _together([whole])
    first = next(e for e in whole.events if isinstance(e, PartWritten) and e.step == 6)
    resumed = _looped(tmp_path / "resumed", 2.0, _asked(evaluate={"every_steps": 2}))
    values = decode(first.part["values"])
    assert values["measured"] == [6, 2.0]  # it was measured before it was saved
    tensors = read_part(LocalStore(tmp_path / "whole"), first.part["record"])

    def from_there(self: Looped, gradients: Any, lane: Any, shares: tuple[int, ...]) -> bool:
        self.replica.connect(gradients)
        self.replica.state.load(tensors, values)
        self.parts = replace(self.parts, first_step=6)
        position = Position(epoch=values["epoch"], offset=values["offset"])
        seat = replace(whole.loop.seat, step=6, position=position)
        loop = Loop(self.parts, seat)
        loop.enter(seat, Lane(lane))
        return loop.run()

    _together([resumed], from_there)
    assert resumed.measured == [8, 9]  # type: ignore[attr-defined]
    assert difference(resumed.replica.model, whole.replica.model) == 0
    assert resumed.replica.state.values() == whole.replica.state.values()
    assert whole.replica.learning_rate < 3e-3


def test_who_has_heard_before_an_exchange_broke_tells_the_others(tmp_path: Path) -> None:
    made = [_looped(tmp_path / str(k), value) for k, value in enumerate((1.0, 3.0))]
    made[1].replica.take_measured(3, 0.5)

    def again(self: Looped, gradients: Any, lane: Any, shares: tuple[int, ...]) -> None:
        seat = replace(_seat_at(gradients.rank, shares), step=3)
        loop = Loop(self.parts, seat)
        loop.enter(seat, Lane(lane))
        loop._evaluate()
        loop._feed.close()

    _together(made, again)
    for one in made:
        schedule: Any = one.replica.scheduler
        assert one.replica.history.measured == (3, 0.5)
        assert (schedule.best, schedule.last_epoch) == (0.5, 1)


def test_a_run_that_goes_on_past_its_end_measures_there(tmp_path: Path) -> None:
    made = [_looped(tmp_path / str(k), 1.0) for k in range(2)]
    for one in made:
        one.parts = replace(one.parts, first_step=3)
    made[0].replica.take_measured(3, 0.25)  # one has the word, the other has not
    lacks: list[bool] = []

    def begins(self: Looped, gradients: Any, lane: Any, shares: tuple[int, ...]) -> None:
        seat = replace(_seat_at(gradients.rank, shares), step=3)
        loop = Loop(self.parts, seat)
        loop.enter(seat, Lane(lane))
        lacks.append(loop._lacks_measured())
        loop._evaluate()
        lacks.append(loop._lacks_measured())
        loop._feed.close()

    _together(made, begins)
    assert sorted(lacks) == [False, False, True, True]
    assert {one.replica.history.measured for one in made} == {(3, 0.25)}


def _seat_at(rank: int, shares: tuple[int, ...]) -> Membership:
    return Membership(
        members=tuple(range(len(shares))),
        rank=rank,
        generation=1,
        shares=shares,
        step=0,
        position=Position(),
        last_step=STEPS,
    )


@pytest.mark.timeout(120)
def test_a_newcomer_hears_what_was_measured_at_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, send = threading.Event(), Stream.send

    def held_up(stream: Stream, chunk: memoryview) -> None:
        assert opened.wait(60.0)
        send(stream, chunk)

    monkeypatch.setattr(Stream, "send", held_up)
    settings = {"gate": str(tmp_path / "gate"), "pause_s": 0.002, "dropout": 0.0, "norm": True}
    asked = job(task=PacedPlateau, steps=60, settings=settings, evaluate={"every_steps": 2})
    fellows = Fellows(tmp_path / "kept", asked, 2, task=PacedPlateau)
    begin(fellows)
    fellows.until(ChangeApplied, (0, 1))
    [met] = {event.step for event in fellows.of(ChangeApplied)}
    fellows.come_to(0, met + 6)  # three times it was measured until the state comes
    opened.set()
    fellows.until(MemberCaughtUp, (2,))
    (tmp_path / "gate").touch()
    fellows.until(MemberDone, (0, 1, 2))
    first, *others = [fellows.replica(member) for member in (0, 1, 2)]
    assert first.history.measured is not None
    assert first.history.measured[0] == 58
    assert first.scheduler.last_epoch == 29
    assert first.learning_rate < 3e-3
    for other in others:
        mine, theirs = first.state.tensors(), other.state.tensors()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert other.state.values() == first.state.values()


def test_what_it_goes_by_is_the_loss_or_all_there_is() -> None:
    one, other = Mean(total=1.0, weight=1.0), Mean(total=2.0, weight=1.0)
    assert measured_value({"accuracy": one}) == 1.0
    assert measured_value({"accuracy": one, "loss": other}) == 2.0
    for neither in ({}, {"accuracy": one, "f1": other}):
        with pytest.raises(TaskError, match=r"Task\.metrics gave (none|accuracy, f1)"):
            measured_value(neither)


def test_a_job_that_measures_at_its_end_alone_is_refused(tmp_path: Path) -> None:
    asked = _asked(evaluate={})
    with pytest.raises(TaskError, match=r"evaluate\.every_steps is null") as refused:
        Looped(tmp_path, asked, Plateau(), STEPS)
    assert "set evaluate.every_steps" in refused.value.hint
