"""A warm-up that holds the schedule that comes after it."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


def xy(n, d=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return x, x.sum(1, keepdim=True)


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """the popular pattern: a warm-up that holds the schedule that comes after it"""

    def __init__(self, optimizer, n, after):
        self.n, self.after = n, after
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < self.n:
            return [b * (self.last_epoch + 1) / self.n for b in self.base_lrs]
        return self.after.get_last_lr()

    def step(self, epoch=None):
        if self.last_epoch >= self.n:
            self.after.step()
        super().step(epoch)


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
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def scheduler(self, optimizer, steps):
        return Warmup(optimizer, 4, torch.optim.lr_scheduler.StepLR(optimizer, 3))
