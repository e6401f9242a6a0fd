"""The workload as a raycloud task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.marks import Marker
from benchmarks.workload import build_model, build_optimizer, load_text, loss_of, windows
from raycloud import Splits, Task


class Throughput(Task):
    """A byte-level GPT that notes its own speed."""

    def __init__(self, *, marks: str, steps: int) -> None:
        """Marks go to the directory `marks` once `steps` steps are done."""
        self._marker = Marker(Path(marks), steps)

    def model(self) -> nn.Module:
        """The same initial weights as everyone's."""
        return build_model()

    def data(self, path: str | None) -> Splits:  # noqa: ARG002
        """The same samples as everyone's; nothing is held out."""
        return Splits(train=windows(load_text()))

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Tensor:  # noqa: ARG002
        """Windows as int64."""
        return torch.from_numpy(np.stack(samples)).long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean nats per byte."""
        loss = loss_of(model, batch)
        self._marker.saw(loss)
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The same AdamW as everyone's, marked after each step."""
        optimizer = build_optimizer(model)
        self._marker.attach(optimizer)
        return optimizer
