"""Update: what is trained is what is exchanged; optimizers without torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from raycloud.clock import SystemClock
from raycloud.errors import TaskError
from raycloud.step.replica import Replica
from tests.lockstep import CPU, Fleet, Net, NetTask, difference, job, plain_loop

STEPS = """
import hashlib, sys, torch
digests = []
for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"):
    torch.manual_seed(3)
    model = torch.nn.Linear(5, 3)
    kind = getattr(torch.optim, name)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(4, 5)).square().sum().backward()
        optimizer.step()
        schedule.step()
    other = kind(torch.nn.Linear(5, 3).parameters(), lr=0.1)
    other.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    other.load_state_dict(optimizer.state_dict())
    assert seen == [True] * 5, seen
    assert torch.is_grad_enabled()
    numbers = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    digests.append(hashlib.sha256(numbers + str(other.state_dict()).encode()).hexdigest())
print(*digests, "torch._dynamo" in sys.modules)
"""

COMPILED = """
import sys, torch
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
assert "torch._dynamo" not in sys.modules
doubled = torch.compile(lambda x: 2 * x, backend="eager")
assert doubled(torch.ones(3)).sum() == 6
before = model.weight.detach().clone()
model(torch.ones(4, 5)).square().sum().backward()
optimizer.step()
print((before != model.weight).any().item(), "torch._dynamo" in sys.modules)
"""

WITHOUT = "from raycloud.step.state import without_compiler; without_compiler()"


def fresh(code: str) -> list[list[str]]:
    """The words of each line that a new Python prints for `code`."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


@pytest.mark.timeout(180)
def test_the_same_numbers_and_no_compiler_is_loaded() -> None:
    [[*plain, loaded]] = fresh(STEPS)
    [[*found, still]] = fresh(WITHOUT + STEPS)
    assert (found, len(found)) == (plain, 6)
    assert (loaded, still) == ("True", "False")


@pytest.mark.timeout(180)  # the compiler is loaded
@pytest.mark.full
def test_who_compiles_still_can() -> None:
    [found] = fresh(WITHOUT + COMPILED)
    assert found == ["True", "True"]


class Criterion(nn.Module):
    """A learnable temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(out * torch.exp(self.scale), labels, reduction="none")
        weights = 1.0 + labels.to(each.dtype)
        return (each * weights).sum() / weights.sum()


class Outside(NetTask):
    """Its criterion is the task's own, or beside the model in what `model` returns."""

    def __init__(self, *, inside: bool = False, parameters: Any = None) -> None:
        super().__init__()
        self.inside, self.parameters = inside, parameters
        self.criterion = Criterion()

    def model(self) -> nn.Module:
        model, criterion = super().model(), Criterion()
        return nn.ModuleDict({"model": model, "criterion": criterion}) if self.inside else model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        if isinstance(model, nn.ModuleDict):
            found: Tensor = model["criterion"](model["model"](points), labels)
        else:
            found = self.criterion(model(points), labels)
        return found

    def optimizer(self, model: nn.Module) -> Optimizer:
        more = self.criterion.parameters() if self.parameters is None else self.parameters
        groups = [{"params": model.parameters()}]
        return SGD(groups if self.inside else [*groups, {"params": more, "lr": 0.1}], lr=0.05)


def replica_of(task: NetTask) -> Replica:
    return Replica(job(), task, device=CPU, steps=50, clock=SystemClock())


def test_a_parameter_that_only_the_task_has_is_refused_by_its_name() -> None:
    with pytest.raises(TaskError) as refused:
        replica_of(Outside())
    assert (
        "a parameter that is not the model's: the task's criterion.scale" in refused.value.message
    )
    assert "part of what Task.model returns" in refused.value.hint


def test_how_many_are_refused_and_where_they_are_from() -> None:
    task = Outside(parameters=[nn.Parameter(torch.zeros(2, 3)) for _ in range(5)])
    with pytest.raises(TaskError, match="5 parameters that are not the model's: the task's param"):
        replica_of(task)
    lone = [torch.zeros(7, requires_grad=True)]
    task = Outside(parameters=iter(lone))
    with pytest.raises(TaskError, match=r"shape \(7,\) that no attribute of the task holds"):
        replica_of(task)


def test_a_criterion_inside_the_model_trains_as_in_a_plain_loop() -> None:
    fleet = Fleet(job(), Outside(inside=True), (5, 3))
    for step in range(6):
        fleet.step(step)
    alone = plain_loop(job(), Outside(inside=True), 6)
    assert all(difference(replica.model, alone) < 1e-12 for replica in fleet.replicas)
    assert alone.get_parameter("criterion.scale").item() != 0.0
    assert "model/criterion.scale" in fleet.replicas[0].state.tensors()


