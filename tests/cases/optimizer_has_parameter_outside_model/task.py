"""The optimizer has parameters of a criterion that the model has not."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(2))

    def forward(self, a, b):
        return (torch.exp(-self.s) * torch.stack([a, b]) + self.s).sum()


class T(Task):
    def __init__(self):
        self.crit = Criterion()

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
        out = model(batch[0])
        return self.crit(F.mse_loss(out, batch[1]), F.l1_loss(out, batch[1]))

    def optimizer(self, model):
        return torch.optim.SGD(
            [{"params": model.parameters()}, {"params": self.crit.parameters(), "lr": 0.1}], lr=1e-2
        )
