"""A forward pass changes a complex buffer: a running mean of a spectrum."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5, dtype=torch.complex64))
        self.o = nn.Linear(8, 1)

    def forward(self, x):
        f = torch.fft.rfft(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(f.mean(0), alpha=0.1)
        return self.o(torch.fft.irfft(f - self.mean, n=8))


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return M()

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
