"""Which items will a user click? Rows of users and items on servers, a small tower on the workers.

Without a `data.path` the events are made up, by a seeded generator with a planted structure: users
and items have biases and hidden vectors, and an event's probability follows from these. So it is
known how well any model could do. `python jobs/recommend.py DIR` writes such events as files that
come one after the other, for a run that takes them in while it trains (`data.refresh`).
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raycloud import Auc, Embedding, Mean, Metric, Source, Splits, Task

if TYPE_CHECKING:
    from raycloud.rows import Rows

HIDDEN = 4  # values of the planted vectors
HOURS = 24


class Shop:
    """Users, items, and who clicks what: the planted structure.

    Ids are spread over all of int64, as hashes are.
    """

    def __init__(self, *, users: int, items: int, seed: int) -> None:
        drawn = np.random.default_rng(seed)
        self.users = drawn.integers(-(2**62), 2**62, users)
        self.items = drawn.integers(-(2**62), 2**62, items)
        self.seen = drawn.permutation(1.0 / np.arange(10, users + 10))  # some come often
        self.shown = drawn.permutation(1.0 / np.arange(10, items + 10))
        self.likes, self.liked = drawn.normal(0, 0.7, users), drawn.normal(0, 0.7, items)
        self.tastes = drawn.normal(0, 1.0, (users, HIDDEN))
        self.traits = drawn.normal(0, 1.0, (items, HIDDEN))
        self.hours = 0.3 * np.cos(np.arange(HOURS) * 2 * np.pi / HOURS)

    def probability(self, user: np.ndarray, item: np.ndarray, hour: np.ndarray) -> np.ndarray:
        """Of a click, of users and items by their places."""
        taste = (self.tastes[user] * self.traits[item]).sum(1)
        odds = self.likes[user] + self.liked[item] + self.hours[hour] + taste - 1.0
        return 1.0 / (1.0 + np.exp(-odds))

    def events(self, count: int, seed: int) -> pa.Table:
        """So many events; `probability` is what no model is shown."""
        drawn = np.random.default_rng(seed)
        user = drawn.choice(len(self.users), count, p=self.seen / self.seen.sum())
        item = drawn.choice(len(self.items), count, p=self.shown / self.shown.sum())
        hour = drawn.integers(0, HOURS, count)
        probability = self.probability(user, item, hour)
        return pa.table({
            "user": self.users[user],
            "item": self.items[item],
            "hour": hour.astype(np.uint8),
            "clicked": (drawn.random(count) < probability).astype(np.uint8),
            "probability": probability.astype(np.float32),
        })  # fmt: skip


class Tower(nn.Module):
    """Users, items and the hour in, the log-odds of a click out."""

    def __init__(self, *, width: int, lr: float, decay: float, admit_after: int) -> None:
        super().__init__()
        rows = {"lr": lr, "weight_decay": decay, "admit_after": admit_after}
        self.users, self.items = (
            Embedding(1 + width, optimizer="adagrad", spread=0.1, **rows) for _ in range(2)
        )
        self.hours = nn.Embedding(HOURS, 4)
        self.layers = nn.Sequential(
            nn.Linear(3 * width + 4, 32), nn.ReLU(), nn.Linear(32, 1, bias=False)
        )
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, user: Tensor, item: Tensor, hour: Tensor) -> Tensor:
        users, items = self.users(user), self.items(item)
        likes, taste, liked, trait = users[:, 0], users[:, 1:], items[:, 0], items[:, 1:]
        seen = torch.cat([taste, trait, taste * trait, self.hours(hour)], 1)
        both = (taste * trait).sum(1)
        odds: Tensor = self.bias + likes + liked + both + self.layers(seen)[:, 0]
        return odds


class Recommend(Task):
    """What is trained: everything raycloud needs to know."""

    def __init__(self, *, width: int = 8, lr: float = 0.1, row_decay: float = 1e-3,  # noqa: PLR0913 - each is a setting
                 admit_after: int = 1, users: int = 2000, items: int = 1000,
                 events: int = 400_000, planted: int = 0) -> None:  # fmt: skip
        self.shape = {"width": width, "lr": lr, "decay": row_decay, "admit_after": admit_after}
        self.planted = {"users": users, "items": items, "seed": planted}
        self.events = events

    def model(self) -> Tower:
        return Tower(**self.shape)

    def data(self, path: str | None) -> Splits:
        """Events of Parquet files in `path`/train and `path`/held_out; or made up ones."""
        kinds = {"user": "int64", "item": "int64", "hour": "uint8", "clicked": "uint8"}
        if path is not None:
            train, apart = (f"{path.rstrip('/')}/{name}" for name in ("train", "held_out"))
            return Splits(
                train=Source(path=train, format="parquet", types=kinds),
                held_out=Source(path=apart, format="parquet", types=kinds),
            )
        shop, few = Shop(**self.planted), self.events // 10
        named = f"{self.planted}, {self.events} events"
        return Splits(
            train=Source(dataset=shop.events(self.events, 1), key=f"planted {named}"),
            held_out=Source(dataset=shop.events(few, 2), key=f"planted, held out {named}"),
        )

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        return {name: np.asarray(rows[name]) for name in ("user", "item", "hour", "clicked")}

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> dict[str, Tensor]:
        return {
            "user": torch.from_numpy(samples["user"]),
            "item": torch.from_numpy(samples["item"]),
            "hour": torch.from_numpy(samples["hour"]).long(),
            "clicked": torch.from_numpy(samples["clicked"]).float(),
        }

    def odds(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        odds: Tensor = model(batch["user"], batch["item"], batch["hour"])
        return odds

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.odds(model, batch), batch["clicked"])

    def metrics(
        self, model: nn.Module, batch: Mapping[str, Tensor], samples: int
    ) -> dict[str, Metric]:
        odds, clicked = self.odds(model, batch), batch["clicked"]
        loss = F.binary_cross_entropy_with_logits(odds, clicked, reduction="sum")
        return {
            "auc": Auc.of(scores=odds.tolist(), labels=clicked.tolist()),
            "loss": Mean(total=float(loss), weight=float(samples)),
        }

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 3e-3)


def write(folder: Path, task: Recommend, *, files: int) -> Iterator[Path]:
    """Write the held-out events, then so many files of events to train on, as each is asked for."""
    shop, each = Shop(**task.planted), task.events // files
    for name in ("train", "held_out"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    pq.write_table(shop.events(task.events // 10, 2), folder / "held_out" / "0.parquet")
    for number in range(files):
        draft = folder / f"{number:04}.draft"
        pq.write_table(shop.events(each, 3 + number), draft)
        yield draft.rename(folder / "train" / f"{number:04}.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write made-up events, file after file.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two files")
    asked = parser.parse_args()
    for path in write(asked.folder, Recommend(), files=asked.files):
        sys.stdout.write(f"{path}\n")
        threading.Event().wait(asked.every)
