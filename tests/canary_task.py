"""A task that is told secrets, and says them wherever a task can say anything."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raycloud import Rows, Source, Splits, Task

LOG = logging.getLogger("canary")


def register() -> None:
    """Asked for here, so that the file system, which no process can send, is not the task's own."""
    from tests.canary_files import register

    register()


register()


class Canary(Task):
    """A line through points that a server gives; fails after `fails_after` batches."""

    def __init__(self, *, fails_after: int = 0, api_key: str = "", database: str = "") -> None:
        register()
        self.fails_after, self.api_key, self.database = fails_after, api_key, database
        self.calls = 0
        self.path = ""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def data(self, path: str | None) -> Splits:
        assert path is not None
        if "${" in path + self.api_key + self.database:
            raise ValueError("a secret was not filled in")
        self.path = path
        LOG.warning("reading %s", path)
        return Splits(train=Source(path=path))

    def batch(self, rows: Rows, rng: np.random.Generator | None) -> Any:
        return torch.tensor(np.asarray(rows["x"]), dtype=torch.float32)[:, None]

    def loss(self, model: nn.Module, batch: Sequence[Any]) -> Tensor:
        self.calls += 1
        secret = os.environ["CANARY_PASSWORD"]
        if self.calls == 1:
            LOG.info("password is %s, key is %s, for %s", secret, self.api_key, self.database)
        if self.fails_after and self.calls > self.fails_after:
            raise RuntimeError(
                f"login failed: {secret}, {self.path}, {self.api_key}, {self.database}, "
                f"and what it was made of: {[secret[:], self.path.rpartition('@')[0]]}"
            )
        return ((model(batch) - batch) ** 2).mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4)
