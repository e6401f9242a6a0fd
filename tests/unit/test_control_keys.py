"""What identifies work is keyed by replica and position; a member has a role."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.checkpoints import Checkpoints
from raycloud.errors import InternalError
from raycloud.order import Position
from raycloud.worker.context import Membership
from tests.control_events import part, ready
from tests.control_job import control, formed, only, training


def test_members_are_asked_for_by_role_and_meet_by_keys():
    job = control()
    assert only(c.Spawn, job.start(0.0)).role == "worker"
    commands = [x for m in (0, 1) for x in job.on(ready(m), 0.0)]
    assert only(c.Form, commands).keys == ((0, 0), (1, 0))
    assert job.keys_of(0) == {0: (0, 0), 1: (1, 0)}
    assert {m.role for m in job._state.membership.members.values()} == {"worker"}
    with pytest.raises(InternalError, match=r"positions \(\(0, 0\), \(1, 0\)\) are due"):
        job.on(replace(formed(job), keys=((0, 0), (0, 1))), 0.0)
    job.on(replace(formed(job), keys=((0, 0), (1, 0))), 0.0)


def test_a_part_of_another_worker_is_illegal():
    job = training()
    with pytest.raises(InternalError, match=r"are \(1, 0\), not \(0, 0\)"):
        job.on(part(1, 5, replica=0), 1.0)
    job.on(part(1, 5, replica=1), 1.0)
    publish = only(c.Publish, job.on(part(0, 5), 1.0))  # which one it is, is known of the member
    assert list(publish.parts) == [(0, 0), (1, 0)]


def test_parts_that_were_divided_otherwise_are_forgotten():
    known, keys = Checkpoints(), {4: (0, 0), 7: (1, 0)}
    assert not [*known.take_in(part(7, 5), keys), *known.take_in(part(4, 5, generation=1), keys)]
    [publish] = known.take_in(part(7, 5, generation=1), keys)
    assert publish.parts == {(0, 0): {"file": "4-5"}, (1, 0): {"file": "7-5"}}


def test_a_member_knows_its_key():
    one = Membership(
        members=(4, 7, 9),
        rank=2,
        generation=0,
        shares=(1, 1, 1),
        step=0,
        position=Position(),
        last_step=1,
    )
    assert one.key == (2, 0)
    assert replace(one, keys=((0, 0), (0, 1), (1, 0))).key == (1, 0)
    assert e.key_of(((0, 0), (0, 1)), 1) == (0, 1)
