"""Passes are a unit of speed: fused where exact, compiled, or in half precision."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.lockstep import Fleet, NetTask, difference, job
from tests.nets import BuiltTask, Counting, Frozen, Normed


def test_dropout_seen_in_a_fused_pass_ends_fusing_and_is_bitwise_exact() -> None:
    fused, single = (Fleet(job(), NetTask(branch=False), (5, 3), fuse=n) for n in (8, 1))
    for replica in fused.replicas:
        assert replica.fuse == 1  # learned from a pass without effect
        replica.fuse = 8  # as if that pass had not drawn
    for step in range(3):
        assert fused.step(step) == single.step(step)
    for one, other in zip(fused.replicas, single.replicas, strict=True):
        assert one.fuse == 1
        tensors = other.state.tensors()
        assert all(torch.equal(t, tensors[name]) for name, t in one.state.tensors().items())


def test_a_pass_fuses_what_the_job_allows() -> None:
    plain = NetTask(dropout=0.0)
    assert Fleet(job(), plain, (8,)).replicas[0].fuse == 8
    assert Fleet(job(fuse=3), plain, (8,)).replicas[0].fuse == 3
    assert Fleet(job(fuse=1), plain, (8,)).replicas[0].fuse == 1


def test_batch_statistics_are_never_fused() -> None:
    fleet = Fleet(job(), NetTask(dropout=0.0, norm=True), (5, 3), fuse=8)
    single = Fleet(job(), NetTask(dropout=0.0, norm=True), (5, 3))
    assert [replica.fuse for replica in fleet.replicas] == [1, 1]
    for step in range(3):
        assert fleet.step(step) == single.step(step)
    assert difference(fleet.replicas[0].model, single.replicas[0].model) == 0


def test_frozen_batch_statistics_may_be_fused() -> None:
    assert Fleet(job(), BuiltTask(Frozen), (8,)).replicas[0].fuse == 8


def test_a_model_that_changes_buffers_is_not_fused() -> None:
    fleet = Fleet(job(), BuiltTask(Counting), (8,), fuse=8)
    assert fleet.replicas[0].fuse == 1
    fleet.step(0)
    assert int(fleet.replicas[0].model.passes) == 8


def test_bf16_computes_in_half_precision_and_keeps_everything_in_fp32() -> None:
    seen: list[torch.dtype] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            seen.append(hidden.dtype)
            out: torch.Tensor = self.last(torch.relu(hidden))
            return out.float()

    task = BuiltTask(Looks, double=False)
    half, whole = (Fleet(job(precision=p), task, (5, 3)) for p in ("bf16", "fp32"))
    start = half.replicas[0].model.state_dict()["first.weight"].clone()
    seen.clear()
    losses = [half.step(step) for step in range(3)]
    assert set(seen) == {torch.bfloat16}
    for replica in half.replicas:
        assert {t.dtype for t in replica.state.tensors().values()} == {torch.float32}
    assert losses == pytest.approx([whole.step(step) for step in range(3)], rel=0.05)
    assert 0 < difference(half.replicas[0].model, whole.replicas[0].model) < 0.05
    assert not torch.equal(half.replicas[0].model.state_dict()["first.weight"], start)
    assert difference(half.replicas[0].model, half.replicas[1].model) == 0


@pytest.mark.full(only="torch.compile with g++ gives the same")
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, compiling
@pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++")), reason="torch.compile needs g++"
)
def test_a_compiled_model_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    task = BuiltTask(Normed, double=False, sgd=True)
    asked = {"micro_batch": 4, "clip_norm": None}
    compiled, plain = (Fleet(job(compile=c, **asked), task, (3, 1)) for c in (True, False))
    for step in range(2):
        assert compiled.step(step) == pytest.approx(plain.step(step), abs=1e-5)
    for one, other in zip(compiled.replicas, plain.replicas, strict=True):
        assert one.state.tensors().keys() == other.state.tensors().keys()
    assert difference(compiled.replicas[0].model, plain.replicas[0].model) <= 1e-6
    assert difference(compiled.replicas[0].model, compiled.replicas[1].model) == 0
    torch.compiler.reset()
