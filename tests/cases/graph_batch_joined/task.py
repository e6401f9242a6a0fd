"""Graphs whose edges count the nodes of a batch, and a draw from `rng`."""

import torch
from torch import nn
from torch.nn import functional as F

from raycloud import Splits, Task


class D:
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.s = []
        for i in range(160):
            n = 3 + i % 4
            x = torch.randn(n, 4, generator=g)
            e = torch.randint(0, n, (2, 2 * n), generator=g)
            self.s.append((x, e, x.sum()))

    def __len__(self):
        return 160

    def __getitem__(self, i):
        return self.s[i]


class T(Task):
    def model(self):
        torch.manual_seed(7)
        return nn.ModuleDict({"m": nn.Linear(4, 4), "o": nn.Linear(4, 1)})

    def data(self, path):
        return Splits(train=D())

    def batch(self, samples, rng):
        if rng is not None:
            rng.random()  # edge dropout, say
        at, xs, es, which = 0, [], [], []
        for k, (x, e, _) in enumerate(samples):
            xs.append(x)
            es.append(e + at)
            which += [k] * len(x)
            at += len(x)
        return {
            "x": torch.cat(xs),
            "src": torch.cat(es, 1)[0],
            "dst": torch.cat(es, 1)[1],
            "graph": torch.tensor(which),
            "y": torch.stack([s[2] for s in samples]),
        }

    def loss(self, model, batch):
        h = model["m"](batch["x"])
        h = h.index_add(0, batch["dst"], h[batch["src"]]).tanh()
        out = torch.zeros(len(batch["y"]), 4).index_add(0, batch["graph"], h)
        return F.mse_loss(model["o"](out)[:, 0], batch["y"])

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-2)
