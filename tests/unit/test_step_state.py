"""A replica's state survives a checkpoint bit for bit, and another model's is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from raycloud.checkpoint import Manifest, PartRecord, load, publish
from raycloud.checkpoint.payload import load_tensors, write_part
from raycloud.errors import TaskError
from raycloud.step.mutation import evaluating
from raycloud.step.state import ModelState, digest
from raycloud.step.stateful import ReplicaState
from tests.checkpoints import memory_store

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda m: AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW by name": lambda m: AdamW(m.named_parameters(), lr=0.01),
    "SGD": lambda m: SGD(m.parameters(), lr=0.01),
    "SGD momentum": lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda m: Adagrad(m.parameters(), lr=0.01, lr_decay=0.1),
    "RMSprop": lambda m: RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "tensor rate": lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "two groups": lambda m: AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() == 1], "lr": 0.1},
        ]
    ),
}
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler | None]] = {
    "constant": lambda o: None,
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=12),
    "multi step": lambda o: MultiStepLR(o, milestones=[3, 8, 8]),
    "sequential": lambda o: SequentialLR(
        o, [LinearLR(o, total_iters=3), CosineAnnealingLR(o, T_max=9)], milestones=[3]
    ),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, total_iters=4), ExponentialLR(o, 0.9)]),
}


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)
        self.last.bias.requires_grad = False
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Trained:
    """A model under way, without a replica around it."""

    def __init__(
        self,
        optimizer: str = "AdamW",
        scheduler: str = "constant",
        *,
        build: Callable[[], nn.Module] = Model,
    ) -> None:
        torch.default_generator.manual_seed(0)
        self.model = build()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.state = ReplicaState((ModelState(self.model, self.optimizer, self.scheduler),))

    def step(self, number: int) -> None:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        assert isinstance(self.model, Model)
        hidden = torch.tanh(self.model.norm(self.model.first(x)))
        self.model.last(hidden).square().mean().backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def through_a_checkpoint(state: ReplicaState) -> tuple[Mapping[str, torch.Tensor], Any]:
    store = memory_store()
    record = write_part(store, step=5, rank=0, parts=1, tensors=state.tensors())
    manifest = Manifest(
        step=5,
        epoch=0,
        offset=0,
        generation=1,
        samples_per_epoch=1,
        job={},
        values=state.values(),
        ledger={},
        parts=(PartRecord.parse(record),),
        raycloud_version="0",
        torch_version="0",
    )
    publish(store, manifest)
    read = load(store, 5)
    return load_tensors(store, read), read.values


def assert_same(one: ReplicaState, other: ReplicaState) -> None:
    tensors = other.tensors()
    assert one.tensors().keys() == tensors.keys()
    for name, tensor in one.tensors().items():
        assert tensor.dtype == tensors[name].dtype, name
        assert torch.equal(tensor, tensors[name]), name
    assert one.values() == other.values()
    assert digest(one.tensors().items()) == digest(tensors.items())


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        *((name, "constant") for name in OPTIMIZERS),
        *(("SGD momentum", name) for name in SCHEDULERS),
        ("AdamW", "one cycle"),
        ("tensor rate", "one cycle"),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(optimizer: str, scheduler: str) -> None:
    whole, resumed = Trained(optimizer, scheduler), Trained(optimizer, scheduler)
    for number in range(5):
        whole.step(number)
    resumed.step(99)  # has a state of its own, that must not shine through
    resumed.state.load(*through_a_checkpoint(whole.state))
    assert_same(resumed.state, whole.state)
    for number in range(5, 11):
        whole.step(number)
        resumed.step(number)
    assert_same(resumed.state, whole.state)


def test_a_state_from_before_the_first_step() -> None:
    fresh, used = Trained("SGD momentum", "lambda"), Trained("SGD momentum", "lambda")
    used.step(0)
    used.state.load(*through_a_checkpoint(fresh.state))
    assert_same(used.state, fresh.state)


def test_names_say_what_and_of_which_parameter() -> None:
    trained = Trained()
    trained.step(0)
    names = set(trained.state.tensors())
    assert {"model/first.weight", "model/norm.running_mean"} <= names
    assert "optimizer/first.weight/exp_avg" in names
    assert "optimizer/last.bias/exp_avg" not in names  # frozen
    assert "model/scratch" not in names


def test_tensors_are_live_and_values_are_not() -> None:
    trained = Trained("AdamW", "lambda")
    trained.step(0)
    tensors, values = trained.state.tensors(), trained.state.values()
    before, rate = tensors["model/first.weight"].clone(), values["optimizer"]["groups"][0]["lr"]
    trained.step(1)
    assert not torch.equal(tensors["model/first.weight"], before)
    assert values["optimizer"]["groups"][0]["lr"] == rate


def renamed() -> nn.Module:
    model = Model()
    model.final = model.last
    del model.last
    return model


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Model(5), r"has shape \(4, 3\) for .first.weight., this model \(5, 3\)"),
        (renamed, r"lacks 'final.bias'"),
        (lambda: nn.Sequential(Model()), r"lacks '0.first.bias'"),
    ],
    ids=["shape", "name", "wrapped"],
)
def test_another_model_is_refused_and_left_alone(build: Callable[[], nn.Module], says: str) -> None:
    wrote, other = Trained(), Trained(build=build)
    wrote.step(0)
    before = digest(other.state.tensors().items())
    with pytest.raises(TaskError, match=says) as refused:
        other.state.load(*through_a_checkpoint(wrote.state))
    assert "settings the run was started with" in refused.value.hint
    assert digest(other.state.tensors().items()) == before


def test_a_tensor_too_many_is_refused() -> None:
    trained = Trained()
    tensors, values = through_a_checkpoint(trained.state)
    with pytest.raises(TaskError, match="has 'extra', which is not this model's"):
        trained.state.load({**tensors, "model/extra": torch.ones(1)}, values)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("two groups", "1 parameter groups, the task's optimizer 2"),
        ("SGD momentum", "optimizer is AdamW, the task's SGD"),
    ],
)
def test_another_optimizer_is_refused_and_the_model_left_alone(other: str, says: str) -> None:
    wrote, changed = Trained("AdamW"), Trained(other)
    wrote.step(0)
    before = digest(changed.state.tensors().items())
    with pytest.raises(TaskError, match=says) as refused:
        changed.state.load(*through_a_checkpoint(wrote.state))
    assert "the run was started with" in refused.value.hint
    assert digest(changed.state.tensors().items()) == before


def test_optimizer_state_of_an_unknown_parameter_is_refused() -> None:
    trained = Trained()
    trained.step(0)
    tensors, values = through_a_checkpoint(trained.state)
    moved = {n.replace("optimizer/first.bias", "optimizer/gone"): t for n, t in tensors.items()}
    with pytest.raises(TaskError, match="optimizer state of 'gone'"):
        trained.state.load(moved, values)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("lambda", "constant", "schedule is LambdaLR, the task's none"),
        ("constant", "lambda", "schedule is none, the task's LambdaLR"),
        ("lambda", "multi step", "schedule is LambdaLR, the task's MultiStepLR"),
    ],
)
def test_another_schedule_is_refused(before: str, after: str, says: str) -> None:
    wrote, other = Trained("AdamW", before), Trained("AdamW", after)
    with pytest.raises(TaskError, match=says):
        other.state.load(*through_a_checkpoint(wrote.state))


def test_digest_is_of_names_and_bits() -> None:
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(0), "c": torch.tensor(3)}
    first = digest(tensors.items())
    assert first == digest(reversed(tensors.items()))
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert digest({**tensors, "c": torch.tensor(4)}.items()) != first
    assert digest({"a": tensors["a"], "b": tensors["b"], "d": tensors["c"]}.items()) != first
    assert digest({**tensors, "a": torch.tensor([-0.0, 2.0])}.items()) != first
    turned = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()  # not contiguous
    assert digest({"a": turned}.items()) == digest({"a": turned.contiguous()}.items())
    half = torch.ones(3, dtype=torch.bfloat16)
    assert digest({"a": half}.items()) != digest({"a": half * 2}.items())


class Averages(SGD):
    """Evaluates an average of the parameters, as schedule-free optimizers do: rounds both ways."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1 / 3)

    def train(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(3)


def test_an_optimizer_with_modes_is_as_before_to_the_bit() -> None:
    model = Model()
    optimizer = Averages(model.parameters(), lr=0.01)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with evaluating(optimizer):
        assert torch.equal(model.first.weight, before["first.weight"] * (1 / 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
