"""A replica's step is a transaction: it counts as a whole, or nothing of it remains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raycloud.clock import SystemClock
from raycloud.errors import DivergedError, TaskError, TransportError
from raycloud.net.lane import Lane
from raycloud.step.commit import collect
from raycloud.step.replica import Replica
from tests.lockstep import CPU, Fleet, NetTask, job, never
from tests.loopback import Loopback
from tests.nets import BuiltTask, Counting, Normed

Held = dict[str, Any]


def held(fleet: Fleet) -> list[Held]:
    """Copies of all that a step changes."""
    return [
        {
            "values": replica.state.values(),
            "rate": replica.learning_rate,
            **{name: t.clone() for name, t in replica.state.tensors().items()},
            **{f"buffer/{name}": b.clone() for name, b in replica.model.named_buffers()},
        }
        for replica in fleet.replicas
    ]


def assert_equal(some: Sequence[Held], others: Sequence[Held]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            same = torch.equal(value, other[name]) if isinstance(value, Tensor) else None
            assert value == other[name] if same is None else same, name


def fleet_of(kind: str, shares: tuple[int, ...] = (5, 3)) -> Fleet:
    task = {
        "layernorm": NetTask(),
        "batchnorm": NetTask(norm=True),
        "sgd": NetTask(sgd=True),
        "buffers": BuiltTask(Counting),
        "cumulative": BuiltTask(lambda: Normed(momentum=None)),
    }[kind]
    return Fleet(job(), task, shares)


KINDS = ["layernorm", "batchnorm", "sgd", "buffers", "cumulative"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_discarded_step_leaves_nothing(kind: str) -> None:
    fleet, undisturbed = fleet_of(kind), fleet_of(kind)
    for step in range(2):
        fleet.step(step)
        undisturbed.step(step)
    before = held(fleet)
    fleet.compute(2)
    for replica in fleet.replicas:
        collect(replica, 2, never)
    for replica in fleet.replicas:
        replica.discard()
        assert all(p.grad is None for p in replica.model.parameters())
    assert_equal(held(fleet), before)
    for step in (2, 3):
        assert fleet.step(step) == undisturbed.step(step)
    assert_equal(held(fleet), held(undisturbed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_step_is_computed_again_in_the_next_generation(kind: str) -> None:
    fleet, undisturbed = fleet_of(kind), fleet_of(kind)
    fleet.step(0)
    undisturbed.step(0)
    before = held(fleet)
    first = fleet.replicas[0]
    broken = Loopback(2)
    first.connect(broken.members[0])
    fleet.replicas[1].connect(Loopback(2).members[1])  # calls into the void: it is cut off
    fleet.compute(1)
    broken.cut("the other one is gone")
    with pytest.raises(TransportError):
        collect(first, 1, never)
    for replica in fleet.replicas:
        replica.discard()
    assert_equal(held(fleet), before)
    for replica, member in zip(fleet.replicas, Loopback(2).members, strict=True):
        replica.connect(member)
    fleet.lanes = [Lane(member) for member in Loopback(2).members]
    for step in (1, 2):
        fleet.step(step)
        undisturbed.step(step)
    assert_equal(held(fleet), held(undisturbed))


@pytest.mark.parametrize("kind", KINDS)
def test_trying_out_has_no_effect(kind: str) -> None:
    fleet, undisturbed = fleet_of(kind), fleet_of(kind)
    for step in range(3):
        before = held(fleet)
        for micro_batch in fleet.span(step, fleet.position).micro_batches[:2]:
            for replica in fleet.replicas:
                replica.try_out(fleet.collate.one(micro_batch))
        assert_equal(held(fleet), before)
        assert fleet.step(step) == undisturbed.step(step)
    assert_equal(held(fleet), held(undisturbed))


class Explodes(NetTask):
    """Its loss is not finite for one label, from some call on."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * float("inf" if self.armed else 1)

    armed = False


