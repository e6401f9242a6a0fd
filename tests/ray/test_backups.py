"""A late worker's last micro-batches are computed by another one, on a real Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

import raycloud
from raycloud.events import StepsCommitted
from tests.live import asked, check_result, exact_steps, of_kind
from tests.live_tasks import Steady

CPUS = 4
STEPS = 60


@pytest.mark.full
@pytest.mark.usefixtures("warm")
def test_the_result_is_the_same_and_each_sample_counts_once(tmp_path: Path) -> None:
    """One of two workers needs many times as long for a micro-batch from about step 10 on."""
    settings = {"claimed": str(tmp_path / "late"), "after": 40}
    shares = {"shares": [4, 4], "min_workers": 2, "max_workers": 2}
    elastic = {**shares, "backup_micro_batches": 3}
    job = asked("Late", 2, steps=STEPS, settings=settings, elastic=elastic)
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert (tmp_path / "late").exists()
    steps = of_kind(StepsCommitted, run.events)
    counted = [sum(e.micro_batches for e in steps if e.member == m) for m in (0, 1)]
    assert exact_steps(run.directory) == STEPS
    assert min(counted) < 0.8 * max(counted)
    check_result(run, job, Steady(), STEPS)
