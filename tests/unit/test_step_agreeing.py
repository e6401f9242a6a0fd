"""When a change is in force that comes while a late member computes: real members, real sockets."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raycloud.commands import Form, Reshare
from raycloud.events import ChangeApplied, MemberDone
from raycloud.step import straggler
from raycloud.step.collate import Collate, StepWork
from raycloud.step.replica import Replica
from raycloud.step.straggler import Straggling
from raycloud.worker import loop
from tests.fellows import WAIT_S, Fellows
from tests.live_tasks import Steady
from tests.lockstep import difference, job, plain_loop

LATE = 3  # the step in which member 1 is held up
STEPS = 8


def until(what: Callable[[], bool]) -> None:
    end, pause = time.monotonic() + WAIT_S, threading.Event()
    while not what():
        assert time.monotonic() < end
        pause.wait(0.005)


@pytest.mark.parametrize(
    ("tells", "holders"), [(True, (0, 1)), (False, (0, 1)), (True, ()), (True, (0,)), (True, (1,))]
)
def test_what_comes_of_a_late_share_is_in_force_once_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: bool, holders: tuple[int, ...]
) -> None:
    """Who was done long before has sent its gradients by then, and had no change at hand.

    Where not all hold it by the end of the late share, none changes to it: neither then nor later.
    """
    reached, opened, compute = threading.Event(), threading.Event(), loop.compute

    def held_up(replica: Replica, work: StepWork, collate: Collate) -> StepWork:
        if work.span.step == LATE and replica is fellows.replica(1):
            reached.set()
            assert opened.wait(WAIT_S)
        return compute(replica, work, collate)

    monkeypatch.setattr(loop, "compute", held_up)
    monkeypatch.setattr(straggler, "_LONG_S", 0.0 if tells else math.inf)
    monkeypatch.setattr(straggler, "_FAR", 0.0)
    asked = job(task=Steady, steps=STEPS, settings={"dropout": 0.0, "norm": True})
    fellows = Fellows(tmp_path, asked, count=2, joining=0, task=Steady)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    assert reached.wait(WAIT_S)
    fellows.come_to(0, LATE)
    sent = fellows.replica(0).gradients
    until(lambda: sent.under_way and sent._next == len(sent.buckets))
    assert [type(one) for one in fellows.members[1].stalls()] == ([Straggling] if tells else [])
    fellows.prepare(1, Reshare(generation=1, shares=(6, 2)), holders)
    opened.set()
    fellows.until(MemberDone, (0, 1))
    # unless it has told that it was late, all say with the next gradients that they hold it
    in_force = LATE + 1 if tells else LATE + 2
    assert [one.step for one in fellows.of(ChangeApplied)] == [in_force] * 2 * (holders == (0, 1))
    reference = plain_loop(asked, Steady(dropout=0.0, norm=True), STEPS)
    assert all(difference(fellows.replica(one).model, reference) < 1e-9 for one in (0, 1))
