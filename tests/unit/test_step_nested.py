"""State as optimizers, schedules and modules keep it goes on from a checkpoint, bit for bit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    SequentialLR,
    StepLR,
)

from raycloud.checkpoint import encode
from raycloud.checkpoint.values import Tagged
from raycloud.errors import CheckpointError, TaskError
from raycloud.step.nested import Unpacking
from raycloud.step.state import ModelState
from raycloud.step.stateful import ReplicaState
from tests.unit.test_step_state import assert_same, through_a_checkpoint


class History(SGD):
    """Keeps lists of tensors, words and numbers in its state, its groups and itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.mode, self.count = "new", 0
        for group in self.param_groups:
            group["trust"] = torch.ones(2, dtype=torch.float64)
            group["mask"] = np.ones(2, dtype=np.int16)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.mode, self.count = "used", self.count + 1
        self.state["all"]["steps"] = [self.count, torch.tensor(float(self.count))]
        for group in self.param_groups:
            group["trust"] *= 0.9
            group["mask"] += np.int16(1)
            group["eps"] = np.float32(0.1) * self.count
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("grads", []).append(p.grad.double())
                state.setdefault("last", deque(maxlen=2)).append(p.grad.float() * 3)
                state["name"] = {"kind": torch.float64, "shape": tuple(p.shape), "word": "abc"}
                move = sum(state["grads"][-3:]) + state["last"][0] * float(group["trust"][0])
                p.sub_((move * group["lr"] / float(group["mask"][0])).to(p.dtype))


class Warmup(LRScheduler):
    """A warm-up that holds the schedule that comes after it."""

    def __init__(self, optimizer: Optimizer, n: int, after: LRScheduler) -> None:
        self.n, self.after, self.held = n, after, optimizer
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self.n:
            return [b * (self.last_epoch + 1) / self.n for b in self.base_lrs]
        return self.after.get_last_lr()

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= self.n:
            self.after.step()
        super().step(epoch)


class Phase(Enum):
    UP = "up"
    DOWN = "down"


class Wave:
    """A callable with state."""

    def __init__(self) -> None:
        self.phase, self.level, self.seen = Phase.UP, 0, [torch.zeros(2)]
        self.shape = lambda level: 1 + level

    def __call__(self, step: int) -> float:
        self.level += 1 if self.phase is Phase.UP else -1
        if self.level in (0, 3):
            self.phase = Phase.DOWN if self.level else Phase.UP
            self.late = step
        self.seen = [self.seen[-1] + 1]
        return self.shape(self.level) / 4


class Policy(LRScheduler):
    """Goes by an object of its own, at two places."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.wave = Wave()
        self.same = {"again": self.wave}
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        factor = self.wave(self.last_epoch)
        return [b * factor for b in self.base_lrs]


class Counting(nn.Linear):
    """Has state that is no tensor, and one within."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__(3, 1, dtype=kind)
        self.version, self.log = 0, {"sum": torch.zeros(2, dtype=torch.int64)}

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": self.version, "log": self.log}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.version, self.log = state["version"], state["log"]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "rate is a tensor": lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "history": lambda m: History(m.parameters(), lr=0.01),
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
}
SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler | None]] = {
    "none": lambda o: None,
    "holds one": lambda o: Warmup(o, 4, StepLR(o, 2)),
    "sequence of one that holds": lambda o: SequentialLR(
        o, [Warmup(o, 2, StepLR(o, 2)), LinearLR(o)], milestones=[7]
    ),
    "chain": lambda o: ChainedScheduler([ConstantLR(o), Warmup(o, 2, ExponentialLR(o, 0.9))]),
    "object": Policy,
    "callable": lambda o: LambdaLR(o, Wave()),
    "numbers": lambda o: LambdaLR(o, lambda step: np.float32(0.9) ** step),
}


class Run:
    """A plain loop of a model with extra state."""

    def __init__(self, optimizer: str, schedule: str, kind: torch.dtype = torch.float32) -> None:
        torch.default_generator.manual_seed(0)
        self.model = Counting(kind)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.state = ReplicaState((ModelState(self.model, self.optimizer, self.schedule),))

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            self.model(x.to(self.model.weight.dtype)).square().mean().backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            self.model.version += 1
            self.model.log["sum"] += number


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        *((o, "none") for o in OPTIMIZERS),
        *(("momentum", s) for s in SCHEDULES if s != "none"),
        ("rate is a tensor", "holds one"),
        ("rate is a tensor", "callable"),
    ],
)
def test_what_is_resumed_or_rolled_back_goes_on_bit_for_bit(
    optimizer: str, schedule: str, kind: torch.dtype
) -> None:
    whole, fresh, back = (Run(optimizer, schedule, kind) for _ in range(3))
    whole.steps(0, 5)
    fresh.state.load(*through_a_checkpoint(whole.state))
    back.steps(0, 9)  # has more than that state, which must not shine through
    back.state.load(*through_a_checkpoint(whole.state))
    for other in (fresh, back):
        assert_same(other.state, whole.state)
    whole.steps(5, 12)
    for other in (fresh, back):
        other.steps(5, 12)
        assert_same(other.state, whole.state)
        assert other.model.version == whole.model.version == 12
        assert torch.equal(other.model.log["sum"], whole.model.log["sum"])


