"""A byte-level GPT on text: the model in plain PyTorch, then the task."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from raycloud import Splits, Task
from raycloud.data.text import pack, text_sources

if TYPE_CHECKING:
    import numpy as np

    from raycloud.rows import Rows


class Block(nn.Module):
    """Attention and a perceptron, each on the normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.length = length
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.norm(self.blocks(self.bytes(text) + self.places(places))))


class Gpt(Task):
    """What is trained: everything raycloud needs to know.

    Args:
        length: Bytes that a sample predicts.
        width: Of a byte's vector.
        depth: Blocks.
        heads: Of the attention; None: one for each 64 of the width, and at least 4.
        lr: The highest rate; None: 6e-3, above a width of 96 less in proportion.
        warm_up: Steps until it is reached.
    """

    def __init__(self, *, length: int = 128, width: int = 96, depth: int = 2,
                 heads: int | None = None, lr: float | None = None,
                 warm_up: int = 40) -> None:  # fmt: skip
        heads = heads or max(4, width // 64)
        if width % heads:
            raise ValueError(f"width is {width}, and no multiple of its {heads} heads")
        self.shape = {"length": length, "width": width, "depth": depth, "heads": heads}
        self.length, self.warm_up = length, warm_up
        self.lr = min(6e-3, 6e-3 * 96 / width) if lr is None else lr

    def model(self) -> Transformer:
        return Transformer(**self.shape)

    def data(self, path: str | None) -> Splits:
        return text_sources(path)

    def preprocess(self, rows: Rows) -> dict[str, Any]:
        """Windows of `length` bytes to read, and the same shifted by one to predict."""
        return {"window": pack(rows["text"], self.length, separator="").windows}

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> Tensor:
        return torch.from_numpy(samples["window"]).long()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def weight(self, batch: Tensor, samples: int) -> float:
        return float(samples * self.length)  # bytes predicted

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.lr, betas=(0.9, 0.95), fused=True)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        def rate(step: int) -> float:
            done = max(0.0, (step - self.warm_up) / max(1, steps - self.warm_up))
            return min(1.0, (step + 1) / self.warm_up) * (
                0.1 + 0.45 * (1 + math.cos(math.pi * done))
            )

        return LambdaLR(optimizer, rate)

    def sample(self, model: nn.Module) -> str:
        text = torch.tensor([list(b"def ")], device=next(model.parameters()).device)
        generator = torch.Generator(text.device).manual_seed(0)
        for _ in range(240):
            odds = (model(text[:, -self.length :])[:, -1].float() / 0.7).softmax(-1)
            text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)], 1)
        return bytes(text[0].tolist()).decode("utf-8", "replace")
