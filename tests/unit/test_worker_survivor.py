"""What a member tells a driver that has followed another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raycloud.commands import Extend, Meet, Reshare, Save
from raycloud.events import Event, MemberDone, MemberFailed, MemberReady
from raycloud.net.stream import Place
from raycloud.worker.context import Changes
from raycloud.worker.member import Meeting, Member, MemberConfig
from tests.live_tasks import Faulty
from tests.lockstep import NetTask, job

NOWHERE = Place("", 0, 0)  # who is alone asks nobody

POLL_S = 30.0


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A member takes as many threads as it was given cores; here it shares a process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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
