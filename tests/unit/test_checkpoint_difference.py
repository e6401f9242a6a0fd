"""How far two checkpoints are apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.checkpoint import open_store
from raycloud.checkpoint.difference import compared, difference
from raycloud.errors import CheckpointError


def state(**changes: Any) -> dict[str, torch.Tensor]:
    tensors = {
        "model/weight": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "model/count": torch.tensor(3),
        "optimizer/weight/exp_avg": torch.tensor([0.5, 0.25], dtype=torch.float64),
        "optimizer/weight/step": torch.tensor(7.0),
    }
    return tensors | {name.replace("__", "/"): value for name, value in changes.items()}


def test_the_same_state_is_not_apart() -> None:
    found = compared(state(), state(), step=4)
    assert (found.largest, found.parameters, found.tensors, found.step) == (0.0, 0.0, 4, 4)
    assert found.precision == "float64"


def test_the_largest_difference_is_found_and_named() -> None:
    other = state(
        model__weight=torch.tensor([1.0, 2.25], dtype=torch.float64),
        optimizer__weight__exp_avg=torch.tensor([1.0, 0.25], dtype=torch.float64),
    )
    found = compared(state(), other, step=4)
    assert (found.largest, found.tensor) == (0.5, "optimizer/weight/exp_avg")
    assert found.parameters == 0.25


def test_counters_are_compared_too() -> None:
    found = compared(state(), state(model__count=torch.tensor(5)), step=4)
    assert (found.largest, found.tensor) == (2.0, "model/count")


def test_what_is_not_a_number_is_infinitely_far() -> None:
    broken = torch.tensor([math.nan, 2.0], dtype=torch.float64)
    assert compared(state(), state(model__weight=broken), step=4).largest == math.inf


def test_the_least_precise_parameter_counts() -> None:
    less = state(model__bias=torch.zeros(2, dtype=torch.bfloat16), model__scale=torch.zeros(2))
    assert compared(less, less, step=4).precision == "bfloat16"


def test_other_names_or_shapes_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"only one of the two .* 'model/bias'"):
        compared(state(), state(model__bias=torch.zeros(2)), step=4)
    with pytest.raises(CheckpointError, match="'model/weight' has two shapes"):
        compared(state(), state(model__weight=torch.zeros(3)), step=4)


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        difference(open_store(str(tmp_path / "a")), open_store(str(tmp_path / "b")))
