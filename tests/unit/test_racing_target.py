"""Held-out losses of snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.journal import Journal
from benchmarks.machine import ROOT
from benchmarks.racing.reference import held_out_loss
from benchmarks.racing.target import EvaluationError, Evaluator, evaluate, read_losses
from benchmarks.workload import build_model, load_held_out

LIMIT_S = 60.0


def test_each_snapshot_is_evaluated_once_and_the_last_ones_too(tmp_path: Path) -> None:
    snapshots, out = tmp_path / "snapshots", tmp_path / "losses.jsonl"
    notes = Journal(tmp_path / "journals", snapshots=snapshots)
    model = build_model(small=True)
    expected = {}

    def keep(update: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        notes.snapshot(model, update)
        expected[update] = held_out_loss(model, load_held_out())

    waited = []

    def over(wait_s: float) -> bool:
        """One more comes while it waits, and one after it has heard that it is over."""
        waited.append(wait_s)
        if len(waited) in {2, 3}:
            keep(5 * len(waited))
        return len(waited) == 3

    keep(5)
    evaluate(snapshots, out, small=True, over=over)
    assert waited == [0.0, 0.5, 0.0], "it waits only where there was nothing to do"
    found = read_losses(out, snapshots)
    assert found == tuple(sorted(expected.items()))
    assert [update for update, _ in found] == [5, 10, 15]


def snapshot(directory: Path, update: int) -> None:
    """Keep the tiny model, as a process that began just now."""
    Journal(directory / "journals", snapshots=directory).snapshot(build_model(small=True), update)


def line(update: int, loss: float, number: int = 0) -> str:
    return json.dumps(
        {"update": update, "loss": loss, "file": f"{update:06d}-{number}.safetensors"}
    )


def test_a_line_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    out = tmp_path / "losses.jsonl"
    for update in (5, 10, 15):
        snapshot(tmp_path, update)
    assert read_losses(out, tmp_path) == ()
    out.write_text(f"{line(10, 2.5)}\n{line(5, 3.5)}\n{line(15, 1.5)[:-9]}")
    assert read_losses(out, tmp_path) == ((5, 3.5), (10, 2.5))


def test_the_loss_of_parameters_that_were_lost_is_not_read(tmp_path: Path) -> None:
    out = tmp_path / "losses.jsonl"
    for _ in range(2):
        snapshot(tmp_path, 5)
    out.write_text(f"{line(5, 3.5)}\n")
    assert read_losses(out, tmp_path) == ()
    out.write_text(f"{line(5, 3.5)}\n{line(5, 4.5, 1)}\n")
    assert read_losses(out, tmp_path) == ((5, 4.5),)


@pytest.fixture
def evaluator(tmp_path: Path) -> Iterator[Evaluator]:
    """Of the snapshots in `tmp_path`."""
    made = Evaluator(
        tmp_path, tmp_path / "losses.jsonl", small=True, environment={"PYTHONPATH": str(ROOT)}
    )
    yield made
    made.close()


def test_an_evaluator_does_what_is_left_at_the_end(tmp_path: Path, evaluator: Evaluator) -> None:
    snapshot(tmp_path, 5)
    evaluator.finish(LIMIT_S)
    assert [update for update, _ in read_losses(tmp_path / "losses.jsonl", tmp_path)] == [5]


def test_an_evaluator_that_fails_is_an_error(tmp_path: Path, evaluator: Evaluator) -> None:
    snapshot(tmp_path, 5)
    (tmp_path / "000005-0.safetensors").write_bytes(b"no parameters")
    with pytest.raises(EvaluationError, match=r"ended with status 1: .*rror"):
        evaluator.finish(LIMIT_S)
    with pytest.raises(EvaluationError, match="ended with status 1"):
        evaluator.losses()


def test_an_evaluator_that_is_late_is_an_error(tmp_path: Path, evaluator: Evaluator) -> None:
    snapshot(tmp_path, 5)
    with pytest.raises(EvaluationError, match=r"evaluated 0 of 1 snapshots within 0\.001 s"):
        evaluator.finish(0.001)
