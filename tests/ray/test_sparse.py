"""Sparse gradients of real runs: the single-process result, whoever is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

import raycloud
from raycloud.events import MemberLost
from tests.live import asked, check_result, of_kind
from tests.live_tasks import Sparse
from tests.ray.test_regroup import Trouble, kill

CPUS = 4

pytestmark = [
    pytest.mark.usefixtures("warm"),
    # torch's own optimizers make sparse tensors without saying whether these are to be checked.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),
]


@pytest.mark.full
def test_the_single_process_result(tmp_path: Path) -> None:
    job = asked("Sparse", [5, 2, 1], clip_norm=None)
    check_result(raycloud.train(job, run_dir=tmp_path / "run"), job, Sparse(), 50)


def test_a_killed_worker_counts_once(tmp_path: Path, ray_tmpdir: Path) -> None:
    """Its place is taken by one that takes the state while all wait."""
    elastic = {"min_workers": 1, "max_workers": 3}
    job = asked("Sparse", 3, steps=300, clip_norm=None, elastic=elastic)
    trouble = Trouble(ray_tmpdir, [40], kill)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    assert len(of_kind(MemberLost, run.events)) == 1
    check_result(run, job, Sparse(), 300)
