"""What do an image and a text say together? A ResNet and a BERT into one classifier.

Without a `data.path` both are made up, by the generators of `resnet.py` and `bert.py`: the class is
the pair of what the image shows and what the text is about, so that neither alone tells it. Real
rows come as Parquet files with `train`, and `test` or `valid`, in their names, of columns `image`
(bytes of a JPEG or PNG), `text` and `label`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from bert import Bert, Texts, measured, topics
from cifar import shifted
from resnet import ResNet, stripes
from torch import Tensor, nn
from torch.nn import functional as F

from raycloud import Metric, Source, Splits
from raycloud.data.images import decode

if TYPE_CHECKING:
    import numpy as np

    from raycloud.rows import Rows

TOLD_BY_EACH = 4  # made-up classes of images, and of texts: their pairs are the classes


class Both(nn.Module):
    """Features of an image and of a text, side by side, into one classifier.

    Args:
        sees: Images in, `features` values out.
        reads: Tokens in, as many out.
        features: Of each of the two.
        classes: Logits that come out.
    """

    def __init__(self, sees: ResNet, reads: Bert, *, features: int, classes: int) -> None:
        super().__init__()
        self.sees, self.reads = sees, reads
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(2))
        self.head = nn.Sequential(
            nn.Linear(2 * features, 2 * features), nn.GELU(), nn.Linear(2 * features, classes)
        )

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        parts = (self.sees(images), self.reads(tokens))
        normed = [norm(part) for norm, part in zip(self.norms, parts, strict=True)]
        return self.head(torch.cat(normed, 1))


class Pairs(Texts):
    """What is trained. Tokens, optimizer and schedule are those of `bert.py`.

    Args:
        features: Values that stand for an image, and for a text.
        image_depth: Of the ResNet: 18 or 50.
        image_width: Channels of its first stage.
        size: Pixels each way.
        classes: How many, where labels are numbers.
        settings: Those of `bert.py`.
    """

    def __init__(
        self, *, features: int = 32, image_depth: int = 18, image_width: int = 16, size: int = 32,
        classes: int = TOLD_BY_EACH**2, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(classes=classes, **settings)
        self.features, self.size = features, size
        self.seen = {"depth": image_depth, "width": image_width, "size": size}

    def model(self) -> Both:
        return Both(
            ResNet(outputs=self.features, **self.seen),
            self.encoder(self.features),
            features=self.features,
            classes=self.classes,
        )

    def data(self, path: str | None) -> Splits:
        if path is None:
            count, apart = self.made_up, self.made_up // 4
            return Splits(
                train=pairs(count, 1, size=self.size), held_out=pairs(apart, 3, size=self.size)
            )
        splits = super().data(path)
        columns = ("image", "text", "label")
        asked = {"columns": columns, "required": columns, "format": "parquet"}
        train, held_out = (replace(one, **asked) for one in (splits.train, splits.held_out))
        return Splits(train=train, held_out=held_out)

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        images = decode(rows["image"], size=(self.size, self.size))
        return {"image": images, **super().preprocess(rows)}

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> dict[str, Tensor]:
        images = samples["image"]
        if rng is not None:
            images = shifted(images, rng, most=self.size // 8)
        return {"image": torch.from_numpy(images), **super().batch(samples, rng)}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["image"], batch["tokens"]), batch["label"])

    def metrics(
        self, model: nn.Module, batch: Mapping[str, Tensor], samples: int
    ) -> dict[str, Metric]:
        return measured(model(batch["image"], batch["tokens"]), batch["label"])


def pairs(count: int, seed: int, *, size: int) -> Source:
    """Made-up images beside made-up texts, of columns `image`, `text` and `label`."""
    images = stripes(count, seed, size=size, classes=TOLD_BY_EACH).dataset
    texts = topics(count, seed + 1, classes=TOLD_BY_EACH, names=()).dataset
    label = TOLD_BY_EACH * images["label"].to_numpy() + texts["label"].to_numpy()
    table = pa.table({"image": images["image"], "text": texts["text"], "label": label})
    return Source(dataset=table, key=f"pairs {count}, {size}, {seed}")
