"""The first promise on real processes: any workers and shares give the single-process result."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import raycloud
from raycloud.events import (
    CheckpointPublished,
    Evaluated,
    Event,
    GenerationFormed,
    MemberDone,
    MemberReady,
    MemberSpawned,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.order.seeds import stream_seed
from raycloud.step.replica import MODEL_STREAM
from tests.live import apart, asked, check_result, checkpoint, events, exact_steps, of_kind
from tests.live_tasks import PairTask, Steady, Still
from tests.lockstep import NetTask, difference, job, plain_loop
from tests.tiers import variants

CPUS = 4
SUMMARY = {  # what the issue names
    "status", "steps", "samples", "first_step_s", "train_s", "samples_per_s", "final_loss", "eval",
    "workers", "generations", "recoveries", "bytes_sent", "bytes_dense", "predicted",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.parametrize("shares", variants([5, 2, 1], [8]), ids=str)
def test_float64_adamw_with_dropout_is_the_single_process(
    tmp_path: Path, shares: list[int]
) -> None:
    """Layer and batch normalisation both; 50 steps."""
    one = asked("PairTask", shares)
    run = raycloud.train(one, run_dir=tmp_path / "run")
    assert run.status == "finished"
    assert run.summary["shares"] == shares
    check_result(run, one, PairTask(), 50)


@pytest.mark.full
def test_float32_differs_no_more_than_rounding_does(tmp_path: Path) -> None:
    settings = {"double": False, "sgd": True}
    one, task = job(elastic=_fixed(5, 3), settings=settings), NetTask(**settings)
    run = raycloud.train(one, run_dir=tmp_path / "run")
    reference = plain_loop(one, task, 50)
    rounding = difference(plain_loop(one, task, 50, backwards=True), reference)
    assert rounding > 0
    assert apart(run.directory, reference) <= 3 * rounding


def test_fused_passes_and_a_class_as_task(tmp_path: Path) -> None:
    """Without randomness micro-batches are fused; the class travels to the workers by value."""
    settings = {"dropout": 0.0, "branch": False, "samples": 61}
    one = job(elastic=_fixed(5, 3), settings=settings)
    assert one.task is NetTask
    run = raycloud.train(one, run_dir=tmp_path / "run")
    check_result(run, one, NetTask(**settings), 50)
    assert checkpoint(run.directory).values["fuse"] == 8


@pytest.mark.full
def test_epochs_that_drop_their_tail_with_shares_fitted_to_speed(tmp_path: Path) -> None:
    one = asked("Steady", 2, steps=None, epochs=2, drop_last=True)
    run = raycloud.train(one, run_dir=tmp_path / "run")
    readies = of_kind(MemberReady, run.events)
    assert len(readies) == 2
    assert len({ready.state_digest for ready in readies}) == 1
    assert all(ready.micro_batch_s > 0 for ready in readies)
    assert sum(run.summary["shares"]) == 8
    assert run.summary["steps"] == exact_steps(run.directory) == 2 * (70 // 16)
    assert run.summary["samples"] == 2 * 64


def test_what_a_run_leaves(tmp_path: Path) -> None:
    seen: list[Event] = []
    one = asked("Steady", [5, 3], checkpoint={"every_steps": 20})
    run = raycloud.train(one, run_dir=tmp_path / "run", observer=seen.append)

    assert {p.name for p in run.directory.iterdir()} == {
        "job.yaml",
        "plan.json",
        "events.jsonl",
        "ledger",
        "checkpoints",
        "tensorboard",
        "summary.json",
    }
    assert raycloud.load_job(run.directory / "job.yaml").resolved() == one.resolved()
    assert [p.name for p in sorted((run.directory / "checkpoints").iterdir())] == [
        "step-00000040",
        "step-00000050",
    ]
    assert any((run.directory / "tensorboard").iterdir())

    summary = run.summary
    assert set(summary) >= SUMMARY
    assert (summary["status"], summary["steps"], summary["samples"]) == ("finished", 50, 700)
    assert (summary["workers"], summary["generations"]) == (2, 1)
    assert summary["recoveries"] == []
    assert summary["first_step_s"] > 0
    assert 0 < summary["final_loss"] < 2
    assert 0 < summary["bytes_dense"] <= summary["bytes_sent"]
    assert summary["predicted"]["step_s"] > 0

    check_result(run, one, Steady(), 50)
    logged = events(run.directory)
    assert logged == seen == run.events
    _check_order(logged)
    assert [e.step for e in of_kind(CheckpointPublished, logged)] == [20, 40, 50]
    assert run.checkpoint == str(run.directory / "checkpoints/step-00000050")

    text = repr(run)
    assert "run finished: 50 steps, 700 samples" in text
    assert "2 (shares 5 3)" in text
    assert str(run.directory) in text
    assert "50 steps" in run._repr_html_()


def _check_order(logged: list[Event]) -> None:
    """What must come before what; members speak whenever they like."""
    kinds = [type(event) for event in logged]
    assert kinds[0] is RunStarted
    assert kinds[-1] is RunFinished
    for earlier, later in [
        (MemberSpawned, MemberReady),
        (MemberReady, GenerationFormed),
        (GenerationFormed, CheckpointPublished),
        (Evaluated, RunFinished),
        (StepsCommitted, MemberDone),
    ]:
        assert kinds.index(earlier) < kinds.index(later), (earlier, later)
    for member in (0, 1):
        steps = [e for e in of_kind(StepsCommitted, logged) if e.member == member]
        assert steps[0].first_step == 0
        assert steps[-1].last_step == 50
        assert all(a.last_step == b.first_step for a, b in pairwise(steps))


def _fixed(*shares: int) -> dict[str, object]:
    return {"min_workers": len(shares), "max_workers": len(shares), "shares": list(shares)}


def test_the_noise_of_gradients_is_that_of_single_samples(tmp_path: Path) -> None:
    """Of a model that stands still it is known: the covariance of all its samples' gradients.

    The last step of each epoch has 8 samples, of which one member has no part. Each fourth look
    falls on one of these steps, of which nothing is to be taken.
    """
    given = {"samples": 31 * 64 + 8}
    one = asked("Still", [5, 3], steps=1500, global_batch=64, micro_batch=8, settings=given)
    run = raycloud.train(one, run_dir=tmp_path / "run")
    task = Still(**given)
    torch.default_generator.manual_seed(stream_seed(one.seed, MODEL_STREAM))
    model = task.model()
    rows = []
    for sample in task.data(None).train:
        model.zero_grad()
        task.loss(model, task.batch([sample], None)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    gradients = torch.stack(rows)
    mean = gradients.mean(0)
    spread = float((gradients - mean).square().sum(1).mean())
    expected = spread / float(mean.square().sum())
    assert run.summary["noise_scale"] == pytest.approx(expected, rel=0.2)
