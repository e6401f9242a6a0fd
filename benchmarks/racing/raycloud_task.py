"""The testbed's workload as a raycloud task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.journal import Journal
from benchmarks.workload import build_model, build_optimizer, load_text, loss_of, windows
from raycloud import Splits, Task


class Race(Task):
    """A byte-level GPT whose workers note their updates as the peers' workers do.

    Args:
        journals: Directory of the journals.
        snapshots: Directory of the parameters.
        global_batch: Samples of an update.
        learning_rate: Of AdamW.
        small: Whether the model is the small one.
    """

    def __init__(
        self,
        *,
        journals: str,
        snapshots: str,
        global_batch: int,
        learning_rate: float,
        small: bool = False,
    ) -> None:
        self._journals, self._snapshots = Path(journals), Path(snapshots)
        self._global_batch = global_batch
        self._learning_rate = learning_rate
        self._small = small

    def model(self) -> nn.Module:
        """The same initial weights as everyone's."""
        return build_model(small=self._small)

    def data(self, path: str | None) -> Splits:  # noqa: ARG002
        """The same samples as everyone's; held-out loss is computed by the benchmark."""
        return Splits(train=windows(load_text()))

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Tensor:  # noqa: ARG002
        """Windows as int64."""
        return torch.from_numpy(np.stack(samples)).long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean nats per byte."""
        return loss_of(model, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The same AdamW as everyone's; each of its steps is an update that was committed."""
        optimizer = build_optimizer(model, learning_rate=self._learning_rate)
        journal = Journal(self._journals, snapshots=self._snapshots)
        first = next(model.parameters())

        def note(*_: object) -> None:
            # The optimizer's own count is restored with it: the numbering survives a restart.
            update = int(optimizer.state[first]["step"])
            journal.note(update=update, samples=self._global_batch)
            journal.snapshot(model, update)

        optimizer.register_step_post_hook(note)
        return optimizer
