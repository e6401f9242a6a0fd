"""What the benchmarks of sweeps compute of their measurements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.sweep_modes import Images, hypervolume, images, of_many, saved
from benchmarks.thin_sweep import summary

pytestmark = pytest.mark.unit


class Slope(Images):
    """Its loss is the product of a vector and a sample, whose gradient is that sample."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(batch[0]).mean()
        return found


def test_the_variance_of_single_samples_is_found_from_parts() -> None:
    draws = torch.Generator().manual_seed(0)
    points = 0.2 + torch.randn(6400, 8, generator=draws, dtype=torch.float64)
    model = nn.Linear(8, 1, bias=False).double()
    variance, signal = of_many(Slope(), model, (points, torch.zeros(6400)), size=16)
    assert variance == pytest.approx(float(points.var(dim=0).sum()), rel=0.1)
    mean = points.mean(dim=0)
    assert signal == pytest.approx(float(mean @ mean) - variance / 6400, rel=1e-9)


def test_the_area_of_a_front() -> None:
    assert hypervolume([(1.0, 2.0), (2.0, 1.0)], (3.0, 3.0)) == 3.0
    assert hypervolume([(1.0, 2.0), (2.0, 1.0), (2.5, 2.5), (2.0, 1.5)], (3.0, 3.0)) == 3.0
    assert hypervolume([], (3.0, 3.0)) == 0.0


def test_what_early_stops_save_is_the_median_over_seeds() -> None:
    rows = [
        {"seed": seed, "scheduler": how, "samples": samples}
        for seed, (none, asha) in enumerate([(100, 50), (100, 10), (100, 25)])
        for how, samples in (("none", none), ("asha", asha))
    ]
    assert saved(rows) == 4.0


def test_a_point_is_sooner_by_its_median() -> None:
    took = {0: [30.0, 29.0, 31.0], 1: [25.0, 33.0, 32.0], 2: [29.5], 3: [math.inf]}
    found = summary(0, took, [40.0, 34.0, 36.0], 150.0)
    assert found["seconds"] == {"best": 30.0, "auto": 36.0, "exact": 150.0}
    assert (found["than_auto"], found["than_exact"]) == (1.2, 5.0)
    assert found["kept"]
    took[1] = [25.0, 29.0, 32.0]
    found = summary(0, took, [40.0], 150.0)
    assert found["sooner_than_the_best"] == [1]
    assert not found["kept"]
    assert not summary(0, {0: [30.0]}, [32.0], 150.0)["kept"]
    assert not summary(0, {0: [30.0]}, [math.nan], 150.0)["kept"]


def test_images_that_are_made_up_are_the_same_each_time() -> None:
    one, other = ([*images(5, ())] for _ in range(2))
    assert all((a == b).all() for (a, _), (b, _) in zip(one, other, strict=True))
    pixels, labels = Images().batch(one, None)
    assert pixels.shape == (5, 3, 32, 32)
    assert float(pixels.abs().max()) <= 1.0
    assert labels.shape == (5,)
