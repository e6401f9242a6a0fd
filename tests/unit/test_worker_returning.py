"""A process that was left out goes on as another member: real members, over real sockets."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from raycloud.commands import Form, Meet, Reshare, Save
from raycloud.errors import TaskError
from raycloud.events import (
    ChangeApplied,
    EvaluationPart,
    Event,
    ExchangeBroken,
    MemberCaughtUp,
    MemberFailed,
    MemberReady,
    StepsCommitted,
)
from raycloud.on_ray.block_store import answer
from raycloud.spec import Job
from raycloud.task import Source, Splits
from raycloud.worker.calibration import Calibration
from raycloud.worker.context import MemberConfig
from raycloud.worker.member import Member
from tests.fellows import WAIT_S, Fellows
from tests.live_tasks import Faulty
from tests.lockstep import NetTask, job
from tests.tiers import variants
from tests.unit.test_recovery_catch_up import asked, check_end


def come_back(fellows: Fellows, process: int, change: int) -> int:
    """What was member `process` joins member 0 as another, which is given a share."""
    member = len(fellows.members)
    fellows.members.append(fellows.members[process].rejoin_as(member))
    fellows.until(MemberReady, (member,))
    before = fellows.of(ChangeApplied, 0)
    meet = Meet(generation=10 * change, members=(0, member), shares=(8, 0), following=(member,))
    fellows.prepare(change, meet, (0,))
    fellows.until(MemberCaughtUp, (member,))
    share = Reshare(generation=10 * change + 1, shares=(4, 4), caught_up=(member,))
    fellows.prepare(change + 1, share, (0, member))
    fellows.until(ChangeApplied, (0,), more=len(before) + 2)
    fellows.until(StepsCommitted, (member,))
    return member


@pytest.mark.timeout(120)
@pytest.mark.parametrize("knows", variants(False, True))
def test_it_keeps_what_it_has_built_and_takes_the_others_state(
    knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[tuple[float, float]] = []
    warm_up = Calibration.warm_up

    def noted(trial: Calibration, fixed_s: float, micro_batch_s: float) -> None:
        warm_up(trial, fixed_s, micro_batch_s)
        computed.append((fixed_s, micro_batch_s))

    lives: list[object] = []
    report = Member._report

    def said(member: Member, event: Event) -> None:
        if isinstance(event, MemberReady):
            lives.append(member._worker)
        report(member, event)

    monkeypatch.setattr(Calibration, "warm_up", noted)
    monkeypatch.setattr(Member, "_report", said)
    job = asked(tmp_path, evaluate={"every_steps": 10})
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(1, 5)
    model = fellows.replica(1).model
    fellows.members[1].prepare(1, Save())  # an order that is old when it is looked at
    fellows.form(Form(generation=1, members=(0,), shares=(8,), step=0, settled=1))
    if knows:
        fellows.until(ExchangeBroken, (1,))
    fellows.until(StepsCommitted, (0,), more=2)
    member = come_back(fellows, 1, change=2)
    assert fellows.replica(member).model is model
    [was, now] = [fellows.of(MemberReady, m)[0] for m in (1, member)]
    assert (now.pid, now.samples, now.micro_batch_s) == (
        os.getpid(),
        was.samples,
        was.micro_batch_s,
    )
    assert computed == [(was.fixed_s, was.micro_batch_s)], "a share, once it is back"
    assert len(lives) == 3
    assert all(lives), "who is ready may be asked for anything"
    told = fellows.of(StepsCommitted, member)[0]
    assert told.first_step == fellows.of(MemberCaughtUp, member)[0].step
    check_end(fellows, job, (0, member))


@pytest.mark.full(only="over real sockets: back twice")
@pytest.mark.timeout(120)
def test_it_comes_back_twice(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(1, 5)
    fellows.form(Form(generation=1, members=(0,), shares=(8,), step=0))
    member = come_back(fellows, 1, change=1)
    fellows.form(Form(generation=15, members=(0,), shares=(8,), step=0, settled=2))
    member = come_back(fellows, member, change=3)
    assert member == 3
    check_end(fellows, job, (0, member))


@pytest.mark.full(only="over real sockets: frozen while it follows")
@pytest.mark.timeout(120)
def test_it_freezes_while_it_follows_and_comes_back(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 1)
    fellows.form(Form(generation=0, members=(0,), shares=(8,), step=0))
    fellows.come_to(0, 5)
    meet = Meet(generation=1, members=(0, 1), shares=(8, 0), following=(1,))
    fellows.prepare(1, meet, (0,))
    fellows.until(ChangeApplied, (0,))
    fellows.form(Form(generation=2, members=(0,), shares=(8,), step=0, settled=1))
    check_end(fellows, job, (0, come_back(fellows, 1, change=2)))


def test_orders_to_who_it_was_are_passed_over(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 1, joining=0)
    fellows.members.append(fellows.members[0].rejoin_as(1))
    fellows.until(MemberReady, (1,))
    meeting = fellows._meeting(Form(generation=3, members=(0,), shares=(8,), step=0), 0)
    fellows.members[1].form(meeting)
    assert fellows.members[1]._newest == -1
    assert fellows.members[0].survivor() is None


def test_what_has_failed_cannot_go_on_as_another(tmp_path: Path) -> None:
    wanted = job(task=Faulty, settings={"fault": "model"}, steps=3)
    config = MemberConfig(
        member=4,
        node="",
        address="127.0.0.1",
        job=wanted,
        task=Faulty,
        checkpoints=str(tmp_path),
    )
    member = Member(config)
    while not any(isinstance(event, MemberFailed) for event in member.poll(60.0)):
        pass
    [failed] = member.rejoin_as(5).poll(60.0)
    assert isinstance(failed, MemberFailed)
    assert (failed.member, failed.error) == (5, "InternalError")
    assert "member 4 could not leave the generation" in failed.message


AFTER = 20  # micro-batches: more than are tried out before the first step


class Points(Dataset[Any]):
    """Points that end the process where they are read, or counted."""

    def __init__(self, where: str, points: Sequence[Any]) -> None:
        self.where, self.points = where, points

    def __len__(self) -> int:
        if self.where == "length":
            sys.exit("bye from length")
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        if self.where == "sample":
            sys.exit("bye from sample")
        return self.points[index]


class Leaves(NetTask):
    """Ends the process in one of its methods."""

    def __init__(self, *, where: str, how: str = "exit") -> None:
        super().__init__()
        self.where, self.how, self.made = where, how, 0
        self.end("constructor")

    def end(self, where: str) -> None:
        if where == self.where:
            if self.how == "exit":
                sys.exit(f"bye from {where}")
            raise KeyboardInterrupt(f"bye from {where}")

    def data(self, path: str | None) -> Splits:
        self.end("data")
        points: Any = super().data(path).train
        return Splits(train=Points(self.where, points), held_out=points[:8])

    def model(self) -> nn.Module:
        self.end("model")
        return super().model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.end("optimizer")
        return super().optimizer(model)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        self.end("scheduler")
        return super().scheduler(optimizer, steps)

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        self.made += 1
        self.end("batch")
        if self.made > AFTER:
            self.end("later batch")
        return super().batch(samples, rng)

    def weight(self, batch: Any, samples: int) -> float:
        self.end("weight")
        return super().weight(batch, samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.end("loss")
        loss = super().loss(model, batch)
        if self.where == "backward":
            loss.register_hook(lambda _: self.end("backward"))
        return loss

    def metrics(self, model: nn.Module, batch: Any, samples: int) -> Any:
        self.end("metrics")
        return super().metrics(model, batch, samples)

    def sample(self, model: nn.Module) -> str | None:
        self.end("showing")
        return None


BEFORE_THE_FIRST_STEP = {
    "constructor": "could not be made from settings ['how', 'where']",
    "data": "Task.data raised",
    "length": "the length of Task.data raised",
    "sample": "reading the samples raised",
    "model": "Task.model raised",
    "optimizer": "Task.optimizer raised",
    "scheduler": "Task.scheduler raised",
    "batch": "Task.batch raised",
    "weight": "Task.weight raised",
    "loss": "Task.loss raised",
    "backward": "the backward pass raised",
    "metrics": "measuring the held-out samples raised",
}


@pytest.mark.parametrize("where", BEFORE_THE_FIRST_STEP)
def test_before_the_first_step(tmp_path: Path, where: str) -> None:
    failed = _failure(_begun(tmp_path, where=where))
    assert failed.error == "TaskError"
    assert BEFORE_THE_FIRST_STEP[where] in failed.message
    assert f"SystemExit: bye from {where}" in failed.message


def test_an_interrupt_of_its_own(tmp_path: Path) -> None:
    failed = _failure(_begun(tmp_path, where="data", how="interrupt"))
    assert failed.error == "TaskError"
    assert failed.message.startswith("Task.data raised KeyboardInterrupt: bye from data")


@pytest.mark.parametrize(
    "skips", [False, True], ids=["in the feed", "where samples may be skipped"]
)
def test_while_it_trains(tmp_path: Path, *, skips: bool) -> None:
    errors = {"on_error": "skip", "most_skipped": 100} if skips else {}
    fellows = _training(tmp_path, errors=errors, settings={"where": "later batch"})
    failed = _failure(fellows.members[0])
    assert failed.error == "TaskError"
    assert "Task.batch raised SystemExit: bye from later batch" in failed.message


def test_what_it_shows_at_the_end_spoils_nothing(tmp_path: Path) -> None:
    fellows = _training(tmp_path, settings={"where": "showing"})
    said = _until(fellows.members[0], EvaluationPart)
    shown = [event for event in said if isinstance(event, EvaluationPart)]
    assert shown[-1].sample == "Task.sample raised SystemExit: bye from showing"


def test_an_actor_of_the_pipeline_goes_on() -> None:
    told = answer(sys, "exit", "no such bucket")
    assert isinstance(told, TaskError)
    assert "SystemExit: no such bucket" in told.message


def test_which_files_to_take(tmp_path: Path) -> None:
    from raycloud.data.location import locate

    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(TaskError, match=r"Source\.select raised SystemExit: bye"):
        locate(Source(path=str(tmp_path), select=lambda _: sys.exit("bye")))


def _begun(folder: Path, **settings: Any) -> Member:
    return Member(_config(folder, job(task=Leaves, settings={"how": "exit", **settings})))


def _training(folder: Path, **changes: Any) -> Fellows:
    fellows = Fellows(folder, job(task=Leaves, steps=10, **changes), 1, joining=0, task=Leaves)
    fellows.form(Form(generation=0, members=(0,), shares=(8,), step=0))
    return fellows


def _config(folder: Path, asked: Job) -> MemberConfig:
    return MemberConfig(
        member=0, node="", address="", job=asked, task=Leaves, checkpoints=str(folder)
    )


def _until(member: Member, kind: type[Event]) -> list[Event]:
    """What it says until it has said so; a member that says nothing fails the test."""
    said: list[Event] = []
    while not any(isinstance(event, kind) for event in said):
        more = member.poll(WAIT_S)
        assert more, f"it says nothing, and not {kind.__name__}: {said}"
        said += more
    return said


def _failure(member: Member) -> MemberFailed:
    return next(e for e in _until(member, MemberFailed) if isinstance(e, MemberFailed))
