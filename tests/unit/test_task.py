"""The user's contract, and what it gives for free."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raycloud.metrics import Mean
from raycloud.task import Splits, Task


class Line(Task):
    """No more than must be."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def data(self, path: str | None) -> Splits:
        return Splits(train=[(torch.ones(2), 1.0)])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss: Tensor = (model(x)[:, 0] - y).square().mean()
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("left_out", ["model", "data", "loss", "optimizer"])
def test_four_methods_must_be_given(left_out: str) -> None:
    methods = {name: getattr(Line, name) for name in ("model", "data", "loss", "optimizer")}
    del methods[left_out]
    with pytest.raises(TypeError, match=rf"abstract method '?{left_out}\b"):
        type("Half", (Task,), methods)()


def test_defaults() -> None:
    task = Line()
    optimizer = task.optimizer(task.model())
    assert task.scheduler(optimizer, 10) is None
    assert task.sample(task.model()) is None
    assert task.weight(None, 7) == 7.0
    assert task.data(None).held_out is None


def test_samples_are_collated_as_torch_does() -> None:
    x, y = Line().batch([(torch.ones(2), 1.0), (torch.zeros(2), 2.0)], None)
    assert x.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert y.tolist() == [1.0, 2.0]
    assert Line().batch(({"a": 1}, {"a": 2}), None)["a"].tolist() == [1, 2]


def test_the_metric_is_the_weighted_mean_loss() -> None:
    class Weighted(Line):
        def weight(self, batch: Any, samples: int) -> float:
            return samples * 2.5

    task = Weighted()
    model = task.model()
    batch = task.batch([(torch.ones(2), 1.0), (torch.zeros(2), 2.0)], None)
    with torch.no_grad():
        loss = float(task.loss(model, batch))
        (name, metric), *rest = task.metrics(model, batch, 2).items()
    assert (name, rest) == ("loss", [])
    assert metric == Mean(total=loss * 5.0, weight=5.0)


def test_splits_are_frozen_and_named() -> None:
    splits = Splits(train=[1])
    with pytest.raises(FrozenInstanceError):
        splits.train = [2]  # type: ignore[misc]
    with pytest.raises(TypeError):
        Splits([1])  # type: ignore[call-arg]


def test_the_contract_is_read_without_torch() -> None:
    code = "import sys, raycloud.task; print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
