"""What being elastic costs, without running a contestant."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contestants import Attempt
from benchmarks.idle_cost import CONTESTANTS, elastic_job, ratio_of, told
from raycloud.spec import Job


def row(contestant: str, repeat: int, cost_s: float) -> dict[str, object]:
    return {"contestant": contestant, "repeat": repeat, "cpu_s_per_sample": cost_s}


def test_only_repeats_in_which_both_ran_count() -> None:
    rows = [row("fixed", 0, 2.0), row("elastic", 0, 2.1), row("elastic", 1, 9.0)]
    ratio = ratio_of(rows)
    assert (ratio.count, ratio.mean) == (1, pytest.approx(1.05))
    assert told(ratio).endswith("not held")
    threads = [{**one, "cpu_over_computing": 1.01} for one in rows]
    assert ratio_of(threads, "cpu_over_computing").mean == pytest.approx(1.0)


def test_the_job_is_elastic_and_keeps_no_checkpoint_before_its_end(tmp_path: Path) -> None:
    job = Job(**elastic_job(Attempt(directory=tmp_path, steps=30)))
    assert job.elastic.min_workers < job.elastic.max_workers
    assert (job.elastic.shares, job.checkpoint.every_steps) == ("auto", 30)
    assert set(CONTESTANTS) == {"elastic", "fixed"}
