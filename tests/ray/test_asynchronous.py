"""Workers that exchange updates by servers, each when it is ready: deaths, resumes, joining."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import raycloud
from raycloud.events import MemberLost, Recovered
from tests.live import apart, asked, exact_steps, of_kind, processes_below
from tests.live_tasks import Steady
from tests.lockstep import plain_loop
from tests.ray.test_regroup import Trouble, kill
from tests.tiers import variants

CPUS = 4
NEAR = 0.8  # of weights of about one: it is another algorithm

pytestmark = pytest.mark.usefixtures("warm")


def served(workers: int | list[int], steps: int, codec: str = "none", **more: Any) -> raycloud.Job:
    sync = {"topology": "servers", "staleness": more.pop("staleness", "auto"), "codec": codec}
    sync |= {"period": more.pop("period", 1), "warm_steps": more.pop("warm_steps", "auto")}
    settings = {"double": False, **more.pop("settings", {})}
    return asked("Steady", workers, steps=steps, sync=sync, servers=2, settings=settings, **more)


def kill_server(folder: Path) -> None:
    found = [pid for pid, line in processes_below(folder).items() if "ServerActor" in line]
    os.kill(found[0], signal.SIGKILL)


@pytest.mark.full
def test_one_worker_does_what_one_process_does(tmp_path: Path) -> None:
    """All that servers add to its own updates is rounding."""
    job = served(1, 40, period=2)
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert exact_steps(run.directory) == 40
    assert apart(run.directory, plain_loop(job, Steady(double=False), 40)) <= 1e-5


@pytest.mark.parametrize(
    ("codec", "staleness"),
    variants(("int4", 1), ("none", "unbounded")),
)
def test_a_killed_worker_counts_once(
    codec: str, staleness: Any, tmp_path: Path, ray_tmpdir: Path
) -> None:
    elastic = {"min_workers": 1, "max_workers": 3}
    also = {"elastic": elastic, "checkpoint": {"every_steps": 50}}
    job = served(3, 300, codec, staleness=staleness, **also)
    trouble = Trouble(ray_tmpdir, [60], kill)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    assert run.status == "finished"
    assert exact_steps(run.directory) == 300
    assert apart(run.directory, plain_loop(job, Steady(double=False), 300)) <= NEAR
    [lost], [told, *_] = of_kind(MemberLost, run.events), of_kind(Recovered, run.events)
    assert (told.lost, told.lost_steps) == ((lost.member,), 0)


@pytest.mark.full
def test_a_worker_that_is_killed_before_the_first_round_counts_once(
    tmp_path: Path, ray_tmpdir: Path
) -> None:
    """Steps that come before it are exchanged by all, and what the others have of them is kept."""
    elastic = {"min_workers": 1, "max_workers": 3}
    job = served(3, 100, elastic=elastic, warm_steps=100)
    trouble = Trouble(ray_tmpdir, [20], kill)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    assert len(of_kind(MemberLost, run.events)) == 1
    assert exact_steps(run.directory) == 100
    assert apart(run.directory, plain_loop(job, Steady(double=False), 100)) <= 1e-5


def test_a_killed_server_costs_a_round(tmp_path: Path, ray_tmpdir: Path) -> None:
    """Nobody goes back to a checkpoint: members have what the round began with."""
    job = served([5, 3], 200, checkpoint={"every_steps": None})
    trouble = Trouble(ray_tmpdir, [60], lambda *_: kill_server(ray_tmpdir))
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    assert run.status == "finished"
    assert exact_steps(run.directory) == 200
    assert apart(run.directory, plain_loop(job, Steady(double=False), 200)) <= NEAR
    assert not of_kind(MemberLost, run.events)


@pytest.mark.full
def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    job = served([5, 3], 60, "int8", checkpoint={"every_steps": 24, "keep": 9})
    first = job.model_copy(update={"steps": 48})
    raycloud.train(first, run_dir=tmp_path / "run")
    run = raycloud.train(job, run_dir=tmp_path / "run", resume=True)
    assert run.status == "finished"
    assert apart(run.directory, plain_loop(job, Steady(double=False), 60)) <= NEAR
