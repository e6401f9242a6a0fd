"""Measuring the held-out samples: the same for any number of members, and without a trace."""

from __future__ import annotations

import json
import random
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raycloud.errors import TaskError
from raycloud.metrics import Accuracy, Mean, Metric, merge_all
from raycloud.step.commit import collect, commit
from raycloud.worker.evaluate import evaluate, show_sample, states_of, try_metrics
from tests.lockstep import Fleet, NetTask, difference, job, plain_loop
from tests.nets import BuiltTask


class Measured(NetTask):
    """Counts what is right, and sees in which mode the model is measured."""

    fails = False

    def metrics(self, model: nn.Module, batch: Any, samples: int) -> Mapping[str, Metric]:
        assert not model.training
        assert not torch.is_grad_enabled()
        if self.fails:
            raise KeyError("top5")
        points, labels = batch
        right = int((model(points).argmax(1) == labels).sum())
        more = super().metrics(model, batch, samples)
        return {**more, "right": Accuracy(right=right, count=samples)}

    def sample(self, model: nn.Module) -> str | None:
        assert not model.training
        if self.fails:
            raise ValueError("nothing to show")
        return "like this"


def parts(task: NetTask, model: nn.Module, size: int, **evaluated: Any) -> list[dict[str, Metric]]:
    samples = task.data(None).train
    asked = job(evaluate={"batch": 8, **evaluated})
    return [evaluate(asked, task, model, samples, rank=r, shares=[1] * size) for r in range(size)]


@pytest.mark.parametrize("size", [2, 3, 20])
def test_merged_parts_do_not_depend_on_the_number_of_members(size: int) -> None:
    task = Measured(norm=True)
    model = task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (whole,) = parts(task, model, 1)
    merged = merge_all(parts(task, model, size))
    assert merged["right"] == whole["right"]
    assert merged["right"] == Accuracy(right=merged["right"].to_values()["right"], count=70)
    assert isinstance(merged["loss"], Mean)
    assert merged["loss"].value() == pytest.approx(whole["loss"].value(), rel=1e-12)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(("most", "count"), [(1, 1), (8, 8), (30, 30), (700, 70)])
def test_no_more_samples_than_asked(most: int, count: int) -> None:
    task = Measured()
    merged = merge_all(parts(task, task.model(), 2, max_samples=most))
    assert merged["right"].to_values()["count"] == count


def test_what_the_task_raises_is_its_fault_and_the_model_trains_on() -> None:
    task = Measured()
    task.fails = True
    model = task.model()
    with pytest.raises(TaskError, match="held-out samples raised KeyError: 'top5'"):
        parts(task, model, 1)
    assert model.training


def test_showing_never_spoils_a_finished_run() -> None:
    task = Measured()
    model = task.model()
    assert show_sample(job(), task, model) == "like this"
    task.fails = True
    assert show_sample(job(), task, model) == "Task.sample raised ValueError: nothing to show"
    assert model.training
    assert show_sample(job(), NetTask(), model) is None


def test_bf16_is_measured_in_bf16() -> None:
    seen: list[torch.dtype] = []

    class Looks(NetTask):
        def metrics(self, model: nn.Module, batch: Any, samples: int) -> Mapping[str, Metric]:
            assert isinstance(model.first, nn.Linear)
            seen.append(model.first(batch[0]).dtype)
            return {}

    task = Looks(double=False)
    samples = task.data(None).train
    evaluate(job(precision="bf16"), task, task.model(), samples, rank=0, shares=[1])
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("size", [1, 3])
def test_rows_are_gathered_batch_by_batch(size: int) -> None:
    class Gathered:
        def __init__(self, samples: Any) -> None:
            self.samples, self.asked = samples, []

        def __len__(self) -> int:
            return len(self.samples)

        def gather(self, ids: Any) -> list[Any]:
            self.asked.append(ids.tolist())
            return [self.samples[i] for i in ids]

    task = Measured()
    model = task.model()
    samples: Any = Gathered(task.data(None).train)
    asked = job(evaluate={"batch": 32})
    merged = merge_all(
        [evaluate(asked, task, model, samples, rank=r, shares=[1] * size) for r in range(size)]
    )
    assert samples.asked == [list(range(32)), list(range(32, 64)), list(range(64, 70))]
    assert merged == merge_all(parts(task, model, size, batch=32))


