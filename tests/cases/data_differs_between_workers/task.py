"""The samples are split by numpy's global generator."""

import numpy as np
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
        order = np.random.permutation(200)
        tr, te = order[:150], order[150:]

        return Splits(
            train=torch.utils.data.TensorDataset(x[tr], y[tr]),
            held_out=torch.utils.data.TensorDataset(x[te], y[te]),
        )

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
