"""A teacher without gradients follows the student in the forward pass."""

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
        self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(4, 1)

    @torch.no_grad()
    def follow(self):
        for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            t.mul_(0.9).add_(s, alpha=0.1)


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
        model.follow()
        z = model.student(x)
        with torch.no_grad():
            t = model.teacher(x)
        return F.mse_loss(model.head(z), y) + F.mse_loss(z, t)

    def optimizer(self, model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
