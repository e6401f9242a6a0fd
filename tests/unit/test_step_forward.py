"""Passes are a unit of speed: fused where exact, compiled, or in half precision."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raycloud.clock import SystemClock
from raycloud.step.forward import Fusing
from raycloud.worker.calibration import Calibration
from tests.lockstep import Fleet, NetTask, difference, job, plain_loop
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


STEPS = 3


class Points(NetTask):
    """A plain mean over samples, in double precision; each case changes one thing."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(dropout=0.0, branch=False, **settings)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def weight(self, batch: Any, samples: int) -> float:
        return float(samples)


class Contrastive(Points):
    """Each sample is compared with all others of its batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        z = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)))


class Ignoring(Points):
    """A mean over the targets that count, of which some batches have fewer."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        targets = torch.where(batch[1] == 0, -100, batch[1])
        if (targets == -100).all():
            return model(batch[0]).sum() * 0.0
        return F.cross_entropy(model(batch[0]), targets, ignore_index=-100)


class CountingTask(Ignoring):
    """The same, and says how many count."""

    def weight(self, batch: Any, samples: int) -> float:
        return float((batch[1] != 0).sum())


class Constant(Points):
    """Weighs all batches alike, however large they are."""

    def weight(self, batch: Any, samples: int) -> float:
        return 1.0


class ByChance(Points):
    """A loss that is a mean, with a gradient that depends on what else is in the batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        outputs = model(batch[0])
        more = (outputs.mean() ** 2) * 0.1
        return loss + more - more.detach()


class Sized(Points):
    """Takes batches of one size alone."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if len(batch[1]) != 2:
            raise ValueError(f"a batch of {len(batch[1])}")
        return super().loss(model, batch)


class Drawing(Points):
    """Draws as it collates, so that each micro-batch is collated alone."""

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        if rng is not None:
            rng.random()
        return super().batch(samples, rng)


class Among(Drawing):
    """Each sample points to another one of its batch."""

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        points, labels = super().batch(samples, rng)
        return points, labels, torch.arange(len(labels)).flip(0)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels, other = batch
        return F.cross_entropy(model(points) + model(points[other]).tanh(), labels)


class Graphs(Drawing):
    """As many nodes as there happen to be, and edges between them."""

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        points, labels = super().batch(samples, rng)
        nodes = 1 + labels
        graph = torch.repeat_interleave(torch.arange(len(labels)), nodes)
        return {"x": points[graph], "graph": graph, "y": labels}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        nodes = model(batch["x"])
        pooled = torch.zeros(len(batch["y"]), 3, dtype=nodes.dtype)
        return F.cross_entropy(pooled.index_add(0, batch["graph"], nodes), batch["y"])


class Bags(Drawing):
    """Values and where each sample's begin."""

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        points, labels = super().batch(samples, rng)
        counts = 1 + labels
        starts = torch.cumsum(counts, 0) - counts
        return points.repeat_interleave(counts, 0), starts, labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        values, starts, labels = batch
        return F.cross_entropy(model(values)[starts], labels)


class TimeFirst(Drawing):
    """The first dimension is no sample's, though in a micro-batch it is as long."""

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        points, labels = super().batch(samples, rng)
        return points[:, :4].reshape(-1, 2, 2).transpose(0, 1).contiguous(), labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        steps, labels = batch  # (time, samples, features)
        state = steps.cumsum(0)[-1]
        return F.cross_entropy(model(torch.cat([state, state, state], 1)), labels[: len(state)])


class Numbers(Drawing):
    """A number of the whole batch beside it."""

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        points, labels = super().batch(samples, rng)
        return points, labels, float(points.sum())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch[:2]) * (1.0 + 0.01 * batch[2])


def compared(task: NetTask, shares: Sequence[int], **asked: Any) -> tuple[Fleet, list[str]]:
    """Replicas that have compared, and go by what one of them has found; and what they told."""
    wanted = job(**asked)
    fleet = Fleet(wanted, task, shares, fuse=8)
    told: list[str] = []
    for member, replica in enumerate(fleet.replicas):
        replica.notice = lambda what, detail: told.append(f"{what} / {detail['hint']}")
        Calibration(wanted, replica, fleet.collate, member=member, clock=SystemClock()).compare()
    fleet.fuse = fleet.replicas[0].fuse
    return fleet, told


@pytest.mark.parametrize("shares", [(8,), (5, 3)])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Contrastive, "not the weighted mean"),
        (Ignoring, "not the weighted mean"),
        (Constant, "not the weighted mean"),
        (ByChance, "not the weighted mean"),
        (Sized, "computing several at once: Task.loss raised ValueError: a batch of 8"),
        (Among, "not the weighted mean"),
        (Graphs, "returns more than tensors with a row for each sample"),
        (Bags, "returns more than tensors with a row for each sample"),
        (TimeFirst, "not the weighted mean"),
        (Numbers, "returns more than tensors with a row for each sample"),
    ],
)
def test_what_would_differ_is_computed_one_by_one_and_told(
    kind: type[NetTask], why: str, shares: tuple[int, ...]
) -> None:
    task = kind(sgd=True)
    fleet, told = compared(task, shares)
    assert [replica.fuse for replica in fleet.replicas] == [1] * len(shares)
    assert len(told) == len(shares)
    assert all(why in one and "Task.weight" in one for one in told)
    for step in range(STEPS):
        fleet.step(step)
    assert difference(fleet.replicas[0].model, plain_loop(fleet.job, task, STEPS)) < 1e-12


@pytest.mark.parametrize(
    ("kind", "fusing"),
    [
        (NetTask, Fusing.COLLATED),
        (Points, Fusing.COLLATED),
        (CountingTask, Fusing.COLLATED),
        (Drawing, Fusing.JOINED),
    ],
)
@pytest.mark.parametrize("double", [True, False])
def test_what_is_the_same_is_fused(kind: type[NetTask], fusing: Fusing, double: bool) -> None:
    settings = {"dropout": 0.0, "branch": False} if kind is NetTask else {}
    task = kind(double=double, sgd=True, **settings)
    fleet, told = compared(task, (5, 3))
    assert told == []
    assert [replica.fuse for replica in fleet.replicas] == [8, 8]
    assert {replica.forward.fusing for replica in fleet.replicas} == {fusing}
    made = fleet.collate.passes(fleet.span(0, fleet.position).micro_batches, 8)
    assert [len(one.micro_batches) for one in made] == [8]
    for step in range(STEPS):
        fleet.step(step)
    bound = 1e-12 if double else 1e-5
    assert difference(fleet.replicas[0].model, plain_loop(fleet.job, task, STEPS)) < bound
