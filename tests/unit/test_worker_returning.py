"""A process that was left out goes on as another member: real members, over real sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raycloud.commands import Form, Meet, Reshare, Save
from raycloud.events import (
    ChangeApplied,
    Event,
    ExchangeBroken,
    MemberCaughtUp,
    MemberFailed,
    MemberReady,
    StepsCommitted,
)
from raycloud.worker.calibration import Calibration
from raycloud.worker.member import Member, MemberConfig
from tests.fellows import Fellows
from tests.live_tasks import Faulty
from tests.lockstep import job
from tests.tiers import variants
from tests.unit.test_recovery_catch_up import asked, check_end


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here they share a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
