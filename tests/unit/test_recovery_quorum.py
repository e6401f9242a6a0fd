"""Survivors of a generation find out where they go on, over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from raycloud.clock import SystemClock
from raycloud.net.gloo import GlooTransport
from raycloud.net.lane import Lane
from raycloud.net.transport import Abandoned
from raycloud.order import Position
from raycloud.recovery.quorum import (
    MemberStatus,
    ResumePoint,
    adopt,
    align,
    find_keepers,
    find_resume_point,
    gather_statuses,
    mean_loss,
    take_state,
)
from raycloud.recovery.rendezvous import HOST
from raycloud.step.commit import collect, commit
from raycloud.step.replica import Replica
from tests.lockstep import CPU, Fleet, NetTask, difference, job, never
from tests.nets import BuiltTask, Counting
from tests.sockets import gloo_members, together

SHARES = (4, 2, 2)


Found = tuple[ResumePoint, bool, list[int]]


def resume_points(
    fleet: Fleet, steps: list[int], positions: list[Position], begun: tuple[int, ...] = (1, 1, 1)
) -> list[Found]:
    """Every member tells its status and goes where all go on; was it behind, and who has what?"""

    def find(member: GlooTransport) -> Found:
        lane, rank = Lane(member), member.rank
        replica, at = fleet.replicas[rank], positions[rank]
        own = MemberStatus(steps[rank], begun[rank], epoch=at.epoch, offset=at.offset)
        point = find_resume_point(gather_statuses(lane, own))
        behind = take_state(replica, point, lane, "127.0.0.1", HOST)
        kept = () if replica.kept is None else replica.kept.micro_batches
        count = len(fleet.span(point.step, point.position).micro_batches)
        return point, behind, find_keepers(lane, kept, count)

    with gloo_members(len(steps)) as members:
        return together(partial(find, member) for member in members)


def test_everyone_hears_where_everyone_stands() -> None:
    said = [MemberStatus(7, 0, 2, -1, 0, 1.5, 8.0), MemberStatus(8, 1, 3, 12, 1, 0.1 + 0.2, 0.0)]
    with gloo_members(2) as members:
        heard = together(partial(gather_statuses, Lane(m), said[m.rank]) for m in members)
    assert heard == [said, said]


def test_every_micro_batch_has_one_keeper_or_none() -> None:
    kept = [(0, 3), (), (4,)]
    with gloo_members(3) as members:
        found = together(partial(find_keepers, Lane(m), kept[m.rank], 6) for m in members)
    assert found == [[0, -1, -1, 0, 2, -1]] * 3


def test_who_may_follow_does_where_nobody_else_is_behind() -> None:
    ahead, new = MemberStatus(5), MemberStatus(0, 0)
    point = find_resume_point([ahead, new, ahead], may_follow=[1])
    assert (point.holders, point.takers, point.followers) == ((0, 2), (), (1,))
    point = find_resume_point([ahead, new, MemberStatus(4)], may_follow=[1])
    assert (point.holders, point.takers, point.followers) == ((0,), (1, 2), ())
    point = find_resume_point([ahead, MemberStatus(0, 0, follows=0)], may_follow=[1])
    assert (point.takers, point.followers) == ((1,), ())


def test_what_nobody_has_is_dealt_by_shares() -> None:
    assert adopt((0, -1, -1, -1, -1, 1), (3, 1)) == ((1, 2, 3), (4,))
    assert adopt((0, 1), (3, 1)) == ((), ())
    assert adopt((-1, -1, -1), (0, 2)) == ((), (0, 1, 2))


def test_a_loss_that_one_knows_is_everyones() -> None:
    knows = MemberStatus(3, 1, 0, -1, 1, 0.25, 0.0)
    owes = MemberStatus(3, 1, 0, -1, 0, 6.0, 2.0)
    assert mean_loss([owes, knows]) == 0.25
    assert mean_loss([owes, MemberStatus(3, 1, 0, -1, 0, 2.0, 2.0)]) == 2.0
    assert mean_loss([MemberStatus(0)]) != mean_loss(
        [MemberStatus(0)]
    )  # not a number: there is none


def test_who_is_a_step_behind_takes_the_state_of_who_is_not() -> None:
    """Members 1 and 2 have committed step 2, member 0 has computed it and not heard the end."""
    fleet = Fleet(job(), NetTask(norm=True), SHARES)
    for step in range(2):
        fleet.step(step)
    before = fleet.position
    works = fleet.compute(2)
    for replica, work in list(zip(fleet.replicas, works, strict=True))[1:]:
        collect(replica, 2, never)
        commit(replica, work)
    after = fleet.steps.after(works[0].span)
    assert difference(fleet.replicas[0].model, fleet.replicas[1].model) > 0
    found = resume_points(fleet, [2, 3, 3], [before, after, after])
    assert [behind for _, behind, _ in found] == [True, False, False]
    assert {(point.step, point.position) for point, *_ in found} == {(3, after)}
    ahead = fleet.replicas[1].state
    for replica in fleet.replicas:
        assert replica.kept is None
        assert replica.learning_rate == fleet.replicas[1].learning_rate
        tensors = replica.state.tensors()
        assert tensors.keys() == ahead.tensors().keys()
        assert all(torch.equal(t, ahead.tensors()[name]) for name, t in tensors.items())
    undisturbed = Fleet(job(), NetTask(norm=True), SHARES)
    for step in range(5):
        undisturbed.step(step)
    fleet.position = after
    fleet.join(fleet.replicas, SHARES)
    fleet.step(3)
    fleet.step(4)
    for replica in fleet.replicas:
        assert difference(replica.model, undisturbed.replicas[0].model) <= 1e-12


@pytest.mark.parametrize("said", [0, 3, 9])
def test_who_has_never_computed_takes_the_state_too(said: int) -> None:
    """Its optimizer knows of no step yet, whatever step it says that it starts from."""
    fleet = Fleet(job(), NetTask(), (4, 4))
    for step in range(3):
        fleet.step(step)
    at = fleet.position
    newcomer = Replica(job(), NetTask(), device=CPU, steps=50, clock=SystemClock())
    fleet.join([*fleet.replicas, newcomer], SHARES)
    found = resume_points(fleet, [3, 3, said], [at, at, Position()], (1, 1, 0))
    assert [behind for _, behind, _ in found] == [False, False, True]
    assert {point.position for point, *_ in found} == {at}
    assert fleet.step(3) > 0
    assert difference(newcomer.model, fleet.replicas[0].model) == 0


def test_buffers_that_were_taken_do_not_count_as_changed() -> None:
    task = BuiltTask(Counting)
    fleet = Fleet(job(), task, (4, 4))
    fleet.step(0)
    at = fleet.position
    newcomer = Replica(job(), task, device=CPU, steps=50, clock=SystemClock())
    newcomer.try_out(fleet.collate.one(fleet.span(0, Position()).micro_batches[0]))
    fleet.join([*fleet.replicas, newcomer], SHARES)
    found = resume_points(fleet, [1, 1, 0], [at, at, Position()], (1, 1, 0))
    assert found[2][1]
    fleet.step(1)
    assert difference(newcomer.model, fleet.replicas[0].model) == 0


def test_where_nobody_has_computed_all_stay_where_they_are() -> None:
    fleet = Fleet(job(), NetTask(), SHARES)
    found = resume_points(fleet, [0, 0, 0], [Position()] * 3, (0, 0, 0))
    assert {(point.step, behind) for point, behind, _ in found} == {(0, False)}


@pytest.mark.parametrize("unlike", [False, True])
def test_who_begins_from_other_parameters_takes_those_of_rank_0(unlike: bool) -> None:
    fleet = Fleet(job(), NetTask(norm=True), SHARES)
    if unlike:
        with torch.no_grad():
            next(fleet.replicas[2].model.parameters()).add_(1.0)
    first = {name: t.clone() for name, t in fleet.replicas[0].state.tensors().items()}
    with gloo_members(3) as members:
        alike = together(partial(align, fleet.replicas[m.rank], Lane(m)) for m in members)
    assert alike == [not unlike] * 3
    for replica in fleet.replicas:
        tensors = replica.state.tensors()
        assert tensors.keys() == first.keys()
        assert all(torch.equal(t, first[name]) for name, t in tensors.items())


def test_what_is_kept_is_not_computed_again() -> None:
    fleet = Fleet(job(), NetTask(), SHARES)
    fleet.step(0)
    fleet.compute(1, ranks=[0, 2])
    at = fleet.position
    found = resume_points(fleet, [1, 1, 1], [at, at, at])
    assert {adopt(keepers, SHARES) for *_, keepers in found} == {((4,), (5,), ())}


@pytest.mark.parametrize(
    "ask",
    [
        lambda lane: gather_statuses(lane, MemberStatus(1)),
        lambda lane: find_keepers(lane, (), 4),
    ],
    ids=["statuses", "keepers"],
)
def test_a_meeting_that_is_given_up_ends(ask: Callable[..., Any]) -> None:
    with gloo_members(2) as (mine, theirs):
        with pytest.raises(Abandoned):
            ask(Lane(mine, lambda: True))
        assert ask(Lane(theirs))
