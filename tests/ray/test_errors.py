"""Samples that cannot be computed, on real workers: named and left out, or the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import raycloud
from raycloud.errors import DivergedError, TaskError
from raycloud.events import (
    MemberLost,
    MemberReady,
    Noticed,
    Recovered,
    RolledBack,
    StepNotFinite,
)
from raycloud.order import MicroBatch, Position, Steps, StepSpan
from raycloud.report.audit import RunAudit, audit, audited_text
from raycloud.spec import Job
from tests.live import ROOT, apart, asked, check_result, events, of_kind
from tests.live_poison import Poison
from tests.live_tasks import FailingGpu
from tests.lockstep import job as small_job
from tests.lockstep import plain_loop
from tests.poisoned import Poisoned, hit

CPUS = 4
TASK = f"{ROOT}/tests/live_poison.py:Poison"
STEPS = 9
SAMPLES = 70
SKIP = {"on_error": "skip", "on_nan": "skip", "most_skipped": 9, "most_nan_in_a_row": 9}
EXACT = 1e-9

pytestmark = pytest.mark.usefixtures("warm")


def poisoned(workers: int, how: str, bad: int, folder: Path, **changes: Any) -> Job:
    settings = {"how": how, "bad": [bad], "folder": str(folder)}
    elastic = {"min_workers": 1, "max_workers": workers, "shares": "equal"}
    values = {"task": TASK, "elastic": elastic, "steps": STEPS, "settings": settings}
    return small_job(**(values | changes))


def places(job: Job, bad: int) -> list[tuple[StepSpan, MicroBatch]]:
    """Where a sample stands in the steps of a run."""
    cut = Steps(samples=SAMPLES, global_batch=job.global_batch, micro_batch=job.micro_batch)
    at, found, task = Position(), [], Poisoned(bad=[bad])
    for step in range(STEPS):
        span = cut.span(step, at)
        found += [(span, m) for m in span.micro_batches if hit(job, task, m)]
        at = cut.after(span)
    return found


def late(job: Job) -> int:
    """A sample that comes once, and that nobody tries out before the first step."""
    found = {bad: [span.step for span, _ in places(job, bad)] for bad in range(SAMPLES)}
    return next(bad for bad, steps in found.items() if len(steps) == 1 and steps[0] > 1)


def finished(run_dir: Path, job: Job) -> RunAudit:
    raycloud.train(job, run_dir=run_dir)
    found = audit(run_dir)
    assert found.ledger.exact
    assert found.ledger.steps == STEPS
    return found


def clean(job: Job, **left_out: Any) -> nn.Module:
    """A single process's model, where nothing fails but `left_out`."""
    bad = job.settings["bad"]
    return plain_loop(job, Poison(bad=bad, how="memory", most=99), STEPS, **left_out)


def test_a_sample_that_makes_the_task_raise_is_left_out_and_named(tmp_path: Path) -> None:
    job = poisoned(2, "loss", 5, tmp_path, errors=SKIP)
    found, where = finished(tmp_path / "run", job), places(job, 5)
    task = Poisoned(bad=[5])
    assert apart(tmp_path / "run", clean(job, without=lambda m: hit(job, task, m))) <= EXACT
    skips = [(skip.step, skip.start, skip.stop, skip.why) for skip in found.ledger.skips]
    assert skips == [(span.step, m.start, m.stop, "error") for span, m in where]
    counted = SAMPLES + 4 * job.global_batch - sum(m.samples for _, m in where)
    assert found.to_record()["samples"] == counted
    assert "each sample counted once, but for those that were skipped" in audited_text(found)
    told = events(tmp_path / "run")
    named = [e for e in of_kind(Noticed, told) if e.what.startswith("skipped micro-batch")]
    assert len(named) == len(where)
    assert all(5 in event.detail["ids"] for event in named)
    assert not of_kind(MemberLost, told)


@pytest.mark.full
def test_by_default_it_ends_the_run_with_its_samples_named(tmp_path: Path) -> None:
    bad = late(poisoned(2, "backward", 0, tmp_path))
    job = poisoned(2, "backward", bad, tmp_path)
    with pytest.raises(TaskError, match=rf"half way back, each time, on .*ids .*\b{bad}\b") as e:
        raycloud.train(job, run_dir=tmp_path / "run")
    assert "errors.on_error skip" in e.value.hint
    assert "live_poison" in e.value.message or "poisoned.py" in e.value.message
    assert not of_kind(MemberLost, events(tmp_path / "run"))


@pytest.mark.full
def test_a_resumed_run_knows_what_was_skipped(tmp_path: Path) -> None:
    job = poisoned(2, "loss", 5, tmp_path, errors=SKIP, steps=5)
    raycloud.train(job, run_dir=tmp_path / "run")
    before = audit(tmp_path / "run").ledger.skips
    assert len(before) == 1
    raycloud.train(job.model_copy(update={"steps": STEPS}), run_dir=tmp_path / "run", resume=True)
    found = audit(tmp_path / "run")
    assert found.ledger.exact
    assert [skip.step for skip in found.ledger.skips] == [s.step for s, _ in places(job, 5)]
    task = Poisoned(bad=[5])
    assert apart(tmp_path / "run", clean(job, without=lambda m: hit(job, task, m))) <= EXACT


