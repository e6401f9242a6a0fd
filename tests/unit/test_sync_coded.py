"""Sums through a codec: bit for bit a plain simulation, and nothing of a gradient is ever lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raycloud.net.transport import Coding
from raycloud.order import MicroBatch, Order, Position, Steps, assign, stream_seed
from raycloud.spec import Job
from raycloud.sync.buckets import lay_out
from raycloud.sync.codecs import CODECS
from tests.coded import simulated
from tests.lockstep import Fleet, NetTask, difference, job, never, plain_loop
from tests.loopback import Loopback

CODED = ("bf16", "int8", "int4")
STEPS = 30


def coded(codec: str) -> Job:
    """A small job whose gradients go through a codec."""
    return job(sync={"codec": codec, "bucket_bytes": 1024})


def single() -> NetTask:
    return NetTask(double=False)


Summed = Callable[[list[Tensor], Coding], tuple[Tensor, list[Tensor]]]


def simulation(
    asked: Job, task: NetTask, shares: Sequence[int], steps: int, summed: Summed = simulated
) -> nn.Module:
    """What members of such shares end with, in one process and without raycloud's training code.

    `summed` is the exchange: the sum, and what each member keeps.
    """
    codec = CODECS[asked.sync_point.codec]
    torch.default_generator.manual_seed(stream_seed(asked.seed, 3))
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer, 50)
    samples = task.data(None).train
    order = Order(samples=len(samples), seed=asked.seed)
    cut = Steps(
        samples=len(samples), global_batch=asked.global_batch, micro_batch=asked.micro_batch
    )
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    layout = [b.parameters for b in lay_out(named, asked.bucket_bytes(0))]
    kept = [[torch.zeros(sum(p.numel() for p in ps)) for _ in shares] for ps in layout]
    at = Position()
    for number in range(steps):
        span = cut.span(number, at)
        at = cut.after(span)
        every = span.micro_batches
        batches = [
            task.batch([samples[i] for i in order.ids(m.epoch, m.start, m.stop)], None)
            for m in every
        ]
        weights = [task.weight(b, m.samples) for b, m in zip(batches, every, strict=True)]
        dealt = assign(shares, len(every))
        grads = [
            own_gradients(model, task, named, [(every[k], batches[k]) for k in dealt.of(rank)])
            for rank in range(len(shares))
        ]
        used = {p for own in grads for p, grad in own.items() if grad is not None}
        scale = 1.0 / sum(weights)
        norms = []
        for parameters, residuals in zip(layout, kept, strict=True):
            rows = []
            for own, residual in zip(grads, residuals, strict=True):
                parts = [torch.zeros_like(p) if own[p] is None else own[p] for p in parameters]
                rows.append(torch.cat([p.flatten() * scale for p in parts if p is not None]))
                rows[-1] += residual
            total = rows[0]  # of one member, to whom nothing is sent
            if len(rows) > 1:
                total, residuals[:] = summed(rows, codec)
            norms.append(float(torch.linalg.vector_norm(total)))
            for p, part in zip(parameters, split(total, parameters), strict=True):
                p.grad = part if p in used else None
        norm = math.hypot(*norms)
        factor = asked.clip_norm / (norm + 1e-6) if asked.clip_norm else 1.0
        for _, p in named:
            if p.grad is not None and factor < 1.0:
                p.grad.mul_(factor)
        optimizer.step()
        scheduler.step()
    return model


def own_gradients(
    model: nn.Module,
    task: NetTask,
    named: Sequence[tuple[str, nn.Parameter]],
    batches: Sequence[tuple[MicroBatch, Any]],
) -> dict[nn.Parameter, Tensor | None]:
    """The sum over a member's micro-batches, each times its weight."""
    model.zero_grad()
    for m, batch in batches:
        torch.default_generator.manual_seed(stream_seed(3, 2, m.epoch, m.start))
        (task.loss(model, batch) * task.weight(batch, m.samples)).backward()
    return {p: None if p.grad is None else p.grad.clone() for _, p in named}


