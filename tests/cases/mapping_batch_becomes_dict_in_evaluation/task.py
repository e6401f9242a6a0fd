"""A batch is a mapping whose keys are attributes as well."""

from collections import UserDict

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


class Enc(UserDict):
    """as transformers' BatchEncoding: keys also as attributes"""

    def __getattr__(self, k):
        try:
            return self.data[k]
        except KeyError as error:
            raise AttributeError(k) from error


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

    def batch(self, samples, rng):
        return Enc(x=torch.stack([s[0] for s in samples]), y=torch.stack([s[1] for s in samples]))

    def loss(self, model, batch):
        return F.mse_loss(model(batch.x), batch.y)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
