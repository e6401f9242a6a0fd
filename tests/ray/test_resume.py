"""A resumed run is the uninterrupted run: after a killed driver, with other workers, or longer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import raycloud
from raycloud import Job
from raycloud.errors import JobError, RunDirectoryError, SpecError, TaskError
from raycloud.events import GenerationFormed, Noticed, RunStarted, StepsCommitted
from raycloud.spec import dump_job
from tests.live import (
    RAYCLOUD,
    asked,
    check_result,
    checkpoint,
    command,
    digests,
    ended,
    events,
    exact_steps,
    members_below,
    of_kind,
    published,
    ran,
    wait_for,
)
from tests.live_tasks import Gated, Steady
from tests.tiers import variants

CPUS = 4
STEPS, EVERY = 50, 10
SHORT = 18


@pytest.fixture
def interrupted(tmp_path_factory: pytest.TempPathFactory, own_tmpdir: Path) -> Path:
    """A run of two workers, its driver killed after the second checkpoint, its gate opened."""
    folder = tmp_path_factory.mktemp("interrupted")
    gate, run_dir = folder / "gate", folder / "run"
    # Member 0 makes 22 batches in the five steps of an epoch, the last of which is short, and a few
    # before the first: it gets beyond step 20 and waits before step 28.
    job_file = folder / "job.yaml"
    job_file.write_text(dump_job(_gated(gate, 120, [5, 3])))
    told = (RAYCLOUD, "train", job_file, "--run-dir", run_dir)
    with command(folder, *told, RAY_TMPDIR=str(own_tmpdir)) as one:
        wait_for("a second checkpoint", lambda: _killable(one.process.poll(), run_dir))
        members = dict.fromkeys(members_below(own_tmpdir), "a member")
        assert len(members) == 2
        one.process.kill()
        assert one.code() == -9
    ended(members, seconds=0)  # by force: orphans would go on for a while through the open gate
    gate.touch()
    assert len(published(run_dir)) == 2
    return run_dir


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, warm: None) -> Path:
    """A finished run of two workers and 18 steps: three epochs, and 48 samples of the next."""
    run_dir = tmp_path_factory.mktemp("short") / "run"
    raycloud.train(_steady(2, steps=SHORT), run_dir=run_dir)
    assert published(run_dir) == [9, 18]
    return run_dir


@pytest.fixture
def mine(short: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return shutil.copytree(short, tmp_path / "run")


def _steady(workers: int | list[int], **changes: Any) -> Job:
    return asked("Steady", workers, **({"checkpoint": {"every_steps": 9}} | changes))


def _killable(code: int | None, run_dir: Path) -> bool:
    assert code is None, "ended before its second checkpoint"
    return len(published(run_dir)) >= 2


def _gated(gate: Path, free: int, workers: int | list[int], **changes: Any) -> Job:
    settings = {"gate": str(gate), "free": free}
    values = {"settings": settings, "steps": STEPS, "checkpoint": {"every_steps": EVERY, "keep": 2}}
    return asked("Gated", workers, **(values | changes))


def test_killed_driver_with_fixed_shares_goes_on_bitwise(
    interrupted: Path, tmp_path: Path, cluster: str
) -> None:
    code, one = ran(
        tmp_path, RAYCLOUD, "train", "--resume", "--run-dir", interrupted, RAY_ADDRESS=cluster
    )
    assert code == 0, one.err
    assert "going on from the checkpoint of step 20" in one.err
    assert "run finished: 50 steps" in one.out

    gate = tmp_path / "gate"
    gate.touch()
    whole = raycloud.train(_gated(gate, 0, [5, 3]), run_dir=tmp_path / "whole")
    for step in (40, 50):
        name = f"checkpoints/step-{step:08d}"
        ours, theirs = digests(interrupted / name), digests(whole.directory / name)
        parts = [file for file in ours if file.endswith(".safetensors")]
        assert len(parts) == 2
        assert [ours[part] for part in parts] == [theirs[part] for part in parts]

    check_result(interrupted, _gated(gate, 0, [5, 3]), Gated(), STEPS)
    started = of_kind(RunStarted, events(interrupted))
    assert [s.resumed_from_step for s in started] == [None, 20]


@pytest.mark.parametrize("workers", variants(3, 1))
def test_finished_run_goes_on_with_more_steps_and_other_workers(mine: Path, workers: int) -> None:
    longer = _steady(workers, steps=50)
    run = raycloud.train(longer, run_dir=mine, resume=True)
    assert (run.status, run.summary["workers"]) == ("finished", workers)
    assert (run.summary["steps"], run.summary["samples"]) == (50, 700)
    check_result(run, longer, Steady(), 50)
    formed = of_kind(GenerationFormed, run.events)
    assert [(f.generation, f.first_step, len(f.members)) for f in formed] == [
        (0, 0, 2),
        (1, SHORT, workers),
    ]
    assert not set(formed[0].members) & set(formed[1].members)


@pytest.mark.full
def test_resume_with_another_batch_size_counts_every_sample_once(mine: Path) -> None:
    wider = _steady(1, steps=30, global_batch=24)
    run = raycloud.train(wider, run_dir=mine, resume=True)
    assert exact_steps(run.directory) == 30
    assert run.summary["samples"] == 258 + 22 + 3 * 70 + 2 * 24


@pytest.mark.full
def test_finished_run_resumed_as_it_was_computes_nothing(mine: Path) -> None:
    before = digests(mine / "checkpoints")
    run = raycloud.train(_steady(2, steps=SHORT), run_dir=mine, resume=True)
    assert (run.status, run.summary["steps"], run.summary["samples"]) == ("finished", SHORT, 258)
    assert digests(mine / "checkpoints") == before
    assert exact_steps(mine) == SHORT
    assert max(e.last_step for e in of_kind(StepsCommitted, run.events)) == SHORT


@pytest.mark.full
def test_damaged_checkpoint_is_passed_over_and_told(mine: Path) -> None:
    part = next((mine / "checkpoints/step-00000018").glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)

    longer = _steady([5, 3], steps=30)
    run = raycloud.train(longer, run_dir=mine, resume=True)
    assert of_kind(RunStarted, run.events)[-1].resumed_from_step == 9
    told = [n for n in of_kind(Noticed, run.events) if "damaged" in n.what]
    assert len(told) == 1
    assert "step 18" in told[0].what
    assert "digest" in told[0].detail["why"]
    check_result(run, longer, Steady(), 30)
    assert checkpoint(mine).step == 30


@pytest.mark.full
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("seed", {"seed": 4}),
        ("task", {"task": "Gated"}),
        ("drop_last", {"drop_last": True}),
        ("data.shuffle", {"data": {"shuffle": False}}),
    ],
)
def test_what_would_change_the_order_of_samples_is_refused(
    mine: Path, field: str, change: dict[str, Any]
) -> None:
    before = digests(mine)
    task = change.pop("task", "Steady")
    with pytest.raises(SpecError) as refused:
        raycloud.train(asked(task, 2, steps=50, **change), run_dir=mine, resume=True)
    assert refused.value.field == field
    assert "new run" in refused.value.hint
    assert digests(mine) == before


@pytest.mark.full
def test_other_data_is_refused(mine: Path) -> None:
    other = _steady(1, steps=50, settings={"samples": 64})
    with pytest.raises(JobError, match=r"trained on 70 samples per epoch, the members see 64"):
        raycloud.train(other, run_dir=mine, resume=True)
    assert checkpoint(mine).step == SHORT
    assert exact_steps(mine) == SHORT


def test_another_model_is_refused(mine: Path) -> None:
    other = _steady(1, steps=50, settings={"norm": True})
    with pytest.raises(TaskError, match=r"of this model"):
        raycloud.train(other, run_dir=mine, resume=True)
    assert checkpoint(mine).step == SHORT


@pytest.mark.full
def test_existing_run_is_not_overwritten(mine: Path) -> None:
    before = digests(mine)
    with pytest.raises(RunDirectoryError, match="holds a run already") as refused:
        raycloud.train(_steady(1, steps=5), run_dir=mine)
    assert "--resume" in refused.value.hint
    assert digests(mine) == before