def split(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = flat.split([p.numel() for p in parameters])
    return [part.view_as(p).clone() for part, p in zip(parts, parameters, strict=True)]


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("shares", [(8,), (5, 3), (3, 3, 2)])
def test_it_is_bit_for_bit_what_one_process_simulates(shares: tuple[int, ...], codec: str) -> None:
    asked = coded(codec)
    fleet = Fleet(asked, single(), shares)
    for number in range(STEPS):
        fleet.step(number)
    expected = simulation(asked, single(), shares, STEPS)
    assert max(difference(one.model, expected) for one in fleet.replicas) == 0.0


@pytest.mark.parametrize("codec", CODED)
def test_it_comes_near_what_is_exact(codec: str) -> None:
    fleet = Fleet(coded(codec), single(), (3, 3, 2))
    for number in range(STEPS):
        fleet.step(number)
    plain = plain_loop(job(), single(), STEPS)
    assert 0.0 < difference(fleet.replicas[0].model, plain) < 0.05


def residual_of(fleet: Fleet) -> Tensor:
    """The sum of what all members keep."""
    total = torch.zeros(0, dtype=torch.float64)
    for replica in fleet.replicas:
        assert replica.residual is not None
        own = replica.residual.own_tensors()["flat"].double()
        total = own if not total.numel() else total + own
    return total


def test_a_member_that_is_lost_takes_its_residual_with_it_and_no_more() -> None:
    fleet = Fleet(coded("int4"), single(), (3, 3, 2))
    for number in range(20):
        if number == 7:
            before = [r.residual.own_tensors()["flat"] for r in fleet.replicas if r.residual]
            fleet.lose(1, number, during="gradients")
            assert bool(before[1].any())
        else:
            fleet.step(number)
    assert all(difference(one.model, fleet.replicas[0].model) == 0.0 for one in fleet.replicas)


def test_planned_resizes_conserve_the_sum() -> None:
    """8, 5, then 7 members."""
    fleet = Fleet(coded("int4"), single(), (1,) * 8)
    for number in range(6):
        fleet.step(number)
    before = residual_of(fleet)
    assert bool(before.any())
    leave(fleet, (1, 4, 6))
    fleet.join([r for k, r in enumerate(fleet.replicas) if k not in (1, 4, 6)], (2, 2, 2, 1, 1))
    torch.testing.assert_close(residual_of(fleet), before, rtol=0, atol=1e-6)
    for number in range(6, 9):
        fleet.step(number)
    before = residual_of(fleet)
    newcomers = Fleet(coded("int4"), single(), (4, 4)).replicas
    state, values = fleet.replicas[0].state.tensors(), fleet.replicas[0].state.values()
    for one in newcomers:
        one.state.load({name: t.clone() for name, t in state.items()}, values)
    fleet.join([*fleet.replicas, *newcomers], (2, 1, 1, 1, 1, 1, 1))
    torch.testing.assert_close(residual_of(fleet), before, rtol=0, atol=1e-6)
    for number in range(9, 12):
        fleet.step(number)
    assert all(difference(one.model, fleet.replicas[0].model) == 0.0 for one in fleet.replicas)


def leave(fleet: Fleet, ranks: Sequence[int]) -> None:
    """Members of these ranks hand over what they keep, and have nothing then."""
    parts = [replica.residual for replica in fleet.replicas if replica.residual is not None]
    hub = Loopback(len(parts))
    for one in [p.give(t, ranks) for p, t in zip(parts, hub.members, strict=True)]:
        one.finish(never)
    assert not any(parts[rank].own_tensors()["flat"].any() for rank in ranks)


@pytest.mark.parametrize("members", [1, 3, 5])
def test_a_checkpoint_has_what_all_keep(members: int) -> None:
    fleet = Fleet(coded("int4"), single(), (3, 3, 2))
    for number in range(6):
        fleet.step(number)
    before = residual_of(fleet)
    state = {name: t.clone() for name, t in fleet.replicas[0].state.tensors().items()}
    for number, replica in enumerate(fleet.replicas):
        state |= replica.state.own_tensors(number)
    values = fleet.replicas[0].state.values()
    resumed = Fleet(coded("int4"), single(), (2,) * (members - 1) + (8 - 2 * (members - 1),))
    for replica in resumed.replicas:
        replica.state.check_fits({name: tuple(t.shape) for name, t in state.items()}, values)
        replica.state.load({name: t.clone() for name, t in state.items()}, values)
    torch.testing.assert_close(residual_of(resumed), before, rtol=0, atol=1e-6)
    if members == 3:
        for one, other in zip(fleet.replicas, resumed.replicas, strict=True):
            assert one.residual is not None
            assert other.residual is not None
            a, b = one.residual.own_tensors(), other.residual.own_tensors()
            assert torch.equal(a["flat"], b["flat"])
    exact = Fleet(job(), single(), (8,)).replicas[0]
    exact.state.load(state, values)  # what has no residual goes on without