class Marks(nn.Module):
    """Counts in `eval` mode, in buffers: in place, by another tensor, by another size."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 3), how
        self.register_buffer("measured", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Any) -> Any:
        out = self.layer(x) + self.measured
        if self.training:
            return out
        with torch.no_grad():
            if self.how == "in place":
                self.measured += 1
            elif self.how == "data":
                self.measured.data.mul_(0.5).add_(1)
            else:
                self.measured = self.measured + out.mean(0)
        if len(self.cache) < len(x):
            self.cache = torch.zeros(len(x))
        return out


class Draws(NetTask):
    """Draws wherever random numbers come from, and makes gradients, while it measures and shows."""

    def metrics(self, model: nn.Module, batch: Any, samples: int) -> Mapping[str, Metric]:
        drawn = float(torch.rand(())) + np.random.rand() + random.random()
        with torch.enable_grad():
            self.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None for n, p in model.named_parameters() if "last" in n)
        return {"drawn": Mean(total=drawn, weight=1.0), "torch": self.torch(samples)}

    def torch(self, samples: int) -> Mean:
        return Mean(total=float(torch.rand(())) * samples, weight=float(samples))

    def sample(self, model: nn.Module) -> str | None:
        return f"{torch.rand(())} {np.random.rand()} {random.random()}"


def random_states() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), numpy[1].tolist(), random.getstate()


@pytest.mark.parametrize("shares", [(8,), (5, 3)], ids=str)
@pytest.mark.parametrize("how", ["in place", "data", "replaced"])
def test_buffers_that_measuring_changes_are_put_back(how: str, shares: tuple[int, ...]) -> None:
    asked, task = job(evaluate={"batch": 8}), BuiltTask(lambda: Marks(how))
    samples = task.data(None).train
    fleet = Fleet(asked, task, shares)
    for step in range(4):
        if step:  # also within a step that has to wait for another generation
            for rank, replica in enumerate(fleet.replicas):
                evaluate(asked, task, replica.model, samples, rank=rank, shares=shares)
                show_sample(asked, task, replica.model)
        fleet.step(step)
    for replica in fleet.replicas:
        assert replica.statistics.changing == ()
        assert len(replica.model.get_buffer("cache")) == 8  # no state: its module may rely on it
        assert difference(replica.model, plain_loop(asked, task, 4)) <= 1e-12


def test_measuring_within_a_step_that_has_to_wait_keeps_what_is_computed() -> None:
    asked, task = job(evaluate={"batch": 8}), BuiltTask(lambda: Marks("in place"))
    fleet = Fleet(asked, task, (5, 3))
    samples = task.data(None).train
    fleet.step(0)
    fleet.hubs[0].cut("a connection broke")
    fleet.compute(1)
    for rank, replica in enumerate(fleet.replicas):
        replica.suspend()
        evaluate(asked, Draws(), replica.model, samples, rank=rank, shares=(5, 3))
    fleet.join(fleet.replicas, (5, 3))
    works = fleet.compute(1, adopted=((), ()))
    for replica, work in zip(fleet.replicas, works, strict=True):
        collect(replica, 1, lambda: False)
        commit(replica, work)
    assert difference(fleet.replicas[0].model, plain_loop(asked, task, 2)) <= 1e-12


def test_random_numbers_and_gradients_are_as_before() -> None:
    task = Draws(norm=True)
    model = task.model()
    kept = torch.ones(3)
    model.get_parameter("last.bias").grad = kept.double()
    before = random_states()
    gradients = [p.grad for p in model.parameters()]
    parts(task, model, 1)
    show_sample(job(), task, model)
    assert random_states() == before
    assert [p.grad for p in model.parameters()] == gradients
    assert torch.equal(kept, torch.ones(3))


def test_what_measuring_draws_does_not_depend_on_the_number_of_members() -> None:
    task = Draws()
    model = task.model()
    one, three = (merge_all(parts(task, model, size))["torch"] for size in (1, 3))
    assert one.to_values() == pytest.approx(three.to_values())


@pytest.mark.parametrize("data", [True, False])
def test_a_parameter_that_measuring_changes_is_refused(data: bool) -> None:
    class Changes(NetTask):
        puts_back = False

        def metrics(self, model: nn.Module, batch: Any, samples: int) -> Mapping[str, Metric]:
            weight = model.get_parameter("last.weight")
            kept = weight.detach().clone()
            (weight.data if data else weight.detach()).mul_(2)
            if self.puts_back:
                weight.data.copy_(kept)
            return {}

    task = Changes()
    model = task.model()
    task.puts_back = True  # as who measures an average of the parameters does
    parts(task, model, 1)
    task.puts_back = False
    with pytest.raises(TaskError, match=r"measuring .* changed the parameter 'last\.weight'"):
        parts(task, model, 1)
    assert model.training


class Gives(NetTask):
    """Metrics as a test wants them."""

    gives: Any = None
    weighs: Any = None

    def metrics(self, model: nn.Module, batch: Any, samples: int) -> Any:
        return super().metrics(model, batch, samples) if self.gives is None else self.gives(samples)

    def weight(self, batch: Any, samples: int) -> Any:
        return super().weight(batch, samples) if self.weighs is None else self.weighs(batch)


@pytest.mark.parametrize(
    "number",
    [float, int, torch.tensor, np.float32, np.int64, lambda n: torch.tensor(n, dtype=torch.int8)],
    ids=["float", "int", "tensor", "float32", "int64", "int8"],
)
def test_numbers_are_means_over_samples(number: Any) -> None:
    task = Gives()
    task.gives = lambda samples: {"size": number(samples)}
    for size in (1, 3):
        merged = merge_all(parts(task, task.model(), size, batch=32))
        assert merged["size"] == Mean(total=32.0 * 32 + 32.0 * 32 + 6.0 * 6, weight=70.0)
        assert json.loads(json.dumps(states_of(merged)))["size"]["weight"] == 70.0


def test_a_weight_may_be_a_tensor() -> None:
    task, plain = Gives(), Gives()
    task.weighs = lambda batch: (1 + batch[1]).sum()
    torch.default_generator.manual_seed(1)
    model = task.model()
    (found,), (wanted,) = parts(task, model, 1), parts(plain, model, 1)
    assert found == wanted
    assert type(found["loss"].to_values()["weight"]) is float


class Told(Metric):
    """State that cannot be told."""

    kind = "told"

    def merge(self, other: Told) -> Told:
        raise ValueError("cannot be merged")

    def value(self) -> float:
        return 0.0

    def to_values(self) -> dict[str, Any]:
        return {"seen": self.seen}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Told:
        return cls(values["seen"])

    def __init__(self, seen: Any) -> None:
        self.seen = seen


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda _: 1 / 0, "measuring the held-out samples raised ZeroDivisionError"),
        (lambda _: 0.5, "Task.metrics returned float"),
        (lambda _: {"acc": None}, "Task.metrics gave 'acc' as NoneType"),
        (lambda _: {"acc": torch.ones(2)}, r"gave 'acc' as Tensor of shape \(2,\)"),
        (lambda _: {"acc": "0.5"}, "gave 'acc' as str"),
        (lambda _: {3: 0.5}, "gave the name 3, a int"),
        (lambda _: {"acc": Mean(total=1.0, weight=float("nan"))}, "finite weight >= 0, got nan"),
        (lambda _: {"acc": Told(torch.ones(1))}, r"to_values of 'acc' \(Told\) raised TypeError"),
        (lambda _: {"acc": Told(1)}, "merging what Task.metrics gave raised ValueError: cannot"),
    ],
    ids=["raises", "number", "none", "shape", "text", "name", "weight", "state", "merge"],
)
def test_what_cannot_be_merged_is_found_by_trying_it(gives: Any, says: str) -> None:
    task = Gives()
    task.gives = gives
    model = task.model()
    with pytest.raises(TaskError, match=says):
        try_metrics(job(), task, model, task.data(None).train)
    assert model.training


def test_trying_takes_a_micro_batch_and_leaves_no_trace() -> None:
    seen: list[int] = []
    task = Gives(norm=True)
    task.gives = lambda samples: seen.append(samples) or {}
    model = task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try_metrics(job(micro_batch=4), task, model, task.data(None).train)
    try_metrics(job(micro_batch=4, evaluate={"batch": 3}), task, model, task.data(None).train)
    try_metrics(job(micro_batch=4, evaluate={"max_samples": 1}), task, model, task.data(None).train)
    try_metrics(job(), task, model, [])  # type: ignore[arg-type]
    assert seen == [4, 3, 1]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


class Encoded(UserDict):  # type: ignore[type-arg]
    """Keys are attributes, too, as in the batches of tokenizers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_batch_is_measured_as_it_is_trained_on() -> None:
    class Attributes(NetTask):
        def batch(self, samples: Any, rng: Any) -> Any:
            points, labels = super().batch(samples, rng)
            return Encoded(points=points, labels=labels)

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            assert type(batch) is Encoded
            return super().loss(model, (batch.points, batch.labels))

        def weight(self, batch: Any, samples: int) -> float:
            return float((1 + batch.labels).sum())

    task = Attributes()
    torch.default_generator.manual_seed(1)
    model = task.model()
    assert parts(task, model, 1) == parts(NetTask(), model, 1)
