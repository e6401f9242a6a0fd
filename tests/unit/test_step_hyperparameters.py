"""A run that goes on with other settings goes by those, and else by not a bit of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from raycloud.step.hyperparameters import Hyperparameters
from raycloud.step.state import ModelState

STEPS, BEFORE = 20, 8
Made = tuple[Hyperparameters, ModelState, torch.optim.Optimizer, Any]


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, STEPS)


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    first = LinearLR(optimizer, 0.1, total_iters=5)
    return SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, STEPS - 5)], [5])


def root(optimizer: torch.optim.Optimizer) -> Any:
    return LambdaLR(optimizer, lambda step: 1 / math.sqrt(1 + step))


def constant(_: torch.optim.Optimizer) -> Any:
    return None


def made(schedule: Callable[[torch.optim.Optimizer], Any], **given: Any) -> Made:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}]
    optimizer = torch.optim.AdamW(groups, **{"lr": 0.1, **given})
    scheduler = schedule(optimizer)
    state = ModelState(model, optimizer, scheduler)
    return Hyperparameters(optimizer, scheduler), state, optimizer, scheduler


def trained(one: Made, steps: int) -> list[list[float]]:
    """The rates of both groups after each step."""
    _, _, optimizer, scheduler = one
    rates = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
    return rates


def gone_on(there: Made, here: Made) -> None:
    tensors = {name: tensor.clone() for name, tensor in there[1].tensors().items()}
    here[1].load(tensors, there[1].values())
    here[0].load({}, there[0].values())


@pytest.mark.parametrize("schedule", [constant, cosine, warmed, root])
def test_the_same_settings_change_not_a_bit(schedule: Any) -> None:
    there, here = made(schedule), made(schedule)
    trained(there, BEFORE)
    gone_on(there, here)
    assert trained(here, STEPS - BEFORE) == trained(there, STEPS - BEFORE)


@pytest.mark.parametrize("schedule", [constant, cosine, warmed, root])
def test_another_rate_takes_effect_where_the_schedule_stands(schedule: Any) -> None:
    there, here, whole = made(schedule), made(schedule, lr=0.02), made(schedule, lr=0.02)
    trained(there, BEFORE)
    gone_on(there, here)
    wanted = trained(whole, STEPS)[BEFORE:]
    for got, want in zip(trained(here, STEPS - BEFORE), wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-9, abs=1e-15)


def test_a_schedule_that_names_rates_itself_goes_by_the_new_ones() -> None:
    def cycle(most: float) -> Callable[[torch.optim.Optimizer], Any]:
        return lambda optimizer: OneCycleLR(optimizer, [most, most / 10], total_steps=STEPS)

    there, here, whole = made(cycle(0.1)), made(cycle(0.02)), made(cycle(0.02))
    trained(there, BEFORE)
    gone_on(there, here)
    wanted = trained(whole, STEPS - 1)[BEFORE:]
    for got, want in zip(trained(here, STEPS - 1 - BEFORE), wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-9, abs=1e-15)


def test_other_numbers_of_the_optimizer_take_effect_too() -> None:
    there, here = made(cosine), made(cosine, weight_decay=0.5, betas=(0.8, 0.9))
    trained(there, BEFORE)
    gone_on(there, here)
    group = here[2].param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))
    assert group["lr"] == there[2].param_groups[0]["lr"]
