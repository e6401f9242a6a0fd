"""An embedding that writes to its weight in the forward pass."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(24, 1))

    def data(self, path):
        g = torch.Generator().manual_seed(0)
        x = torch.randint(0, 20, (200, 3), generator=g)
        return Splits(train=torch.utils.data.TensorDataset(x, x.float().sum(1, keepdim=True) / 30))

    def loss(self, model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-1)
