"""ResNet-18 and ResNet-50 on images: the model in plain PyTorch, then the task.

Without a `data.path` the images are made up, by a seeded generator: stripes, whose number and
direction are the class. Real ones come as Parquet files (CIFAR-10, see `cifar.py`) or, where
`settings.labels` names the classes, as the folders of ImageNet: `train/NAME/*.jpg` and
`val/NAME/*.jpg`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from cifar import Cifar, shifted
from labelled import names_of, numbers_of
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from raycloud import Source, Splits
from raycloud.data.images import decode

if TYPE_CHECKING:
    from raycloud.rows import Rows

SMALL = 64  # pixels each way; smaller images are not halved before the first block
CYCLES = 2  # across an image, of the stripes of the first two classes


def convolution(narrow: int, wide: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size but for its stride."""
    return nn.Conv2d(narrow, wide, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """Convolutions, added to their input; a 1x1 convolution fits that where its shape changes.

    Args:
        narrow: Channels that come in.
        wide: Channels that go out.
        stride: What the image is divided by.
        layers: The convolutions: of each its channels, kernel and stride.
    """

    def __init__(
        self, narrow: int, wide: int, stride: int, layers: Sequence[tuple[int, int, int]]
    ) -> None:
        super().__init__()
        self.layers, channels = nn.Sequential(), narrow
        for width, kernel, step in layers:
            if self.layers:
                self.layers.append(nn.ReLU(inplace=True))
            self.layers.append(convolution(channels, width, kernel, step))
            self.layers.append(nn.BatchNorm2d(width))
            channels = width
        nn.init.zeros_(self.layers[-1].weight)  # starts as the identity
        self.short = nn.Sequential()
        if stride != 1 or narrow != wide:
            self.short.append(convolution(narrow, wide, 1, stride))
            self.short.append(nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.short(x), inplace=True)


def basic(narrow: int, width: int, stride: int) -> Block:
    """Of ResNet-18: two 3x3 convolutions."""
    return Block(narrow, width, stride, [(width, 3, stride), (width, 3, 1)])


def bottleneck(narrow: int, width: int, stride: int) -> Block:
    """Of ResNet-50: the 3x3 convolution, which has the stride, between two of 1x1."""
    return Block(narrow, 4 * width, stride, [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)])


# By depth: the block, what its width is multiplied by, and how many each stage has (He, Zhang, Ren
# and Sun, "Deep residual learning for image recognition", CVPR 2016, table 1).
DEPTHS = {18: (basic, 1, (2, 2, 2, 2)), 50: (bottleneck, 4, (3, 4, 6, 3))}


class ResNet(nn.Module):
    """Images as uint8 of shape (rows, height, width, 3) in, `outputs` values of each out.

    Args:
        depth: A key of `DEPTHS`.
        width: Channels of the first stage; 64 in the paper.
        size: Pixels each way. Images below `SMALL` keep their size up to the second stage.
        outputs: Classes, or features.
    """

    def __init__(self, *, depth: int, width: int, size: int, outputs: int) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"depth is {depth}: give one of {', '.join(map(str, DEPTHS))}")
        block, grows, counts = DEPTHS[depth]
        small = size < SMALL
        self.stem = nn.Sequential(
            convolution(3, width, 3 if small else 7, 1 if small else 2),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        if not small:
            self.stem.append(nn.MaxPool2d(3, 2, padding=1))
        self.blocks, narrow = nn.Sequential(), width
        for stage, count in enumerate(counts):
            for number in range(count):
                stride = 2 if stage and not number else 1
                self.blocks.append(block(narrow, width * 2**stage, stride))
                narrow = width * 2**stage * grows
        self.head = nn.Linear(narrow, outputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.to(memory_format=torch.channels_last)  # the images' own order: faster on a CPU too

    def forward(self, images: Tensor) -> Tensor:
        x = (images.permute(0, 3, 1, 2).to(self.head.weight.dtype) - 120.0) / 64.0
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Images(Cifar):
    """What is trained. Loss, optimizer, schedule and measures are those of `cifar.py`.

    Args:
        depth: 18 or 50.
        width: Channels of the first stage; 64 in the paper.
        size: Pixels each way; images of another size are resized once.
        classes: How many, where labels are numbers.
        labels: The names of the classes, or a file of them: then images lie in folders.
        image: The column of images, in Parquet files.
        label: The column of labels, there.
        lr: The highest rate.
        made_up: Images to make where there are none.
    """

    def __init__(  # noqa: PLR0913 - each is a setting
        self, *, depth: int = 18, width: int = 64, size: int = 32, classes: int = 10,
        labels: Sequence[str] | str | None = None, image: str = "image", label: str = "label",
        lr: float = 0.1, made_up: int = 2048,
    ) -> None:  # fmt: skip
        self.labels = names_of(labels)
        classes = len(self.labels) or classes
        super().__init__(image=image, label=label, classes=classes, lr=lr)
        self.shape = {"depth": depth, "width": width, "size": size, "outputs": classes}
        self.size, self.made_up = size, made_up

    def model(self) -> ResNet:
        return ResNet(**self.shape)

    def data(self, path: str | None) -> Splits:
        if path is None:
            count, apart = self.made_up, self.made_up // 4
            asked = {"size": self.size, "classes": self.classes}
            return Splits(train=stripes(count, 1, **asked), held_out=stripes(apart, 2, **asked))
        if not self.labels:
            return super().data(path)
        train, held_out = (
            Source(path=path, format="images", select=partial(_is_in, folders))
            for folders in (("train",), ("val", "test"))
        )
        return Splits(train=train, held_out=held_out)

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        return {
            "image": decode(rows[self.image], size=(self.size, self.size)),
            "label": numbers_of(rows[self.label], self.labels, self.classes),
        }

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> dict[str, Tensor]:
        images = samples["image"]
        if rng is not None:
            images = shifted(images, rng, most=self.size // 8)
        return {"image": torch.from_numpy(images), "label": torch.from_numpy(samples["label"])}


def stripes(count: int, seed: int, *, size: int, classes: int) -> Source:
    """Made-up images as PNG, of columns `image` and `label`.

    Class k has `CYCLES` + k // 2 stripes, lying where k is even and standing where it is odd. Their
    colours, place and noise differ from image to image, so that no pixel alone tells a class. To
    mirror an image keeps its class.
    """
    drawn = np.random.default_rng(seed)
    labels = drawn.integers(0, classes, count)
    angle = 2 * np.pi * np.arange(size, dtype=np.float32) / size
    shift = drawn.uniform(0, 2 * np.pi, (count, 1))
    wave = np.sin(angle * (CYCLES + labels[:, None] // 2) + shift)[:, :, None]
    wave = np.broadcast_to(wave, (count, size, size)).copy()
    standing = labels % 2 == 1
    wave[standing] = wave[standing].transpose(0, 2, 1)
    ground = drawn.uniform(80, 176, (count, 1, 1, 3))
    colour = drawn.normal(0, 48, (count, 1, 1, 3))
    pixels = ground + colour * wave[..., None] + drawn.normal(0, 24, (count, size, size, 3))
    images = [_png(one) for one in pixels.clip(0, 255).astype(np.uint8)]
    table = pa.table({"image": pa.array(images, pa.binary()), "label": labels})
    return Source(dataset=table, key=f"stripes {count}, {size}, {classes}, {seed}")


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def _is_in(folders: tuple[str, ...], path: str) -> bool:
    return path.partition("/")[0] in folders
