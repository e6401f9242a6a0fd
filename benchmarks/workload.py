"""What every contestant trains: the same model, samples in the same order, the same updates.

A byte-level GPT of 1.9 million parameters on the text of the running Python's standard library.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from raycloud.data.text import text_sources
from raycloud.order import Order
from raycloud.task import Source

SEED = 0
WORKERS = 2
PER_WORKER = 16  # samples of a step that one worker computes
GLOBAL_BATCH = WORKERS * PER_WORKER
LENGTH = 128  # bytes read, and bytes predicted, per sample
WIDTH = 192
DEPTH = 4
HEADS = 6
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0


class Block(nn.Module):
    """Attention and a perceptron, each on the normalised residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (rows, length, width) in and out."""
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        wide = nn.functional.gelu(self.widen(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.narrow(wide)
        return out


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, depth: int = DEPTH, width: int = WIDTH) -> None:
        """Make the layers; weights are normal with deviation 0.02."""
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Shape (rows, length) in, (rows, length, 256) out."""
        logits: Tensor = self.head(
            self.norm(self.blocks(self.bytes(text) + self.places.weight[: text.shape[1]]))
        )
        return logits


def build_model(*, small: bool = False) -> Transformer:
    """The model, with the same initial weights in every process of every contestant.

    Args:
        small: With one block in place of four: for trying out whether all works.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        return Transformer(depth=1 if small else DEPTH)


def build_optimizer(model: nn.Module, *, learning_rate: float = LEARNING_RATE) -> torch.optim.AdamW:
    """AdamW in its fused form, the fastest on a CPU too."""
    return torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean nats per byte of a batch of shape (rows, length + 1)."""
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def load_text(*, held_out: bool = False) -> npt.NDArray[np.uint8]:
    """The bytes to train on, or those held out: files of the standard library, by their names."""
    splits = text_sources(None)
    source = splits.held_out if held_out else splits.train
    assert isinstance(source, Source)  # noqa: S101
    assert source.select is not None  # noqa: S101
    root = Path(str(source.path))
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    content = b"".join((root / name).read_bytes() for name in names if source.select(name))
    return np.frombuffer(content, dtype=np.uint8)


def windows(text: npt.NDArray[np.uint8], length: int = LENGTH) -> npt.NDArray[np.uint8]:
    """Shape (windows, length + 1): `length` bytes to read, and those after each to predict."""
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length]


def load_held_out(samples: int = 64) -> Tensor:
    """The first held-out samples, shape (samples, LENGTH + 1), int64."""
    text = load_text(held_out=True)
    starts = np.arange(samples)[:, None] * LENGTH
    return torch.from_numpy(text[starts + np.arange(LENGTH + 1)]).long()


class Stream:
    """The canonical sequence of samples, epoch after epoch.

    Args:
        text: The bytes to train on.
        seed: Of the order.
    """

    def __init__(self, text: npt.NDArray[np.uint8], *, seed: int = SEED) -> None:
        self._text = text
        self._order = Order(samples=(len(text) - 1) // LENGTH, seed=seed)
        self._window = np.arange(LENGTH + 1)

    def batch(self, start: int, count: int) -> Tensor:
        """Samples [start, start + count) of the sequence, shape (count, LENGTH + 1), int64."""
        ids = []
        while count:
            epoch, offset = divmod(start, self._order.samples)
            taken = min(count, self._order.samples - offset)
            ids.append(self._order.ids(epoch, offset, offset + taken))
            start, count = start + taken, count - taken
        starts = np.concatenate(ids)[:, None] * LENGTH
        return torch.from_numpy(self._text[starts + self._window]).long()


class Batches:
    """One worker's batches of the canonical sequence, made from memory without a data loader.

    Args:
        text: The bytes to train on.
        rank: Which worker: it takes the `rank`-th `PER_WORKER` samples of each step.
        steps: Number of steps, at most one epoch.
    """

    def __init__(self, text: npt.NDArray[np.uint8], *, rank: int, steps: int) -> None:
        """Look up the whole order at once: nothing is left to do per step but to gather bytes."""
        order = Order(samples=(len(text) - 1) // LENGTH, seed=SEED)
        ids = order.ids(0, 0, steps * GLOBAL_BATCH).reshape(steps, WORKERS, PER_WORKER, 1)
        self._text = text
        self._starts = ids[:, rank] * LENGTH
        self._window = np.arange(LENGTH + 1)

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._starts)

    def __getitem__(self, step: int) -> Tensor:
        """The batch of `step`, shape (PER_WORKER, LENGTH + 1), int64."""
        return torch.from_numpy(self._text[self._starts[step] + self._window]).long()
