"""Passes of several micro-batches: fused only where that was seen to change nothing."""

from __future__ import annotations

from collections.abc import Sequence
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


class Counting(Ignoring):
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
        (Counting, Fusing.COLLATED),
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
