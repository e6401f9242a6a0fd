"""What the exchange costs is told once, and what is lost with a member."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.control.exchange import ExchangeCost
from raycloud.events import Noticed, StepsCommitted
from tests.control_job import report
from tests.control_three import lost, three


def told(job, member, first, last, *, exchange_s, overlap_s=0.0, residual=0.0):
    """What a member says of steps that took a second each."""
    steps = last - first
    return replace(
        report(job, member, first, last, share=3),
        wall_s=1.0 * steps,
        exchange_s=exchange_s * steps,
        overlap_s=overlap_s * steps,
        residual=residual,
    )


def notices(job, waits, *, until=60, **more):
    """Of a run in which each member waits so long a step."""
    found = []
    for first in range(0, until, 10):
        for member, exchange_s in enumerate(waits):
            found += job.on(
                told(job, member, first, first + 10, exchange_s=exchange_s, **more), 1.0
            )
    return [one for one in found if isinstance(one, Noticed)]


def test_it_is_told_once_by_who_waits_least() -> None:
    [one] = notices(three(), (0.8, 0.5, 0.6), overlap_s=0.1)
    assert one.what == "the exchange of gradients takes 50% of a step"
    assert one.detail["step_s"] == 1.0
    [gain] = [value for name, value in one.detail.items() if "sync=auto" in name]
    assert gain == "about 0.5 s a step"  # 0.08 of exchange is hidden by 0.1 of computing


def test_rounds_are_foretold_where_they_would_be_made() -> None:
    [one] = notices(three(auto_period=16), (0.8, 0.8, 0.8))
    assert one.detail["with `--set sync=auto`"] == "about 0.21 s a step"  # 0.2 + 0.125 / 16
    [one] = notices(three(), (0.8, 0.8, 0.8))
    assert one.detail["with `--set sync=auto`"] == "about 0.32 s a step"


@pytest.mark.parametrize(
    ("settings", "waits", "until"),
    [
        ({}, (0.9, 0.9, 0.1), 60),  # two wait for the third
        ({}, (0.5, 0.5, 0.5), 20),  # too early to tell
        ({"exact": False}, (0.5, 0.5, 0.5), 60),
    ],
)
def test_else_nothing_is_said(settings, waits, until) -> None:
    assert notices(three(**settings), waits, until=until) == []


def test_what_is_lost_with_a_member_is_told() -> None:
    job = three(exact=False)
    assert notices(job, (0.1, 0.1, 0.1), until=20, residual=0.1234) == []
    [one] = [x for x in job.on(lost(1), 2.0) if isinstance(x, Noticed) and x.member == 1]
    assert "is lost with it" in one.what
    assert one.detail == {"norm": 0.123}


def test_one_worker_exchanges_nothing() -> None:
    cost = ExchangeCost(exact=True)
    job = three()
    for first in range(0, 60, 10):
        made: StepsCommitted = told(job, 0, first, first + 10, exchange_s=0.5)
        cost.observe(made)
    assert cost.notice((0,)) is None
