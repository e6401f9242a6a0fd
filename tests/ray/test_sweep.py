"""Sweeps for real: trials on shared seats, by Ray Tune; what is killed, and what is left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.util import placement_group_table
from typer.testing import CliRunner

import raycloud
from raycloud import cli
from raycloud.checkpoint import latest, open_store
from raycloud.errors import JobError, RunDirectoryError
from raycloud.events import DataPrepared, GenerationFormed, MemberReady, RunFinished
from raycloud.on_ray.seats import SeatsHandle
from raycloud.on_ray.sweep import Found, sweep
from raycloud.spec.load import dump_minimal, load_job
from raycloud.spec.sections import RoleResources
from raycloud.spec.sweep import load_sweep
from raycloud.spec.yaml_text import write
from raycloud.tuning.results import STOP, Results, Trial
from tests.live import (
    RAYCLOUD,
    asked,
    command,
    events,
    exact_steps,
    of_kind,
    processes_below,
    ran,
    wait_for,
)

CPUS = 2
JOB = Path(__file__).parents[2] / "jobs" / "gpt.yaml"
KEEPERS = "raycloud-seats-"  # begins the names of actors
GONE_S = 2.0  # after a kill nothing is reserved any more

pytestmark = pytest.mark.usefixtures("cluster")


def tiny(steps: int, *more: str) -> Any:
    sets = [f"settings.{name}={value}" for name, value in (("width", 16), ("depth", 1))]
    sets += [f"steps={steps}", "global_batch=8", "evaluate.every_steps=10"]
    return load_job(JOB, [*sets, "evaluate.max_samples=8", "checkpoint.every_steps=10", *more])


BATCHES = {"global_batch": {"choice": [8, 16]}}
SPACE = {**BATCHES, "clip_norm": {"choice": [0.1, 1.0]}}


def nothing_reserved() -> bool:
    states = {group["state"] for group in placement_group_table().values()}
    return states <= {"REMOVED"} and ray.available_resources().get("CPU") == CPUS


def seats_kept() -> list[str]:
    """The actors that keep seats, by name."""
    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith(KEEPERS)]


def runs_of(found: Found) -> list[Path]:
    return [found.directory / "trials" / f"{trial.number:04}" for trial in found.trials]


def pids(runs: list[Path]) -> list[int]:
    return [one.pid for run in runs for one in of_kind(MemberReady, events(run))]


def kill_of(folder: Path, title: str) -> int:
    """Kill a process of the cluster by its title; its id."""
    found = [pid for pid, line in processes_below(folder).items() if line.startswith(title)]
    os.kill(found[0], signal.SIGKILL)
    return found[0]


class Once:
    """Does something once, when a trial has measured."""

    def __init__(self, what: Callable[[], object], trial: int = 1) -> None:
        self.what, self.trial, self.done = what, trial, False

    def __call__(self, results: Results, trial: Trial) -> None:
        if not self.done and trial.number == self.trial and trial.measured:
            self.done = True
            self.what()


def test_all_trials_come_to_their_end_on_the_same_seats(tmp_path: Path) -> None:
    found = sweep(tiny(20), space=SPACE, searcher="grid", trials=9, directory=tmp_path / "swept")
    runs = runs_of(found)
    assert [trial.status for trial in found.trials] == ["finished"] * 4
    assert [exact_steps(run) for run in runs] == [20] * 4
    losses = {trial.number: trial.last.measure for trial in found.trials if trial.last}
    assert [trial.number for trial in found.best] == [min(losses, key=losses.__getitem__)]
    assert found.job is not None
    best = load_job(found.directory / "best.yaml")
    assert best.global_batch == found.best[0].point["global_batch"]
    assert dump_minimal(best) == dump_minimal(found.job)
    assert "over_seconds.png" in {path.name for path in (found.directory / "charts").iterdir()}
    assert len(set(pids(runs))) <= CPUS  # a process is the next trial's, too
    prepared = [one for run in runs for one in of_kind(DataPrepared, events(run))]
    train = [one for one in prepared if one.split == "train"]
    assert len(train) >= 4
    assert len({one.seconds for one in train}) == 2  # once for each number of micro-batches
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


@pytest.mark.full(only="a driver of a trial that is killed; who shares a pipeline of the data")
def test_a_killed_driver_is_made_up_for_and_some_settings_share_a_pipeline(
    tmp_path: Path, ray_tmpdir: Path
) -> None:
    once = Once(lambda: kill_of(ray_tmpdir, "ray::TrialRun"))
    space = {"settings.lr": {"choice": [1e-3, 2e-3]}, "settings.length": {"choice": [64, 128]}}
    place = tmp_path / "swept"
    found = sweep(tiny(30), space=space, searcher="grid", directory=place, listener=once)
    assert once.done
    assert [trial.status for trial in found.trials] == ["finished"] * 4
    assert [exact_steps(run) for run in runs_of(found)] == [30] * 4
    assert [trial.last.samples for trial in found.trials if trial.last] == [30 * 8] * 4
    seconds: dict[int, set[float]] = {}
    for trial, run in zip(found.trials, runs_of(found), strict=True):
        told = [one for one in of_kind(DataPrepared, events(run)) if one.split == "train"]
        seconds.setdefault(trial.point["settings.length"], set()).update(o.seconds for o in told)
    shared, own = sorted(seconds.values(), key=len)
    assert len(shared) == 1  # of both rates
    assert len(own - shared) == 2
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


@pytest.mark.full
def test_trials_end_early_and_their_seats_are_another_s(tmp_path: Path) -> None:
    found = sweep(
        tiny(40),
        space={"global_batch": {"choice": [8, 16, 32]}, "clip_norm": {"log": [1e-6, 1.0]}},
        scheduler="asha",
        minimize=("measure", "samples"),
        reduction=2,
        trials=6,
        seed=1,
        directory=tmp_path / "swept",
    )
    stopped = [trial for trial in found.trials if trial.status == "stopped"]
    assert len(stopped) >= 2
    assert all(trial.last is not None and trial.last.step < 40 for trial in stopped)
    assert found.best[0].status == "finished"
    ended = [of_kind(RunFinished, events(run))[-1].status for run in runs_of(found)]
    assert ended.count("finished") + ended.count("stopped") == 6
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


@pytest.mark.full
def test_a_population_goes_on_as_its_best_with_other_rates(tmp_path: Path) -> None:
    found = sweep(
        tiny(20),
        space={"settings.lr": {"log": [1e-5, 1e-2]}},
        searcher="pbt",
        trials=3,
        directory=tmp_path / "swept",
    )
    forks = [trial for trial in found.trials if trial.fork]
    assert [(trial.fork.step) for trial in forks if trial.fork] == [10]
    assert [t.status for t in found.trials].count("finished") == 3
    over = [t for t in found.trials if t.status == "finished"]
    assert [exact_steps(runs_of(found)[trial.number]) for trial in over] == [20] * 3
    for trial in over:
        newest = latest(open_store(found.directory / "trials" / f"{trial.number:04}/checkpoints"))
        assert newest.manifest is not None
        given = newest.manifest.values["parts"]["hyperparameters"]["groups"][0]["lr"]
        assert given == trial.point["settings.lr"]
    assert found.best[0].number in {trial.number for trial in over}
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


@pytest.mark.full
def test_a_sweep_to_a_target_ends_there_and_trains_the_best_once_more(tmp_path: Path) -> None:
    """A final that was broken off tells nothing: on resume another one begins."""
    place = tmp_path / "swept"
    told: Any = {"space": BATCHES, "searcher": "grid", "target": 4.9, "minimize": ("seconds",)}
    told |= {"finalists": 1, "trials": 4, "directory": place}
    once = Once((place / STOP).touch, trial=2)
    assert sweep(tiny(400), **told, listener=once).trials[2].status != "reached"
    found = sweep(tiny(400), **told, resume=True)
    assert [one.status for one in found.trials] == ["reached", "reached", "stopped", "reached"]
    last = found.trials[3]
    assert last.again in {0, 1}
    assert last.point == found.trials[last.again].point
    assert found.best == (last,)
    assert max(formed(runs_of(found)[3])) == CPUS  # it has all seats
    shown = CliRunner().invoke(cli.app, ["sweep", "show", str(place)]).output
    assert f"reached, {last.again} again" in shown.splitlines()[1]


def test_a_killed_worker_is_made_up_for(tmp_path: Path, ray_tmpdir: Path) -> None:
    once = Once(lambda: kill_of(ray_tmpdir, "ray::MemberActor"))
    found = sweep(
        tiny(40),
        space=BATCHES,
        searcher="grid",
        trials=2,
        directory=tmp_path / "swept",
        listener=once,
    )
    assert once.done
    assert [trial.status for trial in found.trials] == ["finished"] * 2
    assert [exact_steps(run) for run in runs_of(found)] == [40] * 2
    for trial in found.trials:  # also of what it did before it was killed
        assert trial.last is not None
        assert trial.last.samples == 40 * trial.point["global_batch"]
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


@pytest.mark.full
def test_a_killed_sweep_leaves_nothing_and_is_resumed(tmp_path: Path, cluster: str) -> None:
    """By the command, on a cluster that goes on."""
    space = {"clip_norm": {"choice": [0.1, 1.0]}}
    section = {"space": space, "searcher": "grid", "trials": 2}
    text = dump_minimal(tiny(60)) + write({"sweep": section})
    (tmp_path / "job.yaml").write_text(text)
    place = tmp_path / "swept"
    told = (RAYCLOUD, "sweep", "job.yaml", "--dir", place)
    with command(tmp_path, *told, RAY_ADDRESS=cluster) as one:
        log = place / "sweep.jsonl"
        wait_for("a trial is over", lambda: log.exists() and '"finished"' in log.read_text())
        one.process.kill()
        one.process.wait()
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)
    over = Results.open(log).whole
    assert len(over) == 1
    code, again = ran(tmp_path, RAYCLOUD, "sweep", "resume", place, RAY_ADDRESS=cluster)
    assert code == 0, again.err
    trials = Results.open(log).trials
    assert [trial.status for trial in trials.values()] == ["finished"] * 2
    steps = [exact_steps(place / "trials" / f"{number:04}") for number in sorted(trials)]
    assert steps == [60] * 2
    assert {t.number: t for t in over}.items() <= trials.items()  # they were not done again
    shown = CliRunner().invoke(cli.app, ["sweep", "show", str(place)])
    assert len(shown.output.splitlines()) == 1 + 2
    _, asked_for = load_sweep(place / "sweep.yaml")
    assert asked_for.trials == 2


@pytest.mark.full
def test_trials_of_a_tuner_of_one_s_own(tmp_path: Path) -> None:
    kind = raycloud.trainable(tiny(20), directory=tmp_path / "own")
    found = tune.Tuner(
        kind,
        param_space={"global_batch": tune.grid_search([8, 16])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert len(found) == 2
    assert not found.errors
    assert found.get_best_result().metrics["step"] == 20
    runs = [run for run in (tmp_path / "own").iterdir() if (run / "ledger").exists()]
    assert [exact_steps(run) for run in runs] == [20, 20]
    wait_for("nothing reserved", nothing_reserved)
    wait_for("the end of who keeps the seats", lambda: not seats_kept(), seconds=45.0)
    config = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    [again] = tune.Tuner(kind, param_space={"global_batch": 16}, run_config=config).fit()
    assert again.metrics["step"] == 20
    for one in ray.util.list_named_actors(all_namespaces=True):  # that they end was seen above
        if one["name"].startswith(KEEPERS):
            ray.kill(ray.get_actor(one["name"], one["namespace"]))
    wait_for("nothing reserved any more", nothing_reserved)


# ---- seats


def formed(run: Path) -> list[int]:
    return [len(one.members) for one in of_kind(GenerationFormed, events(run))]


def begun(run: Path) -> bool:
    return (run / "events.jsonl").exists() and bool(formed(run))


def in_thread(job: raycloud.Job, run_dir: Path, **given: Any) -> threading.Thread:
    thread = threading.Thread(
        target=raycloud.train, args=(job,), kwargs={"run_dir": run_dir, **given}
    )
    thread.start()
    return thread


def test_a_second_run_begins_beside_the_first_and_grows(tmp_path: Path) -> None:
    """It needs one worker, may have two, and there is room for one."""
    gates = {name: str(tmp_path / name) for name in ("first", "second")}

    def job(name: str, most: int) -> raycloud.Job:
        elastic = {"min_workers": 1, "max_workers": most}
        settings = {"gate": gates[name], "free": 40}
        return asked("Gated", 1, steps=80, elastic=elastic, settings=settings)

    first = in_thread(job("first", 1), tmp_path / "a")
    wait_for(
        "the first computes",
        lambda: begun(tmp_path / "a"),
    )
    second = in_thread(job("second", 2), tmp_path / "b")
    wait_for(
        "the second computes",
        lambda: begun(tmp_path / "b"),
    )
    assert formed(tmp_path / "b") == [1]
    Path(gates["first"]).touch()
    first.join()
    wait_for("a place is found", lambda: len(of_kind(MemberReady, events(tmp_path / "b"))) == 2)
    Path(gates["second"]).touch()
    second.join()
    assert [exact_steps(tmp_path / name) for name in "ab"] == [80, 80]
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


def test_runs_that_share_seats_make_room_for_each_other(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    seats = SeatsHandle.start(RoleResources())
    job = asked(
        "Paced",
        1,
        steps=200,
        elastic={"min_workers": 1, "max_workers": 2},
        settings={"gate": gate, "pause_s": 0.01},
    )
    try:
        first = in_thread(job, tmp_path / "a", seats=seats)
        wait_for(
            "it has both",
            lambda: begun(tmp_path / "a") and 2 in formed(tmp_path / "a"),
        )
        second = in_thread(job, tmp_path / "b", seats=seats)
        wait_for(
            "both compute",
            lambda: begun(tmp_path / "b"),
        )
        assert formed(tmp_path / "a")[-1] == 1
        Path(gate).touch()
        first.join()
        second.join()
    finally:
        seats.close()
    assert [exact_steps(tmp_path / name) for name in "ab"] == [200, 200]
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


class Fresh:
    """Seats whose processes are not to be used again."""

    def __init__(self, seats: SeatsHandle) -> None:
        self.seats = seats

    def lease(self, run: str, fewest: int, most: int, *, fresh: bool) -> Any:
        assert not fresh  # the job neither compiles nor uses a GPU
        return self.seats.lease(run, fewest, most, fresh=True)


def test_a_process_is_used_again_but_where_it_may_not_be(tmp_path: Path) -> None:
    seats = SeatsHandle.start(RoleResources())
    job = asked("Steady", 1, steps=5)
    try:
        for name, given in (("a", seats), ("b", Fresh(seats)), ("c", seats)):
            raycloud.train(job, run_dir=tmp_path / name, seats=given)
    finally:
        seats.close()
    first, second, third = pids([tmp_path / name for name in "abc"])
    assert first == second != third
    wait_for("nothing reserved", nothing_reserved, seconds=GONE_S)


def test_money_that_nobody_counts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no node says what it costs"):
        sweep(tiny(10), space=SPACE, minimize=("money",), directory=tmp_path / "swept")
    with pytest.raises(RunDirectoryError, match="no sweep to go on with"):
        sweep(tiny(10), space=SPACE, resume=True, directory=tmp_path / "none")


def test_a_handle_changes_the_workers_of_a_run_and_stops_it(tmp_path: Path) -> None:
    handle, gate = raycloud.RunHandle(), str(tmp_path / "gate")
    elastic = {"min_workers": 1, "max_workers": 2}
    settings = {"gate": gate, "pause_s": 0.01}
    job = asked("Paced", 1, steps=100_000, elastic=elastic, settings=settings)
    run = tmp_path / "run"
    thread = in_thread(job, run, stop=handle)
    for most in (2, 1, 2):
        handle.resize(1, most)
        wait_for(f"{most} workers", lambda most=most: begun(run) and formed(run)[-1] == most)
    handle.stop("enough")
    thread.join()
    assert of_kind(RunFinished, events(run))[-1].status == "stopped"
    with pytest.raises(ValueError, match="3 to 2 is no range"):
        handle.resize(3, 2)
