"""A header with a comma in quotes, in a file that is delimited by semicolons."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))

    def data(self, path):
        from raycloud import Source

        return Splits(train=Source(path=path))

    def batch(self, rows, rng):
        import numpy as np

        return torch.as_tensor(np.array(rows["size, cm"], dtype="float32"))[
            :, None
        ], torch.as_tensor(np.array(rows["y"], dtype="float32"))[:, None]

    def loss(self, model, batch):
        x, y = batch
        return F.mse_loss(model(x), y)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
