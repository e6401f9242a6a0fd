"""Which of two rings a point lies on: small, in float64, and as slow as one likes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

from raycloud import Splits, Task


class Rings(Task):
    """Two rings that noise makes overlap.

    Args:
        samples: Points.
        width: Of the hidden layers.
        sample_s: Seconds that each sample takes beside its arithmetic, as a larger model's would.
    """

    def __init__(self, *, samples: int = 2000, width: int = 32, sample_s: float = 0.0) -> None:
        self.samples, self.width, self.sample_s = samples, width, sample_s

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            nn.Linear(2, width),
            nn.Tanh(),
            nn.LayerNorm(width),
            nn.Dropout(0.1),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 2),
        ).double()

    def data(self, path: str | None) -> Splits:
        rng = np.random.default_rng(7)
        ring = rng.integers(0, 2, self.samples)
        angle = rng.uniform(0.0, 2 * np.pi, self.samples)
        radius = 1.0 + 0.5 * ring + rng.normal(0.0, 0.15, self.samples)
        points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        whole = TensorDataset(torch.from_numpy(points), torch.from_numpy(ring))
        held_out = self.samples // 10
        train, rest = random_split(
            whole, [self.samples - held_out, held_out], generator=torch.Generator().manual_seed(1)
        )
        return Splits(train=train, held_out=rest)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, ring = batch
        if self.sample_s and model.training:
            threading.Event().wait(self.sample_s * len(ring))
        return F.cross_entropy(model(points), ring)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)