@pytest.mark.full(only="a step that is not finite, on Ray")
def test_a_step_that_is_not_finite_is_skipped_by_all(tmp_path: Path) -> None:
    job = poisoned(2, "nan", 5, tmp_path, errors=SKIP)
    found, where = finished(tmp_path / "run", job), places(job, 5)
    steps = {span.step for span, _ in where}
    assert apart(tmp_path / "run", clean(job, passed_over=lambda s: s.step in steps)) <= EXACT
    skips = [(skip.step, skip.start, skip.stop, skip.why) for skip in found.ledger.skips]
    assert skips == [(span.step, span.start, span.stop, "nan") for span, _ in where]
    told = [e.what for e in of_kind(Noticed, events(tmp_path / "run")) if "was skipped" in e.what]
    assert len(told) == len(where)


@pytest.mark.full
def test_a_step_that_is_not_finite_ends_the_run_by_default(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        raycloud.train(poisoned(2, "hidden", 5, tmp_path), run_dir=tmp_path / "run")


@pytest.mark.full
def test_all_go_back_in_place_and_leave_the_step_out(tmp_path: Path) -> None:
    """No process is started anew; the result is that of a run that never computed the step."""
    errors = {"on_nan": "rollback", "most_skipped": 9}
    bad = late(poisoned(2, "nan", 0, tmp_path))
    job = poisoned(2, "nan", bad, tmp_path, errors=errors, checkpoint={"every_steps": 1})
    found, where = finished(tmp_path / "run", job), places(job, bad)
    [(span, _)] = where
    reference = clean(job, passed_over=lambda s: s.step == span.step)
    assert apart(tmp_path / "run", reference) <= EXACT
    skips = [(skip.step, skip.start, skip.stop, skip.why) for skip in found.ledger.skips]
    assert skips == [(span.step, span.start, span.stop, "nan")]
    assert f"step {span.step}, nan" in audited_text(found)
    told = events(tmp_path / "run")
    assert {e.left_out for e in of_kind(StepNotFinite, told)} == {span.step}
    [back] = of_kind(RolledBack, told)
    assert 0 < back.step <= span.step
    [recovered] = of_kind(Recovered, told)
    assert (recovered.lost, recovered.lost_steps) == ((), span.step - back.step)
    assert len(of_kind(MemberReady, told)) == 2
    assert not of_kind(MemberLost, told)


@pytest.mark.full
def test_passes_become_smaller_where_memory_runs_out(tmp_path: Path) -> None:
    job = poisoned(2, "memory", 5, tmp_path, settings={"how": "memory", "bad": [5], "most": 5})
    finished(tmp_path / "run", job)
    assert apart(tmp_path / "run", clean(job)) <= EXACT
    told = [
        e.what for e in of_kind(Noticed, events(tmp_path / "run")) if "memory ran out" in e.what
    ]
    assert len(told) == 2
    assert all("at most 2 micro-batches" in what for what in told)


@pytest.mark.full(only="a sample that ends its process")
def test_a_sample_that_ends_its_process_is_left_out(tmp_path: Path) -> None:
    """After two workers: what both were to compute, which the sample is among."""
    bad = late(poisoned(3, "exit", 0, tmp_path))
    folder = tmp_path / "dead"
    folder.mkdir()
    job = poisoned(3, "exit", bad, folder, errors=SKIP)
    found, where = finished(tmp_path / "run", job), places(job, bad)
    skips = {(skip.epoch, skip.start) for skip in found.ledger.skips}
    assert {(m.epoch, m.start) for _, m in where} <= skips
    assert {skip.step for skip in found.ledger.skips} == {span.step for span, _ in where}
    assert len(list(folder.iterdir())) == 2 * len(where)
    reference = clean(job, without=lambda m: (m.epoch, m.start) in skips)
    assert apart(tmp_path / "run", reference) <= EXACT
    assert [e for e in of_kind(Noticed, events(tmp_path / "run")) if f"{bad}" in e.what]


@pytest.mark.full
def test_a_sample_that_ends_its_process_ends_the_run_by_default(tmp_path: Path) -> None:
    """After three workers, since two may be lost in one step by chance."""
    every = {"min_workers": 4, "max_workers": 4}  # seats of those that the last test has lost
    raycloud.train(asked("Steady", 4, steps=2, elastic=every), run_dir=tmp_path / "seats")
    bad = late(poisoned(4, "exit", 0, tmp_path))
    folder = tmp_path / "dead"
    folder.mkdir()
    with pytest.raises(TaskError, match=rf"each worker that computed it was lost: .*\b{bad}\b"):
        raycloud.train(poisoned(4, "exit", bad, folder), run_dir=tmp_path / "run")
    assert len(list(folder.iterdir())) == 3


@pytest.mark.full(only="a GPU that is said to fail costs its worker alone, on Ray")
def test_a_gpu_that_fails_costs_its_worker_alone(tmp_path: Path) -> None:
    elastic = {"min_workers": 1, "max_workers": 2}
    settings = {"first": str(tmp_path / "first"), "after": 60}
    job = asked("FailingGpu", 2, steps=60, elastic=elastic, settings=settings)
    run = raycloud.train(job, run_dir=tmp_path / "run")
    (lost,) = of_kind(MemberLost, run.events)
    assert lost.reason == "its GPU failed: CUDA error: uncorrectable ECC error encountered"
    assert (tmp_path / "first").exists()
    check_result(run, job, FailingGpu(), 60)
