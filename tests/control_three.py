"""A job of members 0, 1 and 2 under control, which may go on with fewer."""

from __future__ import annotations

from raycloud import commands as c
from raycloud import events as e
from raycloud.control import Phase
from raycloud.order.ledger_file import ledger_line
from tests.control_events import ready
from tests.control_job import control, of, report


def three(**settings):
    """A job of members 0, 1 and 2 in training, which may run with one."""
    job = control(**{"min_workers": 1, "max_workers": 3, "capacity": 3, **settings})
    job.start(0.0)
    for member in (0, 1, 2):
        job.on(ready(member), 0.0)
    job.on(formed(job, 0), 0.0)
    assert (job.phase, job.shares) == (Phase.TRAINING, (3, 3, 2))
    return job


def formed(job, step):
    return e.GenerationFormed(
        generation=job.generation, members=job.group, shares=job.shares, first_step=step
    )


def lost(member, reason="its process died"):
    return e.MemberLost(member=member, reason=reason)


def to(job, step, members=(0, 1, 2), first=0):
    """These members report the steps up to `step`; all commands."""
    return [x for m in members for x in job.on(report(job, m, first, step, share=3), 1.0)]


def kept_ledger():
    """The lines of a ledger of 100 samples, and what adds to them what commands record."""
    lines = ['{"format":3,"kind":"ledger","samples":100}\n']

    def keep(commands):
        lines.extend(ledger_line(r) for x in of(c.Record, commands) for r in x.records)

    return lines, keep
