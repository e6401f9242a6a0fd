"""All workers are lost: others go on from the checkpoint, and the result is the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import raycloud
from raycloud.events import (
    CheckpointPublished,
    Event,
    MemberLost,
    MemberReady,
    MemberSpawned,
    Recovered,
    RolledBack,
    StepsCommitted,
)
from raycloud.spec import Job
from tests.live import asked, check_result, members_below, of_kind
from tests.live_tasks import Steady

CPUS = 4

pytestmark = pytest.mark.usefixtures("warm")


def job_of(folder: Path, steps: int, *, least: int = 1, **more: object) -> Job:
    """Two workers; steps take a while."""
    elastic = {"min_workers": least, "max_workers": 2}
    settings = {"gate": str(folder / "gate")}
    return asked("Paced", 2, steps=steps, elastic=elastic, settings=settings, **more)


class Killing:
    """Kills all workers as soon as an event is one of those waited for, in order.

    Args:
        folder: What the cluster's processes carry in their environment.
        when: Each says whether it is time.
        before: Called just before.
    """

    def __init__(
        self, folder: Path, *when: Callable[[Event], bool], before: Callable[[], None] | None = None
    ) -> None:
        self.folder, self.when, self.before = folder, list(when), before
        self.ready: set[int] = set()  # process ids; others are of no run at the moment

    def __call__(self, event: Event) -> None:
        if isinstance(event, MemberReady):
            self.ready.add(event.pid)
        if not self.when or not self.when[0](event):
            return
        self.when.pop(0)
        if self.before is not None:
            self.before()
        for pid in self.ready.intersection(members_below(self.folder)):
            os.kill(pid, signal.SIGKILL)


def published(step: int) -> Callable[[Event], bool]:
    return lambda event: isinstance(event, CheckpointPublished) and event.step == step


def committed(step: int) -> Callable[[Event], bool]:
    """Both workers have said so: what only one has does not count yet."""
    told: set[int] = set()

    def by_both(event: Event) -> bool:
        if isinstance(event, StepsCommitted) and event.last_step >= step:
            told.add(event.member)
        return len(told) == 2

    return by_both


def test_all_workers_are_killed_at_once_again_and_again(tmp_path: Path, ray_tmpdir: Path) -> None:
    job = job_of(tmp_path, 120, least=2, checkpoint={"every_steps": 20})
    kills = Killing(ray_tmpdir, committed(1), published(20), committed(45))

    def fast(event: Event) -> None:
        kills(event)
        if not kills.when and isinstance(event, Recovered):
            (tmp_path / "gate").touch()

    run = raycloud.train(job, run_dir=tmp_path / "run", observer=fast)
    assert not kills.when
    assert run.status == "finished"
    check_result(run, job, Steady(), 120)
    log = run.events
    assert [e.step for e in of_kind(RolledBack, log)] == [0, 20, 40]
    told = of_kind(Recovered, log)
    assert [len(e.lost) for e in told] == [2, 2, 2]
    assert all(e.lost_steps > 0 for e in told[::2])
    assert len(of_kind(MemberLost, log)) == 6
    recoveries = run.summary["recoveries"]
    assert [r["kind"] for r in recoveries] == ["member lost"] * 6
    assert recoveries[-1]["lost_steps"] == told[-1].lost_steps
    assert run.summary["steps"] == 120
    assert run.summary["goodput"]["lost_s"] > 0.0


@pytest.mark.full
def test_workers_are_killed_one_after_the_other(tmp_path: Path) -> None:
    """Those that were asked for in their places are there, or on their way."""
    job = job_of(tmp_path, 100, checkpoint={"every_steps": 20})
    kills = [committed(25), lambda event: isinstance(event, MemberSpawned) and event.member > 1]
    first: dict[int, int] = {}

    def one_by_one(event: Event) -> None:
        if isinstance(event, MemberReady) and event.member < 2:
            first[event.member] = event.pid
        if kills and kills[0](event):
            kills.pop(0)
            os.kill(first.popitem()[1], signal.SIGKILL)
        if not kills and isinstance(event, Recovered) and event.lost_steps:
            (tmp_path / "gate").touch()

    run = raycloud.train(job, run_dir=tmp_path / "run", observer=one_by_one)
    check_result(run, job, Steady(), 100)
    [back] = of_kind(RolledBack, run.events)
    assert back.step >= 20
    assert {e.member for e in of_kind(MemberLost, run.events)} >= {0, 1}
    assert {e.member for e in of_kind(StepsCommitted, run.events)} - {0, 1}
