"""Backups within a step: whatever speeds and shares, they help or change nothing for the worse."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raycloud.planner.shares import step_seconds
from raycloud.planner.speed import Speed
from raycloud.simulate.backups import backed_up
from raycloud.step.speculation import ring

WORKER = st.tuples(st.sampled_from([0.5, 1.0, 1.5, 2.0, 5.0]), st.integers(0, 12))


@given(st.lists(WORKER, min_size=2, max_size=6), st.integers(0, 12))
def test_a_step_with_backups(workers: list[tuple[float, int]], most: int) -> None:
    speeds = [Speed(fixed_s=0.0, micro_batch_s=seconds) for seconds, _ in workers]
    shares = [share for _, share in workers]
    alone_s = step_seconds(speeds, shares)
    found = backed_up(speeds, shares, ring((), len(workers)), most=most)
    assert found == backed_up(speeds, shares, ring((), len(workers)), most=most)
    work = sum(shares) / sum(1.0 / speed.micro_batch_s for speed in speeds)
    assert found.seconds >= work - 1e-9  # nothing is computed for nothing
    slowest = max(speed.micro_batch_s for speed in speeds)
    assert found.seconds <= alone_s + slowest  # a backup that came too late is waited for
    assert found.elsewhere <= sum(min(most, share) for share in shares)
    if most == 0:
        assert (found.seconds, found.elsewhere) == (alone_s, 0)
