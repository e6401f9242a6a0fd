"""The file parses a command line while it is imported: raycloud's own."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
args = parser.parse_args()


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
        x, y = batch
        return F.mse_loss(model(x), y)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=args.lr)
