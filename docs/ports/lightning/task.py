"""Scanned digits with Lightning."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from raycloud import Accuracy, Splits, Task


def digits(part):
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[part] / 16).float(), torch.tensor(labels[part]))


class LitDigits(nn.Module):
    def __init__(self, width=128, lr=1e-3):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Digits(Task):
    def model(self):
        return LitDigits()

    def data(self, path):
        return Splits(train=digits(slice(0, 1437)), held_out=digits(slice(1437, None)))

    def loss(self, model, batch):
        return model.training_step(batch, 0)

    def optimizer(self, model):
        return model.configure_optimizers()

    def metrics(self, model, batch, samples):
        right = (model(batch[0]).argmax(1) == batch[1]).sum()
        return {"accuracy": Accuracy(right=int(right), count=samples)}
