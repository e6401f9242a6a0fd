"""A worker whose computing thread stands still behind a process that answers."""

from __future__ import annotations

from pathlib import Path

import pytest

import raycloud
from raycloud.events import MemberLost, Recovered
from tests.live import asked, check_result, of_kind
from tests.live_tasks import Steady

CPUS = 4

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.full(only="a thread stuck in C is done without")
def test_a_thread_that_is_stuck_is_done_without(tmp_path: Path) -> None:
    job = asked(
        "Stuck",
        2,
        steps=200,
        elastic={"min_workers": 1, "max_workers": 2},
        settings={"claimed": str(tmp_path / "stuck"), "after": 50},
    )
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert (tmp_path / "stuck").exists()
    check_result(run, job, Steady(), 200)
    [lost] = of_kind(MemberLost, run.events)
    assert "stands still" in lost.reason
    [told] = of_kind(Recovered, run.events)
    assert (told.lost, told.lost_steps) == ((lost.member,), 0)
