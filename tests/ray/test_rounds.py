"""Rounds of real runs: deaths, resumes, and workers that join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raycloud
from raycloud.checkpoint import load, open_store
from raycloud.checkpoint.payload import load_tensors
from raycloud.events import MemberLost, Noticed, Predicted, Recovered
from tests.live import apart, asked, exact_steps, of_kind
from tests.live_tasks import Steady
from tests.lockstep import plain_loop
from tests.ray.test_regroup import Trouble, kill
from tests.tiers import variants

CPUS = 4
NEAR = 0.8  # of weights of about one: it is another algorithm

pytestmark = pytest.mark.usefixtures("warm")


def in_rounds(
    workers: int | list[int], steps: int, codec: str, stream: int = 1, **more: Any
) -> raycloud.Job:
    sync = {"period": 8, "outer": "nesterov", "warm_steps": 5, "codec": codec}
    sync |= {"bucket_bytes": 1024, "stream": stream}
    return asked("Steady", workers, steps=steps, sync=sync, settings={"double": False}, **more)


@pytest.mark.parametrize(
    ("codec", "stream"),
    variants(("int4", 1), ("int4", 4), ("topk", 1), fast=2),
)
def test_a_killed_worker_is_not_missed(
    codec: str, stream: int, tmp_path: Path, ray_tmpdir: Path
) -> None:
    """With fragments one is on its way almost always, and rounds have 32 steps."""
    elastic = {"min_workers": 1, "max_workers": 3}
    every = {"every_steps": 50}
    job = in_rounds(3, 300, codec, stream, elastic=elastic, checkpoint=every)
    trouble = Trouble(ray_tmpdir, [60], kill)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    assert run.status == "finished"
    assert exact_steps(run.directory) == 300
    assert apart(run.directory, plain_loop(job, Steady(double=False), 300)) <= NEAR
    [lost], [told] = of_kind(MemberLost, run.events), of_kind(Recovered, run.events)
    assert (told.lost, told.lost_steps) == ((lost.member,), 0)
    assert run.summary["bytes_sent"] < run.summary["bytes_dense"] / 4


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path) -> None:
    """Bit for bit: a checkpoint has the moments of each worker, and the outer momentum."""
    job = in_rounds([5, 3], 20, "int4", checkpoint={"every_steps": 12, "keep": 9})
    raycloud.train(job, run_dir=tmp_path / "plain")
    first = job.model_copy(update={"steps": 12})
    raycloud.train(first, run_dir=tmp_path / "resumed")
    raycloud.train(job, run_dir=tmp_path / "resumed", resume=True)
    store = [open_store(str(tmp_path / name / "checkpoints")) for name in ("plain", "resumed")]
    a, b = (load_tensors(one, load(one, 20)) for one in store)
    assert any(name.startswith("outer/momentum/") for name in a)
    assert {name[-1] for name in a if name.startswith("outer/inner/")} == {"0", "1"}
    assert a.keys() == b.keys()
    assert all(bool((a[name] == b[name]).all()) for name in a)


def test_where_members_choose_rounds_the_driver_predicts_them_at_once(tmp_path: Path) -> None:
    sync = {"period": "auto", "codec": "int4", "outer": "nesterov", "bucket_bytes": 1024}
    job = asked("Steady", 2, steps=120, sync=sync, settings={"double": False})
    events = raycloud.train(job, run_dir=tmp_path / "run").events
    at, chosen = next(
        (at, event)
        for at, event in enumerate(events)
        if isinstance(event, Noticed) and event.detail.get("period", 1) > 1
    )
    told = next(event for event in events[at:] if isinstance(event, Predicted))
    assert (told.generation, told.seen) == (chosen.detail["generation"], True)
    assert told.step >= chosen.detail["step"]
    assert told.step_s == pytest.approx(chosen.detail["computing_s"], rel=0.5)
