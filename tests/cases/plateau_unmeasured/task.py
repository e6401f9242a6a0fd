"""A schedule that is stepped by what is measured, in a job that measures at the end alone."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


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
        return torch.optim.SGD(model.parameters(), lr=0.3)

    def scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=0.3
        )
