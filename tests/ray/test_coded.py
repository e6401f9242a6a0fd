"""Gradients that travel through a codec: deaths, resumes and resizes of real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raycloud
from raycloud.checkpoint import load, open_store
from raycloud.checkpoint.payload import load_tensors
from raycloud.events import MemberLost, Recovered
from tests.live import apart, asked, exact_steps, of_kind
from tests.live_tasks import Steady
from tests.lockstep import plain_loop
from tests.ray.test_regroup import Trouble, kill

CPUS = 4
NEAR = 0.3

pytestmark = pytest.mark.usefixtures("warm")


def coded(workers: int | list[int], steps: int, **more: Any) -> raycloud.Job:
    sync = {"codec": "int4", "bucket_bytes": 1024}
    return asked("Steady", workers, steps=steps, sync=sync, settings={"double": False}, **more)


def test_a_killed_worker_is_not_missed(tmp_path: Path, ray_tmpdir: Path) -> None:
    elastic = {"min_workers": 1, "max_workers": 3}
    job = coded(3, 300, elastic=elastic, checkpoint={"every_steps": 50})
    trouble = Trouble(ray_tmpdir, [60], kill)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    assert run.status == "finished"
    assert exact_steps(run.directory) == 300
    assert apart(run.directory, plain_loop(job, Steady(double=False), 300)) <= NEAR
    [lost], [told] = of_kind(MemberLost, run.events), of_kind(Recovered, run.events)
    assert (told.lost, told.lost_steps) == ((lost.member,), 0)
    assert run.summary["bytes_sent"] < run.summary["bytes_dense"] / 2


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path) -> None:
    """Bit for bit: a checkpoint has what each worker keeps for the next step."""
    job = coded([5, 3], 20, checkpoint={"every_steps": 8, "keep": 9})
    raycloud.train(job, run_dir=tmp_path / "plain")
    first = job.model_copy(update={"steps": 8})
    raycloud.train(first, run_dir=tmp_path / "resumed")
    raycloud.train(job, run_dir=tmp_path / "resumed", resume=True)
    store = [open_store(str(tmp_path / name / "checkpoints")) for name in ("plain", "resumed")]
    a, b = (load_tensors(one, load(one, 20)) for one in store)
    assert {name for name in a if name.startswith("residual/")} == {
        "residual/flat/0",
        "residual/flat/1",
    }
    assert a.keys() == b.keys()
    assert all(bool((a[name] == b[name]).all()) for name in a)
