"""Will a visitor buy? Embeddings and numbers into a small perceptron, from a CSV of sessions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from raycloud import Auc, Embedding, Mean, Metric, Source, Splits, Task
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.rows import Rows

LABEL = "MadePurchase"
NUMBERS = {  # mean and deviation of log1p, over the public file
    "AcctPagesViewed": (0.80, 0.86),
    "AcctPageTime": (2.31, 2.37),
    "InfoPagesViewed": (0.24, 0.50),
    "InfoPageTime": (0.84, 1.82),
    "ProductPagesViewed": (2.89, 1.12),
    "ProductPageTime": (5.96, 2.04),
    "AvgBounceRate": (0.021, 0.044),
    "AvgExitRate": (0.041, 0.044),
    "AvgPageValue": (0.62, 1.27),
    "ProximityToSpecialDay": (0.05, 0.15),
}
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "June", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
CATEGORIES = {  # what each may hold; anything else, or nothing, is one more category
    "VisitMonth": MONTHS,
    "UserOS": tuple(map(str, range(1, 9))),
    "UserBrowser": tuple(map(str, range(1, 14))),
    "UserRegion": tuple(map(str, range(1, 10))),
    "SourceChannel": tuple(map(str, range(1, 21))),
    "UserCategory": ("New_Visitor", "Other", "Returning_Visitor"),
    "IsWeekendVisit": ("FALSE", "TRUE"),
}
MOST = 64  # categories of a column
COLUMNS = (*NUMBERS, *CATEGORIES, LABEL)


class Perceptron(nn.Module):
    """Numbers and categories in, the log-odds of a purchase out."""

    def __init__(self, *, width: int, embedding: int, dropout: float, rows: bool) -> None:
        super().__init__()
        self.rows = Embedding(embedding, optimizer="adagrad", lr=0.03, spread=0.1) if rows else None
        self.embeddings = nn.ModuleList(
            nn.Embedding(len(known) + 1, embedding) for known in CATEGORIES.values() if not rows
        )
        for one in self.embeddings:
            nn.init.normal_(one.weight, std=0.1)
        wide = 2 * len(NUMBERS) + embedding * len(CATEGORIES)
        self.layers = nn.Sequential(
            nn.Linear(wide, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        if self.rows is not None:
            ids = categories + MOST * torch.arange(len(CATEGORIES), device=categories.device)
            embedded = [self.rows(ids).flatten(1)]
        else:
            embedded = [one(categories[:, i]) for i, one in enumerate(self.embeddings)]
        return self.layers(torch.cat([numbers, *embedded], 1))[:, 0]


class Clicks(Task):
    """What is trained: everything raycloud needs to know."""

    def __init__(self, *, width: int = 64, embedding: int = 4, dropout: float = 0.2,  # noqa: PLR0913 - each is a setting
                 lr: float = 3e-3, decay: float = 0.1, held_out: float = 0.2,
                 rows: bool = False) -> None:  # fmt: skip
        """With `rows` the categories' vectors are on `servers`, of which there is one at least."""
        shape = {"width": width, "embedding": embedding, "dropout": dropout}
        self.shape: dict[str, Any] = {**shape, "rows": rows}
        self.lr, self.decay, self.held_out = lr, decay, held_out

    def model(self) -> Perceptron:
        return Perceptron(**self.shape)

    def data(self, path: str | None) -> Splits:
        """The sessions of a CSV file, of which each class gives its part to be held out.

        A session goes by the digest of its text, so that equal sessions stay together and the split
        does not depend on the order of the lines. A bad row is named by its place in its part.
        """
        if path is None:
            raise DataError(
                "clicks has no sessions of its own: data.path is not set",
                hint="pass --set data.path=FILE, a CSV with the columns "
                f"{', '.join(COLUMNS)}. It is the Online Shoppers Purchasing Intention data set "
                "of the UCI repository (archive.ics.uci.edu/dataset/468), columns renamed",
            )
        table = read(path)
        digests = [
            hashlib.blake2b(repr(row).encode(), digest_size=8).digest()
            for row in zip(*(column.to_pylist() for column in table.columns), strict=True)
        ]
        apart = held_out(table[LABEL].to_pylist(), digests, self.held_out)

        def part(name: str, rows: np.ndarray) -> Source:
            content = b"".join(digests[i] for i in np.flatnonzero(rows))
            digest = hashlib.blake2b(content, digest_size=8).hexdigest()
            return Source(
                dataset=table.filter(pa.array(rows)),
                key=f"{PurePosixPath(path).name}, {name} ({digest})",
                types=dict.fromkeys(NUMBERS, "float32") | {LABEL: "bool"},
                required=[LABEL],
            )

        return Splits(train=part("to train on", ~apart), held_out=part("held out", apart))

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        """Standardised numbers with a mark of those that are missing; codes of categories."""
        moments = np.array(list(NUMBERS.values()))
        numbers = np.stack([np.asarray(rows[name], np.float64) for name in NUMBERS], 1)
        missing = ~(numbers >= 0)  # NaN, and -1 as some exports have it
        scaled = (np.log1p(np.where(missing, 0.0, numbers)) - moments[:, 0]) / moments[:, 1]
        scaled[missing] = 0.0  # the mean
        codes = [
            [known.index(value) + 1 if value in known else 0 for value in rows[name]]
            for name, known in CATEGORIES.items()
        ]
        return {
            "numbers": np.concatenate([scaled, missing], 1).astype(np.float32),
            "categories": np.array(codes, np.uint8).T,
            LABEL: np.asarray(rows[LABEL], np.uint8),
        }

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> dict[str, Tensor]:
        return {
            "numbers": torch.from_numpy(samples["numbers"]),
            "categories": torch.from_numpy(samples["categories"]).long(),
            "bought": torch.from_numpy(samples[LABEL]).float(),
        }

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        odds = model(batch["numbers"], batch["categories"])
        return F.binary_cross_entropy_with_logits(odds, batch["bought"])

    def metrics(
        self, model: nn.Module, batch: Mapping[str, Tensor], samples: int
    ) -> dict[str, Metric]:
        odds = model(batch["numbers"], batch["categories"]).float()
        loss = F.binary_cross_entropy_with_logits(odds, batch["bought"], reduction="sum")
        return {
            "auc": Auc.of(scores=odds.tolist(), labels=batch["bought"].tolist()),
            "loss": Mean(total=float(loss), weight=float(samples)),
        }

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.lr, weight_decay=self.decay)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))


def read(path: str) -> pa.Table:
    """The columns of a CSV file, all as text: the pipeline converts them and names bad rows."""
    options = pyarrow.csv.ConvertOptions(
        include_columns=COLUMNS,
        column_types=dict.fromkeys(COLUMNS, pa.string()),
        strings_can_be_null=True,
    )
    try:
        with fsspec.open(path, "rb") as file:
            return pyarrow.csv.read_csv(file, convert_options=options)
    except (OSError, ValueError, KeyError, ImportError) as error:  # of pyarrow and fsspec too
        raise DataError(
            f"the sessions at data.path {path!r} cannot be read: {error}",
            hint=f"give a CSV file with the columns {', '.join(COLUMNS)}",
        ) from error


def held_out(labels: list[str | None], digests: list[bytes], part: float) -> np.ndarray:
    """Which rows to hold out: of each class those with the smallest digests, `part` of them.

    A row without a label is not held out; the pipeline reports it.
    """
    apart = np.zeros(len(labels), bool)
    for label in set(labels) - {None}:
        of_class = [i for i, value in enumerate(labels) if value == label]
        of_class.sort(key=digests.__getitem__)
        apart[of_class[: round(part * len(of_class))]] = True
    return apart
