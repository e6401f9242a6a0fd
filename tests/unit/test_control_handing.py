"""Who joins takes the state at once where that is short, and follows the others where it is not."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.scaling import hand_over_at_once
from tests.control_events import committed, ready
from tests.control_job import on_and_tick, only, report
from tests.control_three import three
from tests.control_three import to as three_to
from tests.unit.test_control_growing import applied, formed, to, two
from tests.unit.test_control_restoring import all_lost, come, saved


def meeting(*paces, **settings):
    """What control has members 0 and 1 change to, whose last bytes took so long, for a third.

    A step takes a second.
    """
    job = two(**settings)
    to(job, 5)
    for member, (exchange_s, bytes_last) in enumerate(paces):
        word = committed(
            member,
            5,
            6,
            generation=0,
            at=job.position_at(6),
            computed=8,
            micro_batches=4,
            exchange_s=exchange_s,
            bytes_last=bytes_last,
        )
        job.on(word, 1.0)
    job.on(e.CapacityChanged(workers=3), 2.0)
    return job, only(c.Prepare, job.on(ready(2), 8.0))


@pytest.mark.parametrize(
    ("paces", "following"),
    [
        ([(0.16, 1), (0.5, 1)], ()),  # 3 bytes of state: the second one waited for the first
        ([(0.17, 1), (0.5, 1)], (2,)),
        ([(0.0, 0), (0.0, 0)], (2,)),  # nothing is known
    ],
)
def test_it_depends_on_how_long_all_would_wait(paces, following):
    _, prepare = meeting(*paces, hand_over_s=0.25)
    assert prepare.change.following == following
    assert prepare.change.shares == ((4, 4, 0) if following else (3, 3, 2))


def test_who_is_left_alone_goes_by_what_links_were_like_before():
    """It exchanges nothing; its newcomer would follow it for many of its steps."""
    job = two()
    to(job, 5)
    one = {"generation": 0, "at": job.position_at(6), "computed": 8, "micro_batches": 4}
    job.on(committed(0, 5, 6, **one), 1.0)
    job.on(committed(1, 5, 6, exchange_s=0.0, bytes_last=1, **one), 1.0)
    on_and_tick(job, e.MemberLost(member=1, reason="died"), 2.0)
    job.on(formed(job, 6), 3.0)
    job.on(report(job, 0, 6, 8), 4.0)
    assert only(c.Prepare, on_and_tick(job, ready(2), 8.0)).change.following == ()


def test_who_has_gone_back_goes_by_the_steps_of_before():
    """It has computed none yet since."""
    job = three(hand_over_s=0.7)
    three_to(job, 5)
    back = saved(job, 5)
    at = job.position_at(6)
    for member in job.group:
        one = {"at": at, "computed": 8, "micro_batches": 3, "exchange_s": 0.33, "bytes_last": 1}
        job.on(committed(member, 5, 6, generation=0, **one), 1.0)
    all_lost(job)
    job.on(back, 3.0)
    come(job, (3,))
    job.on(formed(job, 5), 5.5)
    assert only(c.Prepare, come(job, (4,), 6.0)).change.following == ()


@pytest.mark.parametrize(
    ("moment_s", "pace_s", "following"),
    [
        (0.7, 0.33, ()),  # 3 bytes, and in three steps it would compute for a second
        (0.7, 0.34, (2,)),
        (0.1, 0.06, ()),  # but twice a moment at most
        (0.1, 0.07, (2,)),
        (1.2, 0.39, ()),  # and a moment at least
        (1.2, 0.41, (2,)),
    ],
)
def test_all_wait_less_than_it_would_compute_in_three_steps(moment_s, pace_s, following):
    _, prepare = meeting((pace_s, 1), (0.5, 1), hand_over_s=moment_s)
    assert prepare.change.following == following


@pytest.mark.parametrize(("new", "short"), [(1, True), (2, True), (3, False)])
def test_it_goes_over_more_links_the_more_there_are_that_give_it(new, short):
    """Each newcomer has a link of its own; two that give three states are the bound."""
    job, _ = meeting((0.16, 1), (0.5, 1), hand_over_s=0.25)
    assert hand_over_at_once(job._state, new) is short


def test_who_takes_the_state_hand_over_at_once_computes_from_there_on():
    job, prepare = meeting((0.0, 1), (0.0, 1))
    applied(job, prepare, 7)
    job.on(formed(job, 7), 9.0)
    assert (job.group, job.shares) == ((0, 1, 2), (3, 3, 2))
    for member in job.group:
        first = 7 if member == 2 else 6
        job.on(report(job, member, first, 9, share=3), 10.0)
    assert job.committed_step == 9
    assert job.ledger.audit().exact