@pytest.mark.parametrize("norm", [False, True])
def test_a_diverged_step_is_refused_by_all_before_anything_changes(norm: bool) -> None:
    task = Explodes(norm=norm)
    fleet = Fleet(job(), task, (5, 3))
    fleet.step(0)
    before = held(fleet)
    task.armed = True
    fleet.compute(1)
    for replica in fleet.replicas:
        with pytest.raises(DivergedError, match="at step 1"):
            collect(replica, 1, never)
        replica.discard()
    assert_equal(held(fleet), before)


def test_clipping_is_part_of_the_step() -> None:
    fleet = Fleet(job(clip_norm=0.01), NetTask(), (5, 3))
    fleet.compute(0)
    for replica in fleet.replicas:
        result = collect(replica, 0, never)
        assert result.norm > 0.01
        squares = sum(
            float(p.grad.square().sum()) for p in replica.model.parameters() if p.grad is not None
        )
        assert squares**0.5 == pytest.approx(0.01, rel=1e-3)


def test_all_members_start_from_the_parameters_that_the_seed_draws() -> None:
    one, other = Fleet(job(), NetTask(), (8,)), Fleet(job(), NetTask(), (5, 3))
    another = Fleet(job(seed=4), NetTask(), (8,))
    assert_equal([held(one)[0]] * 2, held(other))
    weights = [fleet.replicas[0].model.first.weight for fleet in (one, another)]
    assert not torch.equal(*weights)


def test_the_schedule_moves_with_each_commit() -> None:
    fleet = Fleet(job(), NetTask(), (8,))
    rates = []
    for step in range(3):
        rates.append(fleet.replicas[0].learning_rate)
        fleet.step(step)
    reference = NetTask()
    optimizer = reference.optimizer(nn.Linear(1, 1))
    schedule = reference.scheduler(optimizer, 50)
    expected = []
    for _ in range(3):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == expected


class Wrong(NetTask):
    """Breaks the contract in the way it is told."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def model(self) -> nn.Module:
        if self.how == "model":
            raise ZeroDivisionError("no model today")
        made = super().model()
        return made.requires_grad_(requires_grad=self.how != "frozen")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.how == "optimizer":
            raise KeyError("rate")
        return super().optimizer(model)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        if self.how == "scheduler":
            raise ValueError("too few steps")
        return super().scheduler(optimizer, steps)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        wrong: dict[str, Any] = {
            "vector": loss.expand(2),
            "detached": loss.detach(),
            "number": loss.item(),
        }
        if self.how == "loss":
            raise IndexError("no such label")
        return wrong.get(self.how, loss)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("model", r"Task\.model raised ZeroDivisionError: no model today"),
        ("frozen", "no parameter that requires a gradient"),
        ("optimizer", r"Task\.optimizer raised KeyError"),
        ("scheduler", r"Task\.scheduler raised ValueError: too few steps"),
    ],
)
def test_a_task_that_cannot_be_built(how: str, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        Replica(job(), Wrong(how), device=CPU, steps=5, clock=SystemClock())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("loss", r"Task\.loss raised IndexError: no such label"),
        ("vector", r"Task\.loss returned a tensor of shape \(2,\)"),
        ("detached", "requires_grad=False"),
        ("number", r"Task\.loss returned float"),
    ],
)
def test_a_loss_that_is_none(how: str, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        Fleet(job(), Wrong(how), (8,))


def test_rates_follow_the_batch_before_the_schedule_begins() -> None:
    plain, scaled = (
        Replica(job(**asked), NetTask(), device=CPU, steps=5, clock=SystemClock())
        for asked in ({}, {"base_batch": 4, "rate_scaling": "sqrt"})
    )
    rates = [one.optimizer.param_groups[0]["lr"] for one in (plain, scaled)]
    first = [one.optimizer.param_groups[0]["initial_lr"] for one in (plain, scaled)]
    assert rates[1] == pytest.approx(2 * rates[0])  # of 16 samples, not 4
    assert first[1] == pytest.approx(2 * first[0])
