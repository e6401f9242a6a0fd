"""The benchmark's own tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from raycloud import Splits, Task
from raycloud.data.images import decode
from raycloud.task import Source

if TYPE_CHECKING:
    from raycloud.rows import Rows


class Images(Task):
    """JPEGs in Parquet files, decoded; a model that is next to nothing, so that data is all.

    Args:
        times: Each pixel becomes a square of so many, for data that takes more memory.
    """

    def __init__(self, *, times: int = 1) -> None:
        self.times = times

    def data(self, path: str | None) -> Splits:
        """All files of a directory."""
        return Splits(train=Source(path=path, format="parquet", columns=["image", "label"]))

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        """Decode."""
        images = decode(rows["image"])
        if self.times > 1:
            images = images.repeat(self.times, axis=1).repeat(self.times, axis=2)
        return {"image": images, "label": rows["label"]}

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> dict[str, Tensor]:  # noqa: ARG002
        """Tensors of the same memory."""
        return {name: torch.from_numpy(samples[name]) for name in ("image", "label")}

    def model(self) -> nn.Module:
        """From an image's mean to its class."""
        return nn.Linear(1, 10)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Reads every pixel."""
        words = batch["image"].flatten(1).view(torch.int64).sum(1, keepdim=True)
        logits = model((words % 256) / 256.0)
        return nn.functional.cross_entropy(logits, batch["label"].long())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The simplest."""
        return torch.optim.SGD(model.parameters(), 0.01)


class Numbered(Task):
    """Rows that are nothing but their number; a batch shows which they were."""

    def __init__(self, *, rows: int) -> None:
        self.rows = rows

    def data(self, path: str | None) -> Splits:  # noqa: ARG002
        """Numbers from 0 on."""
        table = pa.table({"number": np.arange(self.rows)})
        return Splits(train=Source(dataset=table, key=f"numbers to {self.rows}"))

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> Tensor:  # noqa: ARG002
        """The numbers."""
        return torch.from_numpy(samples["number"])

    def model(self) -> nn.Module:
        """Never trained."""
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Never asked for."""
        return model(batch[:, None].float()).mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Never asked for."""
        return torch.optim.SGD(model.parameters(), 0.1)
