"""Batches with offsets that count within a batch, and a draw from `rng`."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


class D:
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.s = [
            (torch.randint(0, 20, (int(k),), generator=g), float(k))
            for k in torch.randint(2, 12, (160,), generator=g)
        ]

    def __len__(self):
        return len(self.s)

    def __getitem__(self, i):
        return self.s[i]


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return nn.EmbeddingBag(20, 1, mode="sum")

    def data(self, path):
        return Splits(train=D())

    def batch(self, samples, rng):
        ids, ends, ys = [], [0], []
        for s, y in samples:
            if rng is not None:
                rng.random(len(s))  # augmentation that happens to keep all
            ids.append(s)
            ends.append(ends[-1] + len(s))
            ys.append(y)
        return torch.cat(ids), torch.tensor(ends[:-1]), torch.tensor(ys)

    def loss(self, model, batch):
        ids, offsets, y = batch
        return F.mse_loss(model(ids, offsets)[:, 0], y)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-3)
