"""Cross entropy over the targets that are not ignored: a mean by their number."""

import torch
import torch.nn.functional as F
from torch import nn

from raycloud import Splits, Task


class Base(Task):
    """Small classifier; each case changes one thing."""

    def __init__(self, *, samples: int = 512):
        self.samples = samples

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    def data(self, path):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(self.samples, 8, generator=g, dtype=torch.float64)
        y = (x @ torch.randn(8, 4, generator=g, dtype=torch.float64)).argmax(1)
        d = torch.utils.data.TensorDataset(x, y)
        return Splits(train=d, held_out=torch.utils.data.Subset(d, range(64)))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Ignored(Base):  # a mean over fewer than the samples, with the default weight
    def loss(self, model, batch):
        y = batch[1].clone()
        y[y == 0] = -100
        return F.cross_entropy(model(batch[0]), y, ignore_index=-100)
