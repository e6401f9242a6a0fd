"""A driver that is killed comes back, and goes on with the workers that have outlived it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycloud.events import (
    CheckpointPublished,
    GenerationFormed,
    MemberLost,
    MemberReturned,
    Noticed,
    Recovered,
    RunStarted,
)
from raycloud.spec import Job
from tests import live_data
from tests.drivers import (
    Left,
    actors,
    check_words,
    driver,
    joined,
    pools,
    saved,
    starts,
    step,
    tell,
    went_on,
)
from tests.heads import START_S, Head
from tests.live import (
    RAYCLOUD,
    asked,
    check_result,
    ended,
    events,
    exact_steps,
    members_below,
    of_kind,
    ran,
    wait_for,
)
from tests.live_tasks import Paced
from tests.logs import read_summary

STEPS = 500
BACK_S = 12.0  # from the command to the next commit
ORPHAN_S = 10
CPUS = 4.0

pytestmark = pytest.mark.timeout(560)


@pytest.fixture(scope="module")
def left(head: Head) -> Iterator[Left]:
    """Asks the cluster for what is left there."""
    one = Left(head)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def empty(head: Head, left: Left) -> Iterator[None]:
    """What a test has left, whatever became of it, is nobody's trouble but its own."""
    yield
    ended(dict.fromkeys(pools(head), "a pool"), seconds=0)
    wait_for("an empty cluster", lambda: left() == (0, [], CPUS))


def test_killed_driver_takes_its_workers_over(head: Head, left: Left, tmp_path: Path) -> None:
    job, run_dir = _job(tmp_path), tmp_path / "run"
    with driver(head, tmp_path / "first", run_dir, job) as one:
        wait_for("steps", lambda: step(one, run_dir) >= 5, seconds=START_S)
        members = members_below(head.folder)
        assert len(members) == 2
        one.process.kill()
        one.code()
    began_s = time.monotonic()
    with driver(head, tmp_path / "second", run_dir) as one:
        wait_for("the next commit", lambda: went_on(one, run_dir), seconds=START_S)
        tell("seconds to the next commit, as seen from outside", time.monotonic() - began_s)
        assert members_below(head.folder) == members
        (tmp_path / "gate").touch()
        assert one.code() == 0, one.err
        assert "going on with 2 workers that outlived their driver" in one.err
    check_result(run_dir, job, Paced(), STEPS)
    check_words(run_dir)
    log = events(run_dir)
    assert [s.taken_over for s in of_kind(RunStarted, log)] == [(), (0, 1)]
    assert [s.resumed_from_step for s in of_kind(RunStarted, log)] == [None, None]
    (recovered,) = of_kind(Recovered, log)
    seconds = recovered.resumed_s - recovered.detected_s
    tell("seconds to the next commit, as the log has them", seconds)
    assert (recovered.lost, recovered.lost_steps, recovered.cause) == ((), 0, "the driver was gone")
    assert seconds <= BACK_S
    assert [e.step for e in of_kind(CheckpointPublished, log)] == [STEPS]  # none was restored
    summary = read_summary(run_dir / "summary.json")
    assert (summary.status, summary.steps, summary.sessions) == ("finished", STEPS, 2)
    (taken,) = summary.recoveries
    assert (taken["kind"], taken["seconds"], taken["lost_steps"]) == ("taken over", seconds, 0)
    code, audited = ran(tmp_path / "audit", RAYCLOUD, "audit", run_dir)
    assert code == 0, audited.out
    assert left() == (0, [], CPUS)


@pytest.mark.full(only="a driver that is killed while it takes over is taken over, too")
def test_killed_again_while_it_takes_over(head: Head, tmp_path: Path) -> None:
    """With a worker that was silent for a while, and after another driver was refused."""
    settings = {"gate": str(tmp_path / "gate"), "pause_s": 0.06}  # three drivers start meanwhile
    changes = {"elastic": {"max_workers": 2}, "checkpoint": {"every_steps": 10}}
    job, run_dir = _job(tmp_path, settings=settings, **changes), tmp_path / "run"
    with driver(head, tmp_path / "first", run_dir, job) as one:
        wait_for("a checkpoint", lambda: saved(one, run_dir), seconds=START_S)
        members = members_below(head.folder)
        os.kill(members[1], signal.SIGSTOP)
        wait_for("its loss", lambda: of_kind(MemberLost, events(run_dir)))
        os.kill(members[1], signal.SIGCONT)
        wait_for("its return", lambda: joined(one, run_dir), seconds=START_S)
        wait_for("no other", lambda: members_below(head.folder) == members)
        with driver(head, tmp_path / "other", run_dir) as other:
            assert other.code() == 2
            assert "another process is writing the run" in other.err
        now = step(one, run_dir)
        wait_for("more steps", lambda: step(one, run_dir) > now)
        one.process.kill()
        one.code()
    for number in (1, 2):
        with driver(head, tmp_path / f"again-{number}", run_dir) as one:
            wait_for("a start", lambda: len(starts(run_dir)) > number or one.ended())  # noqa: B023
            assert not one.ended(), one.err
            assert members_below(head.folder) == members
            one.process.kill()
            one.code()
    (tmp_path / "gate").touch()
    with driver(head, tmp_path / "last", run_dir) as one:
        assert one.code() == 0, one.err
    check_result(run_dir, job, Paced(), STEPS)
    check_words(run_dir)
    log = events(run_dir)
    (lost,), (back,) = of_kind(MemberLost, log), of_kind(MemberReturned, log)
    assert lost.member == back.member
    none, there, *again = (start.taken_over for start in starts(run_dir))
    assert (none, again) == ((), [there, there])
    assert len(there) == len(members) == 2
    assert {*there} & {0, 1} == {0, 1} - {lost.member}
    assert of_kind(GenerationFormed, log)[-1].members == there


