"""Task.weight returns a tensor."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


class D:
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.s = [
            torch.randint(1, 20, (int(k),), generator=g)
            for k in torch.randint(2, 30, (90,), generator=g)
        ]

    def __len__(self):
        return len(self.s)

    def __getitem__(self, i):
        return self.s[i]


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.h = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.h.weight = nn.Parameter(torch.randn(20, 8) * 0.1)
        self.e.weight = self.h.weight

    def forward(self, x):
        return self.h(self.e(x))


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return M()

    def data(self, path):
        return Splits(train=D(), held_out=D())

    def batch(self, samples, rng):
        x = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
        return {
            "x": x[:, :-1],
            "y": x[:, 1:],
            "names": [f"s{i}" for i in range(len(samples))],
            "n": None,
        }

    def weight(self, batch, samples):
        return (batch["y"] != 0).sum()

    def loss(self, model, batch):
        return F.cross_entropy(
            model(batch["x"]).flatten(0, 1), batch["y"].flatten(), ignore_index=0
        )

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
