"""Measuring the held-out samples: the same for any number of members, and without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from raycloud.errors import TaskError
from raycloud.metrics import Accuracy, Mean, Metric, merge_all
from raycloud.training.evaluate import evaluate, show
from tests.lockstep import NetTask, job


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
    return [evaluate(asked, task, model, samples, rank=r, size=size) for r in range(size)]


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
    assert show(job(), task, model) == "like this"
    task.fails = True
    assert show(job(), task, model) == "Task.sample raised ValueError: nothing to show"
    assert model.training
    assert show(job(), NetTask(), model) is None


def test_bf16_is_measured_in_bf16() -> None:
    seen: list[torch.dtype] = []

    class Looks(NetTask):
        def metrics(self, model: nn.Module, batch: Any, samples: int) -> Mapping[str, Metric]:
            assert isinstance(model.first, nn.Linear)
            seen.append(model.first(batch[0]).dtype)
            return {}

    task = Looks(double=False)
    samples = task.data(None).train
    evaluate(job(precision="bf16"), task, task.model(), samples, rank=0, size=1)
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
        [evaluate(asked, task, model, samples, rank=r, size=size) for r in range(size)]
    )
    assert samples.asked == [list(range(32)), list(range(32, 64)), list(range(64, 70))]
    assert merged == merge_all(parts(task, model, size, batch=32))
