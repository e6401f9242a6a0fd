"""A member that cannot begin says why, whose fault it is, and what would do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raycloud.commands import Extend, Form, Meet, Reshare, Save
from raycloud.errors import PlacementError
from raycloud.events import (
    ChangeApplied,
    Event,
    ExchangeBroken,
    MemberDone,
    MemberFailed,
    MemberReady,
    StepsCommitted,
)
from raycloud.net.direct import DirectTransport
from raycloud.net.gloo import GlooTransport
from raycloud.net.stream import Place
from raycloud.net.transport import Transport
from raycloud.recovery.rendezvous import Meeting
from raycloud.worker import member
from raycloud.worker.context import Changes, MemberConfig
from raycloud.worker.member import Member
from tests.fellows import WAIT_S, Fellows
from tests.live_tasks import Faulty
from tests.lockstep import NetTask, job
from tests.tiers import variants
from tests.unit.test_recovery_catch_up import asked, check_end

POLL_S = 30.0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fault": "unreadable"}, "DataError", "could not be read: [Errno 2] No such file"),
        ({"fault": "empty"}, "DataError", "the data set has no training samples"),
        ({"fault": "data"}, "TaskError", "Task.data raised KeyError"),
        ({"fault": "model"}, "TaskError", "Task.model raised ValueError: no such width"),
        ({"fault": "batch"}, "TaskError", "Task.batch raised IndexError: sample 7 has no label"),
        ({"fault": "loss"}, "TaskError", "Task.loss raised RuntimeError: the shapes do not"),
        ({"unknown": 1}, "TaskError", "could not be made from settings ['unknown']"),
        ({"fault": "constructor"}, "TaskError", "settings ['fault']: ValueError: width must be"),
        ({"fault": "draws"}, "TaskError", "drew from a global random generator"),
    ],
    ids=[
        "unreadable",
        "empty",
        "data",
        "model",
        "batch",
        "loss",
        "settings",
        "constructor",
        "draws",
    ],
)
def test_member_that_cannot_begin(
    tmp_path: Path, settings: dict[str, Any], error: str, message: str
) -> None:
    failure = _last(job(task=Faulty, settings=settings), tmp_path)
    assert isinstance(failure, MemberFailed)
    assert failure.error == error
    assert message in failure.message
    assert failure.hint or 'live_tasks.py", line' in failure.message


def test_too_little_data_for_a_whole_batch(tmp_path: Path) -> None:
    asked = job(task=Faulty, settings={"samples": 9}, drop_last=True)
    failure = _last(asked, tmp_path)
    assert isinstance(failure, MemberFailed)
    assert failure.error == "DataError"
    assert "drop_last leaves no step: 9 samples" in failure.message
    assert "lower global_batch" in failure.hint


def _last(asked: Any, folder: Path) -> Event:
    events = Member(_config(asked, folder)).poll(POLL_S)
    assert events
    return events[-1]


def _config(asked: Any, folder: Path, **more: Any) -> MemberConfig:
    return MemberConfig(
        member=0, node="", address="", job=asked, task=Faulty, checkpoints=str(folder), **more
    )


@pytest.mark.parametrize("shares", ["auto", "equal"])
def test_who_joins_computes_a_share_before_it_is_ready(tmp_path: Path, shares: str) -> None:
    sizes: list[int] = []

    class Sized(NetTask):
        def loss(self, model: Any, batch: Any) -> Any:
            sizes.append(len(batch[1]))
            return super().loss(model, batch)

    elastic = {"min_workers": 1, "max_workers": 2, "shares": shares}
    asked = job(task=Sized, settings={"dropout": 0.0, "branch": False}, elastic=elastic)
    config = replace(_config(asked, tmp_path, joins=True), task=Sized)
    [told] = Member(config).poll(POLL_S)
    assert isinstance(told, MemberReady)
    assert sizes == [2, 2, 8]


@pytest.mark.parametrize("fault", ["", "loss"])
def test_who_takes_a_place_is_as_fast_as_is_known_and_shows_its_errors(
    tmp_path: Path, fault: str
) -> None:
    asked = job(task=Faulty, settings={"fault": fault})
    config = _config(asked, tmp_path, joins=True, speed=(0.5, 0.25))
    [told] = Member(config).poll(POLL_S)
    if fault:
        assert isinstance(told, MemberFailed)
        assert "Task.loss raised RuntimeError" in told.message
    else:
        assert isinstance(told, MemberReady)
        assert (told.fixed_s, told.micro_batch_s) == (0.5, 0.25)


NOWHERE = Place("", 0, 0)  # who is alone asks nobody


def until(member: Member, kind: type[Event]) -> None:
    while True:
        found = member.poll(POLL_S)
        assert found, f"nothing happened for {POLL_S} s"
        if any(isinstance(event, kind) for event in found):
            return
        failed = [event for event in found if isinstance(event, MemberFailed)]
        assert not failed, failed


def made(folder: Path, task: type[NetTask], **settings: object) -> Member:
    asked = job(task=task, settings=settings, steps=3)
    config = MemberConfig(
        member=4, node="here", address="127.0.0.1", job=asked, task=task, checkpoints=str(folder)
    )
    return Member(config)


def test_one_that_has_computed_says_where_it_is(tmp_path: Path) -> None:
    member = made(tmp_path, NetTask)
    assert member.survivor() is None
    until(member, MemberReady)
    assert member.survivor() is None  # it has nothing that others have not
    meeting = Meeting(place=NOWHERE, generation=6, rank=0, members=(4,), shares=(8,))
    member.form(meeting)
    until(member, MemberDone)
    found = member.survivor()
    assert found is not None
    assert (found.member, found.members, found.generation, found.newest) == (4, (4,), 6, 6)
    assert (found.changes, found.grown, found.ready.member) == (0, False, 4)
    member.prepare(3, Reshare(generation=9, shares=(8,)))
    found = member.survivor()
    assert found is not None
    assert (found.newest, found.changes) == (9, 3)


def test_one_that_has_failed_is_none(tmp_path: Path) -> None:
    member = made(tmp_path, Faulty, fault="model")
    until(member, MemberFailed)
    assert member.survivor() is None


def test_the_newest_change_and_generation_are_known_however_far_they_came() -> None:
    changes = Changes(feed_depth=1)
    assert changes.newest == (0, -1)
    changes.prepare(1, Reshare(generation=5, shares=(1,)))
    assert changes.newest == (1, 5)
    changes.agree(0)
    changes.due(1)
    changes.prepare(2, Save())
    changes.prepare(3, Meet(generation=7, members=(0,), shares=(1,)))
    assert changes.newest == (3, 7)
    changes.settle(4)
    changes.prepare(4, Extend(version=1, samples=9))
    assert changes.newest == (4, 7)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("steps", variants(1, 3))
def test_it_has_no_part_in_what_the_others_did_since(steps: int, tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 3, joining=0)
    fellows.form(Form(generation=0, members=(0, 1, 2), shares=(3, 3, 2), step=0))
    fellows.come_to(0, 2)
    fellows.prepare(1, Meet(generation=1, members=(0, 1), shares=(4, 4)), (0, 1, 2))
    fellows.until(ChangeApplied, (2,))
    left = fellows.of(ChangeApplied, 2)[0].step
    fellows.come_to(0, left + steps)
    fellows.form(Form(generation=2, members=(0, 2), shares=(4, 4), step=left, settled=1))
    check_end(fellows, job, (0, 2))
    told = [e for e in fellows.of(StepsCommitted, 2) if e.generation == 2]
    assert told[0].first_step >= left + steps


def wait_for(found: Callable[[], bool]) -> None:
    pause, end_s = threading.Event(), time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end_s
        pause.wait(0.01)


def hung_up(transport: Transport) -> bool:
    if isinstance(transport, DirectTransport):
        return not transport._courier.is_alive() or all(p.ended for p in transport._peers.values())
    assert isinstance(transport, GlooTransport)
    return transport._over is not None


def left(transport: Transport) -> bool:
    if isinstance(transport, DirectTransport):
        return not transport._courier.is_alive()
    return not hasattr(transport, "_group")


def meet_all_the_same(
    meet: Callable[..., Any], meeting: Meeting, _: Callable[[], bool]
) -> tuple[Transport, Transport]:
    """Whoever is called elsewhere meanwhile."""
    met: tuple[Transport, Transport] = meet(meeting, lambda: False)
    return met


@pytest.mark.timeout(120)
def test_whose_exchange_broke_hangs_up_where_nobody_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_ALONE_S", 0.5)
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(0, 5)
    life = fellows.members[0]._worker
    assert life is not None
    _, transports = life._met
    fellows.members[1].abandon(0)
    fellows.until(ExchangeBroken, (0,))
    wait_for(lambda: all(map(hung_up, transports)))
    fellows.form(Form(generation=1, members=(0, 1), shares=(5, 3), step=0))
    check_end(fellows, job, (0, 1))


@pytest.mark.timeout(120)
def test_whose_process_goes_on_as_another_hangs_up_at_once(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(1, 5)
    life = fellows.members[1]._worker
    assert life is not None
    _, transports = life._met
    fellows.members.append(fellows.members[1].rejoin_as(2))
    wait_for(lambda: all(map(hung_up, transports)))
    fellows.form(Form(generation=1, members=(0,), shares=(8,), step=0))
    check_end(fellows, job, (0,))


@pytest.mark.full(only="a meeting that is withdrawn")
@pytest.mark.timeout(120)
def test_what_was_met_ahead_and_withdrawn_is_left(tmp_path: Path) -> None:
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    meet = Meet(generation=1, members=(0, 1), shares=(5, 3))
    fellows.prepare(1, meet, (0, 1))  # no steps are computed in which it would take effect
    wait_for(lambda: all(1 in one._planned for one in fellows.members))
    old = [one for m in fellows.members for one in m._planned[1][1]]
    fellows.form(Form(generation=4, members=(0, 1), shares=(5, 3), step=0, settled=1))
    wait_for(lambda: all(map(left, old)))
    fellows.come_to(0, 3)
    assert all(not m._planned for m in fellows.members)
    check_end(fellows, job, (0, 1))


@pytest.mark.full(only="a meeting that was withdrawn before")
@pytest.mark.timeout(120)
def test_what_is_met_when_it_is_withdrawn_already_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[Transport] = []
    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    for one in fellows.members:
        one._host = replace(one._host, leave=met.extend)
        life = one._worker
        assert life is not None
        monkeypatch.setattr(life, "meet", partial(meet_all_the_same, life.meet))
    fellows.form(Form(generation=4, members=(0, 1), shares=(5, 3), step=0))
    fellows.prepare(1, Meet(generation=3, members=(0, 1), shares=(5, 3)), (0, 1))
    wait_for(lambda: len(met) == 4)
    assert all(not m._planned for m in fellows.members)
    check_end(fellows, job, (0, 1))


@pytest.mark.timeout(120)
def test_who_cannot_meet_a_newcomer_on_its_gpu_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PlacementError("two workers have the same GPU")

    job = asked(tmp_path)
    fellows = Fellows(tmp_path / "kept", job, 2, joining=0)
    fellows.form(Form(generation=0, members=(0, 1), shares=(5, 3), step=0))
    fellows.come_to(0, 5)
    with monkeypatch.context() as patch:
        for one in fellows.members:
            patch.setattr(one._worker, "meet", refused)
        fellows.prepare(1, Meet(generation=1, members=(0, 1), shares=(4, 4)), (0, 1))
        fellows.until(ExchangeBroken, (0, 1))
    told = fellows.of(ExchangeBroken)
    assert {(one.generation, one.why) for one in told} == {(1, "two workers have the same GPU")}
    check_end(fellows, job, (0, 1))
