"""A module with a state of its own that is no tensor."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


class M(nn.Linear):
    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, s):
        assert s["version"] == 3


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return M(8, 1)

    def data(self, path):
        x, y = xy(200)
        return Splits(
            train=torch.utils.data.TensorDataset(x, y),
            held_out=torch.utils.data.TensorDataset(x[:50], y[:50]),
        )

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
