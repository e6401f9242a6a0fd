"""An optimizer that keeps an object of its own for each parameter, from the first step on."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


class Helper:
    def __init__(self, p):
        self.mean = torch.zeros_like(p)


class Helped(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("helper", Helper(p)).mean.mul_(0.9).add_(p.grad)
        return super().step(closure)


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def data(self, path):
        x, y = xy(200)
        return Splits(train=torch.utils.data.TensorDataset(x, y))

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model):
        return Helped(model.parameters(), lr=1e-2)
