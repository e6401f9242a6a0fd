"""What the simulation has found and is not mended yet: each test passes once it is."""

from __future__ import annotations

import pytest

from raycloud import commands as c
from raycloud import events as e
from raycloud.control.hearing import Heard
from tests.control_events import ready
from tests.control_job import of, only, tick
from tests.control_three import formed, lost, three, to


@pytest.mark.xfail(strict=True, reason="a newcomer is waited for form_s, however long steps take")
def test_who_is_to_join_waits_for_a_step_that_takes_minutes():
    """One is left of many: it computes whole batches, and a change waits for the step's end."""
    job = three(silence_s=600.0)
    to(job, 5)
    for member in (1, 2):
        job.on(lost(member), 2.0)
    assert job.group == (0,)
    job.on(e.CapacityChanged(workers=2), 2.5)
    (newcomer,) = only(c.Spawn, [*job.on(formed(job, 5), 3.0), *job.tick(4.0)]).members
    job.on(e.MemberSpawned(member=newcomer), 4.0)
    meet = only(c.Prepare, job.on(ready(newcomer), 10.0)).change
    assert meet.members == (0, newcomer)
    given_up = []
    for now_s in map(float, range(11, 140)):
        late_s, due_s = dict.fromkeys(meet.members, 0.0), dict.fromkeys(meet.members, now_s + 1.0)
        job.hear(Heard(looked_s=now_s, late_s=late_s, due_s=due_s))
        given_up += of(c.Release, tick(job, now_s))
    assert not given_up
