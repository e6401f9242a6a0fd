"""A small ResNet on images in Parquet files: the model in plain PyTorch, then the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from raycloud import Accuracy, Mean, Metric, Source, Splits, Task
from raycloud.data.images import decode
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.rows import Rows

SIZE = 32  # pixels each way
SMOOTHING = 0.1  # of labels
WARM_UP = 0.2  # of all steps


class Residual(nn.Module):
    """Two convolutions, added to their input; the first may halve the image and widen it."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        nn.init.zeros_(self.norm2.weight)  # starts as the identity
        self.short = nn.Sequential()
        if stride != 1 or narrow != wide:
            self.short.append(nn.Conv2d(narrow, wide, 1, stride, bias=False))
            self.short.append(nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.first(x)), inplace=True)
        return F.relu(self.norm2(self.second(inner)) + self.short(x), inplace=True)


class ResNet(nn.Module):
    """Images as uint8 of shape (rows, height, width, 3) in, logits of their classes out.

    The first convolution already halves the image, which makes the network four times as fast on a
    CPU, for some points of accuracy.
    """

    def __init__(self, *, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        widths = [width * 2**stage for stage in range(3) for _ in range(depth)]
        self.blocks = nn.Sequential(
            *(
                Residual(narrow, wide, 1 if narrow == wide else 2)
                for narrow, wide in zip([width, *widths], widths, strict=False)
            )
        )
        self.head = nn.Linear(widths[-1], classes)
        self.to(memory_format=torch.channels_last)  # the images' own order: faster on a CPU too

    def forward(self, images: Tensor) -> Tensor:
        x = (images.permute(0, 3, 1, 2).float() - 120.0) / 64.0
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Cifar(Task):
    """What is trained: everything raycloud needs to know."""

    def __init__(self, *, image: str = "image", label: str = "label", classes: int = 10,
                 width: int = 32, depth: int = 1, lr: float = 0.4) -> None:  # fmt: skip
        self.image, self.label, self.classes = image, label, classes
        self.shape = {"width": width, "depth": depth, "classes": classes}
        self.lr = lr

    def model(self) -> ResNet:
        return ResNet(**self.shape)

    def data(self, path: str | None) -> Splits:
        if path is None:
            raise DataError(
                "cifar has no images of its own: data.path is not set",
                hint="pass --set data.path=DIRECTORY with Parquet files, 'train' or 'test' in "
                f"their names, of columns {self.image!r} (bytes of a JPEG or PNG) and "
                f"{self.label!r} (0 to {self.classes - 1}). CIFAR-10 so packed is the data set "
                "uoft-cs/cifar10 of the Hugging Face hub (add --set settings.image=img); its "
                "home is www.cs.toronto.edu/~kriz/cifar.html",
            )
        columns = (self.image, self.label)
        asked: dict[str, Any] = {
            "path": path, "format": "parquet", "columns": columns, "required": columns,
            "types": {self.label: "int64"},
        }  # fmt: skip
        return Splits(
            train=Source(**asked, select=_to_train), held_out=Source(**asked, select=_to_test)
        )

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        labels = rows[self.label]
        if len(wrong := labels[(labels < 0) | (labels >= self.classes)]):
            raise ValueError(f"label {wrong[0]} is not one of 0 to {self.classes - 1}")
        return {"image": decode(rows[self.image], size=(SIZE, SIZE)), "label": labels}

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> dict[str, Tensor]:
        images = samples["image"]
        if rng is not None:
            images = shifted(images, rng)
        return {
            "image": torch.from_numpy(images),
            "label": torch.from_numpy(samples["label"]),
        }

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["image"])
        return F.cross_entropy(logits, batch["label"], label_smoothing=SMOOTHING)

    def metrics(
        self, model: nn.Module, batch: Mapping[str, Tensor], samples: int
    ) -> dict[str, Metric]:
        logits, labels = model(batch["image"]).float(), batch["label"]
        right = int((logits.argmax(1) == labels).sum())
        loss = float(F.cross_entropy(logits, labels, reduction="sum"))
        return {
            "accuracy": Accuracy(right=right, count=samples),
            "loss": Mean(total=loss, weight=float(samples)),
        }

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kernels = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": kernels, "weight_decay": 5e-4}, {"params": others}]
        return torch.optim.SGD(groups, self.lr, momentum=0.9, nesterov=True)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        """Up to the full rate, then down to nothing, both in a straight line."""

        def rate(step: int) -> float:
            done = (step + 1) / (steps + 1)
            return min(done / WARM_UP, (1 - done) / (1 - WARM_UP))

        return LambdaLR(optimizer, rate)


def shifted(images: np.ndarray, rng: np.random.Generator, most: int = 4) -> np.ndarray:
    """Images moved by up to `most` pixels each way, black where nothing was; half of them mirrored.

    Shape (rows, height, width, 3) in and out.
    """
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    down, right = rng.integers(0, 2 * most + 1, (2, count, 1))
    lines, columns = down + np.arange(height), right + np.arange(width)
    mirrored = rng.integers(0, 2, count, dtype=bool)
    columns[mirrored] = columns[mirrored, ::-1]
    every = np.arange(count)[:, None, None]
    return padded[every, lines[:, :, None], columns[:, None, :]]


def _to_train(path: str) -> bool:
    return "train" in path.rsplit("/", 1)[-1]


def _to_test(path: str) -> bool:
    return "test" in path.rsplit("/", 1)[-1]
