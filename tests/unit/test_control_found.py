"""What the simulation has found and is not mended yet: each test passes once it is."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.hearing import Heard
from tests.control_events import ready
from tests.control_job import only, tick
from tests.control_three import formed, lost, three, to


@pytest.mark.xfail(strict=True, reason="a newcomer is waited for form_s, however long steps take")
def test_who_is_to_join_waits_for_a_step_that_takes_minutes():
    """One is left of many: it computes whole batches, and a change waits for the step's end."""
    job = three()
    to(job, 5)
    for member in (1, 2):
        job.on(lost(member), 2.0)
    job.on(formed(job, 5), 3.0)
    assert job.group == (0,)
    spawned = only(c.Spawn, job.tick(4.0)).members
    for member in spawned:
        job.on(e.MemberSpawned(member=member), 4.0)
        job.on(ready(member), 10.0)
    everyone = (0, *spawned)
    lost_ones = []
    for now_s in range(11, 140):
        late_s = dict.fromkeys(everyone, 0.0)
        due_s = dict.fromkeys(everyone, now_s + 1.0)
        job.hear(Heard(looked_s=float(now_s), late_s=late_s, due_s=due_s))
        if now_s % 50 == 0:  # it may take this long
            job.on(e.EvaluationPart(member=0, step=5, states={}, generation=2), float(now_s))
        lost_ones += [x for x in tick(job, float(now_s)) if isinstance(x, c.Release)]
    assert not lost_ones