class Unfreezes(NetTask):
    """Begins to train its first layer after some updates, in one of several ways."""

    def __init__(self, how: str, after: int = 3) -> None:
        super().__init__(dropout=0.0)
        self.how, self.left = how, after

    def model(self) -> nn.Module:
        net = super().model()
        assert isinstance(net, Net)
        self.net = net
        net.first.requires_grad_(self.how in {"idle", "group later"})
        return net

    def optimizer(self, model: nn.Module) -> Optimizer:
        net = self.net
        few = [p for n, p in net.named_parameters() if not n.startswith("first")]
        every = self.how not in {"idle", "group later", "frozen group later"}
        optimizer = AdamW(net.parameters() if every else few, lr=3e-3)
        optimizer.register_step_post_hook(lambda *_: self._count(net, optimizer))
        return optimizer

    def scheduler(self, optimizer: Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=0)

    def _count(self, net: Net, optimizer: Optimizer) -> None:
        self.left -= 1
        if self.left == 0 and self.how == "later":
            net.first.requires_grad_(True)
        if self.left == 0 and "group later" in self.how:
            optimizer.add_param_group({"params": list(net.first.parameters())})


@pytest.mark.parametrize("shares", [(8,), (5, 3), (8, 0)])
@pytest.mark.parametrize(
    ("how", "says", "refused_at"),
    [
        ("later", "'first.weight' was frozen at the start and requires a gradient at step 3", 3),
        ("group later", "the optimizer has 8 parameters at step 3, and had 6 at the start", 2),
        ("frozen group later", "has 8 parameters at step 3, and had 6 at the start", 2),
    ],
)
def test_what_is_trained_later_is_refused_before_it_moves(
    how: str, says: str, refused_at: int, shares: tuple[int, ...]
) -> None:
    alone = replica_of(Unfreezes(how))
    fleet = Fleet(job(), Unfreezes(how, after=3 * len(shares)), shares)
    for replica in fleet.replicas:  # each counts its own updates
        task = Unfreezes(how)
        replica.optimizer._optimizer_step_post_hooks.clear()
        net = replica.model
        assert isinstance(net, Net)
        replica.optimizer.register_step_post_hook(
            lambda *_, task=task, net=net, it=replica.optimizer: task._count(net, it)
        )
    for step in range(refused_at):
        fleet.step(step)
    with pytest.raises(TaskError, match=says) as refused:
        fleet.step(refused_at)
    assert "torch.no_grad()" in refused.value.hint
    first = fleet.replicas[0].model.get_parameter("first.weight")
    assert torch.equal(first, alone.model.get_parameter("first.weight"))


class Remedied(NetTask):
    """As the refusal advises: no gradient until it is to move, which its schedule knows."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.schedule: Any = None

    def scheduler(self, optimizer: Optimizer, steps: int) -> Any:
        self.schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, total_iters=0)
        return self.schedule

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.set_grad_enabled(self.schedule.last_epoch >= 3):
            hidden = torch.tanh(model.get_submodule("norm")(model.get_submodule("first")(batch[0])))
        return F.cross_entropy(model.get_submodule("last")(hidden), batch[1])


def test_the_remedy_trains_as_a_plain_loop_that_unfreezes() -> None:
    fleet = Fleet(job(), Remedied(), (5, 3))
    start = fleet.replicas[0].model.get_parameter("first.weight").detach().clone()
    for step in range(3):
        fleet.step(step)
    assert torch.equal(fleet.replicas[1].model.get_parameter("first.weight"), start)
    for step in range(3, 7):
        fleet.step(step)
    alone = plain_loop(job(), Remedied(), 7)
    assert not torch.equal(alone.get_parameter("first.weight"), start)
    assert all(difference(replica.model, alone) < 1e-12 for replica in fleet.replicas)


def test_what_no_group_has_stays_and_is_not_exchanged() -> None:
    fleet = Fleet(job(clip_norm=None), Unfreezes("idle"), (5, 3))
    replica = fleet.replicas[0]
    assert [name for name, _ in replica.trained.idle] == ["first.weight", "first.bias"]
    start = replica.model.get_parameter("first.weight").detach().clone()
    sent = sum(b.flat.numel() for b in replica.gradients.buckets)
    assert sent == sum(p.numel() for _, p in replica.trained.parameters)
    for step in range(4):
        fleet.step(step)
    first = replica.model.get_parameter("first.weight")
    assert torch.equal(first, start)
    assert first.grad is None
    alone = plain_loop(job(clip_norm=None), Unfreezes("idle"), 4)
    assert difference(replica.model, alone) < 1e-12


def test_an_optimizer_without_anything_to_train_is_refused() -> None:
    class Nothing(NetTask):
        def optimizer(self, model: nn.Module) -> Optimizer:
            few = list(model.parameters())[:1]
            few[0].requires_grad_(False)
            return SGD(few, lr=0.1)

    with pytest.raises(TaskError, match="the optimizer has no parameter that requires a gradient"):
        replica_of(Nothing())
