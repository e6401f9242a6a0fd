"""An optimizer with a training and an evaluation mode."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


class SF(torch.optim.SGD):
    """a minimal optimizer with the modes of schedule-free ones"""

    def __init__(self, p, lr):
        super().__init__(p, lr=lr)
        self.mode = "new"

    def train(self):
        self.mode = "train"

    def eval(self):
        self.mode = "eval"

    def step(self, closure=None):
        if self.mode != "train":
            raise RuntimeError(
                "Optimizer was not in train mode when step is called. Call .train() first"
            )
        return super().step(closure)


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def data(self, path):
        x, y = xy(200)
        return Splits(
            train=torch.utils.data.TensorDataset(x, y),
            held_out=torch.utils.data.TensorDataset(x[:50], y[:50]),
        )

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model):
        return SF(model.parameters(), lr=1e-2)
