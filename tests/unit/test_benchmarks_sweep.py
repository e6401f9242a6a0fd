"""What the benchmarks of sweeps compute of their measurements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.sweep_modes import Images, hypervolume, images, of_many, saved

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


def test_images_that_are_made_up_are_the_same_each_time() -> None:
    one, other = ([*images(5, ())] for _ in range(2))
    assert all((a == b).all() for (a, _), (b, _) in zip(one, other, strict=True))
    pixels, labels = Images().batch(one, None)
    assert pixels.shape == (5, 3, 32, 32)
    assert float(pixels.abs().max()) <= 1.0
    assert labels.shape == (5,)