@pytest.mark.full(only="a worker lost while no driver was there is replaced")
def test_worker_that_was_lost_meanwhile_is_replaced(head: Head, tmp_path: Path) -> None:
    job, run_dir = _job(tmp_path, elastic={"max_workers": 2}), tmp_path / "run"
    with driver(head, tmp_path / "first", run_dir, job) as one:
        wait_for("steps", lambda: step(one, run_dir) >= 5, seconds=START_S)
        members = members_below(head.folder)
        one.process.kill()
        one.code()
    ended({members[0]: "a member"}, seconds=0)
    with driver(head, tmp_path / "second", run_dir) as one:
        wait_for("another one", lambda: joined(one, run_dir), seconds=START_S)
        assert members[1] in members_below(head.folder)
        (tmp_path / "gate").touch()
        assert one.code() == 0, one.err
    check_result(run_dir, job, Paced(), STEPS)
    check_words(run_dir)
    log = events(run_dir)
    assert [e.reason for e in of_kind(MemberLost, log)] == ["it did not outlive its driver"]
    (started,) = [start for start in starts(run_dir) if start.taken_over]
    (recovered,) = of_kind(Recovered, log)
    assert (len(started.taken_over), len(recovered.lost)) == (1, 1)


@pytest.mark.full(only="the pipeline outlives the driver")
def test_what_prepares_the_data_outlives_the_driver_too(
    head: Head, left: Left, tmp_path: Path
) -> None:
    live_data.written(tmp_path / "data")
    job = live_data.asked(
        tmp_path, 2, task=f"{live_data.TASKS}:PacedPoints", steps=STEPS,
        settings={"gate": str(tmp_path / "gate")}, data={"collators": 1},
        checkpoint={"every_steps": 10 * STEPS},
    )  # fmt: skip
    run_dir = tmp_path / "run"
    with driver(head, tmp_path / "first", run_dir, job) as one:
        wait_for("steps", lambda: step(one, run_dir) >= 5, seconds=START_S)
        there = actors(head)
        assert len(there) == 5  # with the pool
        one.process.kill()
        one.code()
    with driver(head, tmp_path / "second", run_dir) as one:
        wait_for("the next commit", lambda: went_on(one, run_dir), seconds=START_S)
        assert actors(head) == there
        (tmp_path / "gate").touch()
        assert one.code() == 0, one.err
    assert exact_steps(run_dir) == STEPS
    check_words(run_dir)
    told = [one.what for one in of_kind(Noticed, events(run_dir))]
    busy = ("exchange of gradients", "shares follow")  # on a busy machine
    assert [what for what in told if not any(text in what for text in busy)] == []
    assert left() == (0, [], CPUS)


@pytest.mark.full(only="workers end where no driver comes back")
def test_nobody_comes_back_and_the_workers_end(head: Head, left: Left, tmp_path: Path) -> None:
    elastic = {"min_workers": 2, "max_workers": 2, "shares": [5, 3], "orphan_s": ORPHAN_S}
    job = _job(tmp_path, elastic=elastic, checkpoint={"every_steps": 10})
    run_dir = tmp_path / "run"
    with driver(head, tmp_path / "first", run_dir, job) as one:
        wait_for("a checkpoint", lambda: saved(one, run_dir), seconds=START_S)
        one.process.kill()
        one.code()
    killed_s = time.monotonic()
    assert left()[2] == CPUS - 2
    wait_for("their end", lambda: not members_below(head.folder))
    seconds = time.monotonic() - killed_s
    tell("seconds until the workers had ended", seconds)
    assert ORPHAN_S - 5 <= seconds <= ORPHAN_S + 20
    wait_for("an empty cluster", lambda: left() == (0, [], CPUS))
    assert exact_steps(run_dir) >= 10


@pytest.mark.full(only="nothing is left of a run whose driver ended")
@pytest.mark.parametrize("how", ["at once", "failure"])
def test_whatever_ends_it_nothing_is_left(head: Head, left: Left, tmp_path: Path, how: str) -> None:
    changes: dict[str, Any] = {}
    if how == "failure":
        changes = {"task": "Faulty", "settings": {"fault": "batch", "after": 40}}
    run_dir = tmp_path / "run"
    with driver(head, tmp_path / "first", run_dir, _job(tmp_path, **changes)) as one:
        if how == "failure":
            assert one.code() == 2, one.err
        else:
            wait_for("steps", lambda: step(one, run_dir) >= 5, seconds=START_S)
            one.interrupt()
            wait_for("its word", lambda: "Ctrl-C" in one.err or one.ended())
            one.interrupt()
            assert one.code() == 130, one.err
    assert left() == (0, [], CPUS)


def _job(folder: Path, **changes: Any) -> Job:
    task = changes.pop("task", "Paced")
    settings = {"gate": str(folder / "gate"), "pause_s": 0.03}
    values = {"settings": settings, "steps": STEPS, "checkpoint": {"every_steps": 10 * STEPS}}
    return asked(task, [5, 3], **(values | changes))
