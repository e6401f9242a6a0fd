"""Scanned digits with Ray Train."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from raycloud import Accuracy, Splits, Task


def digits(part):
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images[part] / 16).float(), torch.tensor(labels[part]))


def build_model(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Digits(Task):
    def model(self):
        return build_model(width=128)

    def data(self, path):
        return Splits(train=digits(slice(0, 1437)), held_out=digits(slice(1437, None)))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def metrics(self, model, batch, samples):
        right = (model(batch[0]).argmax(1) == batch[1]).sum()
        return {"accuracy": Accuracy(right=int(right), count=samples)}
