"""The benchmark's own tasks."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor, nn

from raycloud import Splits, Task
from raycloud.data.images import decode
from raycloud.task import Source

if TYPE_CHECKING:
    from raycloud.rows import Rows

SIDE = 32  # pixels of an image


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


class Decoded(Task):
    """Images that are decoded, turned, cropped and flipped for each batch, and a small network.

    Its matrix products go by libraries that ask the processor themselves; its Mish activations are
    torch's own kernels, which `ATEN_CPU_CAPABILITY` keeps from wide instructions.

    Args:
        width: Channels.
        depth: Layers behind the first.
        enlarged: By how much an image is enlarged before it is turned and cropped.
    """

    def __init__(self, *, width: int = 32, depth: int = 4, enlarged: int = 4) -> None:
        self.width, self.depth, self.enlarged = width, depth, enlarged

    def data(self, path: str | None) -> Splits:
        """JPEGs, as they are."""
        return Splits(train=Source(path=path, format="parquet", columns=["image", "label"]))

    def batch(self, samples: Rows, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Decode and augment, each image by itself."""
        side, made = SIDE * self.enlarged, []
        for jpeg in samples["image"]:
            image = Image.open(io.BytesIO(jpeg)).convert("RGB")
            image = image.resize((side, side), Image.Resampling.LANCZOS)
            image = image.rotate(rng.uniform(-15.0, 15.0), resample=Image.Resampling.BICUBIC)
            left, top = rng.uniform(0.0, side / 8, 2)
            box = (left, top, left + 7 * side / 8, top + 7 * side / 8)
            small = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box)
            pixels = np.asarray(small)
            made.append(pixels[:, ::-1] if rng.random() < 0.5 else pixels)
        x = torch.from_numpy(np.ascontiguousarray(np.stack(made)))
        labels = torch.from_numpy(np.asarray(samples["label"], dtype=np.int64).copy())
        return x, labels

    def model(self) -> nn.Module:
        """Convolutions and activations, their mean, and a line."""
        layers: list[nn.Module] = [nn.Conv2d(3, self.width, 3, 2, padding=1), nn.Mish()]
        for _ in range(self.depth):
            layers += [nn.Conv2d(self.width, self.width, 1), nn.Mish()]
        head = nn.Linear(self.width, 10)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy."""
        x, labels = batch
        return nn.functional.cross_entropy(
            model(x.permute(0, 3, 1, 2).float() / 64.0 - 2.0), labels
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """With momentum."""
        return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


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
