"""Held-out losses of snapshots."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.journal import Journal
from benchmarks.racing.reference import held_out_loss
from benchmarks.racing.target import evaluate, read_losses
from benchmarks.workload import build_model, load_held_out


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
    assert read_losses(out) == tuple(sorted(expected.items()))
    assert [update for update, _ in read_losses(out)] == [5, 10, 15]


def test_a_line_that_is_half_written_is_not_read(tmp_path: Path) -> None:
    out = tmp_path / "losses.jsonl"
    assert read_losses(out) == ()
    out.write_text('{"update": 10, "loss": 2.5}\n{"update": 5, "loss": 3.5}\n{"update": 15, "lo')
    assert read_losses(out) == ((5, 3.5), (10, 2.5))
