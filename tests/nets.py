"""Models that are hard to split, each for one reason; they classify what `NetTask` feeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.lockstep import NetTask


class Normed(nn.Module):
    """Batch normalisation applied `times` times in each forward pass."""

    def __init__(self, *, momentum: float | None = 0.1, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)  # before statistics a bias has no gradient
        self.norm = nn.BatchNorm1d(8, momentum=momentum)
        self.last = nn.Linear(8, 3)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(self.times):
            hidden = torch.tanh(self.norm(hidden))
        out: Tensor = self.last(hidden)
        return out


class Sometimes(Normed):
    """Batch normalisation that only some micro-batches go through."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(self.norm(hidden) if x[0, 0] > 0 else hidden)
        return out


class Frozen(Normed):
    """Batch normalisation that stays in `eval` mode, as when fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


class Counting(nn.Module):
    """Keeps a count and a running mean in buffers of its own; may begin only after some passes."""

    seen: Tensor
    passes: Tensor

    def __init__(self, *, after: int = 0, replaced: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(6.0))  # never changes
        self.left, self.replaced = after, replaced

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            mean = x.detach().mean(0).to(self.seen.dtype)
            if self.replaced:
                self.seen = 0.5 * self.seen + mean
                self.passes = self.passes + 1
            else:
                self.seen.mul_(0.5).add_(mean)
                self.passes += 1
        out: Tensor = self.layer(x)
        return out


class BuiltTask(NetTask):
    """`NetTask` with another model."""

    def __init__(self, build: Callable[[], nn.Module], **settings: Any) -> None:
        super().__init__(**settings)
        self.build = build

    def model(self) -> nn.Module:
        return self.build().double() if self.double else self.build()