def test_tensors_keep_their_type_where_an_optimizer_would_cast_them() -> None:
    wrote, read = Run("history", "none", torch.bfloat16), Run("history", "none", torch.bfloat16)
    wrote.steps(0, 3)
    read.state.load(*through_a_checkpoint(wrote.state))
    state = read.optimizer.state[read.model.weight]
    assert [g.dtype for g in state["grads"]] == [torch.float64] * 3
    assert state["last"].maxlen == 2
    assert state["name"] == {"kind": torch.float64, "shape": (1, 3), "word": "abc"}
    assert type(read.optimizer.param_groups[0]["eps"]) is np.float32
    assert (read.optimizer.mode, read.optimizer.count) == ("used", 3)


def test_a_rate_that_others_hold_too_stays_the_same_tensor() -> None:
    wrote, read = Run("rate is a tensor", "none"), Run("rate is a tensor", "none")
    rate = read.optimizer.param_groups[0]["lr"]
    wrote.optimizer.param_groups[0]["lr"].fill_(0.5)
    read.state.load(*through_a_checkpoint(wrote.state))
    assert read.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_names_say_where_a_tensor_is() -> None:
    run = Run("history", "object")
    run.steps(0, 2)
    held = {name for name in run.state.tensors() if name.startswith("held/")}
    assert {
        "held/model/_extra_state/log/sum",
        "held/optimizer/weight/grads/1",
        "held/optimizer/groups/0/trust",
        "held/optimizer/others/all/steps/1",
        "held/schedule/wave/seen/0",
    } <= held
    assert run.state.is_buffer("held/model/_extra_state/log/sum")
    assert not run.state.is_buffer("held/optimizer/groups/0/trust")


def _refused(change: Callable[[Run], None]) -> str:
    run = Run("momentum", "object")
    run.steps(0, 1)
    run.state.check()
    change(run)
    with pytest.raises(TaskError) as refused:
        run.state.check()
    assert "state_dict" in refused.value.hint or "dense" in refused.value.hint
    return refused.value.message


def test_what_no_checkpoint_can_hold_is_refused_by_its_place() -> None:
    def with_random(run: Run) -> None:
        run.schedule.wave.draw = random.Random(1)

    def with_object(run: Run) -> None:
        run.optimizer.state[run.model.weight]["helper"] = Wave()

    def with_sparse(run: Run) -> None:
        run.optimizer.state[run.model.weight]["rows"] = torch.ones(2, 2).to_sparse()

    assert "schedule/wave/draw is a random.Random" in _refused(with_random)
    assert "optimizer/weight/helper is a" in _refused(with_object)
    assert "'optimizer/weight/rows'" in _refused(with_sparse)


@pytest.mark.parametrize(
    "packed",
    [
        Tagged("tensor", "held/none"),
        Tagged("object", {"a": 1}),
        Tagged("live", None),
        Tagged("member", "LEFT"),
        Tagged("dtype", "nn"),
        Tagged("dtype", "load"),
        Tagged("deque", [-1.5, []]),
        [Tagged("object", {"kind": "Wave", "state": 1})],
        [Tagged("object", {"kind": "list", "state": {"level": 1}})],
    ],
)
def test_a_file_that_says_otherwise_is_refused_and_runs_nothing(packed: Any) -> None:
    encode({"a": packed})
    live = [Wave()] if isinstance(packed, list) else None
    unpacking = Unpacking(tensors={})
    with pytest.raises((CheckpointError, TaskError)):
        unpacking.unpack(packed, live, "schedule")
    assert unpacking.loads == []


@pytest.mark.parametrize("makes", ["none", "ExponentialLR"])
def test_a_schedule_that_holds_another_kind_is_refused(makes: str) -> None:
    wrote, read = Run("momentum", "holds one"), Run("momentum", "holds one")
    read.schedule.after = None if makes == "none" else ExponentialLR(read.optimizer, 0.9)
    with pytest.raises(TaskError, match=rf"after is a StepLR in the .* task makes .*{makes}"):
        read.state.load(*through_a_checkpoint(wrote.state))


def test_a_model_in_a_schedule_is_kept_once() -> None:
    run = Run("momentum", "holds one")
    before = run.state.tensors().keys()
    run.schedule.student, run.schedule.teacher = run.model, nn.Linear(1, 1)
    added = run.state.tensors().keys() - before
    assert added == {"held/schedule/teacher/weight", "held/schedule/teacher/bias"}


def test_extra_state_of_a_module_may_have_grown() -> None:
    whole, resumed = Run("momentum", "none"), Run("momentum", "none")
    whole.model.log = {"sum": torch.full((5,), 3.0, dtype=torch.float64)}
    resumed.state.load(*through_a_checkpoint(whole.state))
    assert_same(resumed.state, whole.state)
    assert torch.equal(resumed.model.log["sum"], whole.model.log["sum"])
    assert resumed.model.log["sum"] is not whole.model.log["sum"]
