"""Shares follow measured speed while a run goes on, and what is computed stays the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import raycloud
from raycloud.events import ChangeApplied, GenerationFormed, StepsCommitted
from tests.live import asked, check_result, of_kind
from tests.live_tasks import Steady

CPUS = 4
STEPS = 1000  # long enough for a second look at the speeds, also where steps are quick


@pytest.mark.full(only="a slow process gets less work")
@pytest.mark.usefixtures("warm")
def test_slow_member_gets_less_work_in_the_same_steps(tmp_path: Path) -> None:
    """One of two members needs many times as long for a micro-batch from about step 10 on."""
    settings = {"claimed": str(tmp_path / "slow"), "after": 40}
    job = asked("Slowed", 2, steps=STEPS, settings=settings, checkpoint={"every_steps": 100})
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert (tmp_path / "slow").exists()
    log = run.events

    formed = of_kind(GenerationFormed, log)
    first, changed = formed[0], formed[1:]
    assert changed, "the shares never changed"
    assert [f.generation for f in formed] == list(range(len(formed)))
    assert {f.members for f in formed} == {first.members}
    assert all(sum(f.shares) == 8 for f in formed)
    assert all(a.first_step < b.first_step <= STEPS for a, b in pairwise(formed))
    assert max(changed[-1].shares) >= 7, formed  # at 20 times the time per micro-batch
    assert (run.summary["shares"], run.summary["generations"]) == (
        list(formed[-1].shares),
        len(formed),
    )

    applied = {(e.change, e.step) for e in of_kind(ChangeApplied, log)}
    assert applied == {(n, f.first_step) for n, f in enumerate(changed, start=1)}
    for member in first.members:  # nobody paused, lost a step or computed one twice
        steps = [e for e in of_kind(StepsCommitted, log) if e.member == member]
        assert (steps[0].first_step, steps[-1].last_step) == (0, STEPS)
        assert all(a.last_step == b.first_step for a, b in pairwise(steps))
        assert [e.generation for e in steps] == sorted(e.generation for e in steps)
    check_result(run, job, Steady(), STEPS)
