"""A task whose samples name rows of a table; and the same with a parameter in its place."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import raycloud
from raycloud.spec import Job
from raycloud.step.tables import spec_of
from raycloud.sync.tables import initial
from tests.live_tasks import Gated
from tests.lockstep import Net, plain_loop

IDS = np.arange(-40, 40)
TABLE = "look"


class Looking(nn.Module):
    """Adds to what it sees rows of the table, which an `Embedding` is, or a parameter."""

    def __init__(self, net: Net, table: raycloud.Embedding | None) -> None:
        super().__init__()
        self.net = net.double()
        if table is not None:
            self.look = table
        else:
            self.table = nn.Parameter(torch.zeros(len(IDS), 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        ids = (4 * x[:, :2]).floor().long()
        if hasattr(self, TABLE):
            rows = self.look(ids)
        else:
            rows = nn.functional.embedding(ids + len(IDS) // 2, self.table)
        seen: Tensor = self.net(x + rows.sum(1))
        return seen


class Both:
    """AdamW for the net and Adagrad for the table, as one optimizer."""

    def __init__(self, net: Any, table: nn.Parameter) -> None:
        self.net = net
        self.table = torch.optim.Adagrad([table], 0.3, eps=1e-8)

    def step(self) -> None:
        self.net.step()
        self.table.step()

    def zero_grad(self) -> None:
        self.net.zero_grad()
        self.table.zero_grad()


class Looked(Gated):
    """Its samples name some 50 rows, each step most of them."""

    def __init__(self, *, plain: bool = False, single: bool = False, **settings: Any) -> None:
        super().__init__(**{"branch": False, **settings})
        self.plain, self.dtype = plain, torch.float32 if single else torch.float64

    def model(self) -> nn.Module:
        net = Net(norm=False, dropout=self.dropout, branch=False)
        if self.plain:
            return Looking(net, None)
        return Looking(net, raycloud.Embedding(6, optimizer="adagrad", lr=0.3, dtype=self.dtype))

    def optimizer(self, model: nn.Module) -> Any:
        assert isinstance(model, Looking)
        made = torch.optim.AdamW(model.net.parameters(), lr=3e-3, weight_decay=0.05)
        return Both(made, model.table) if self.plain else made

    def scheduler(self, optimizer: Any, steps: int) -> Any:
        return super().scheduler(optimizer.net if isinstance(optimizer, Both) else optimizer, steps)


class Slow(Looked):
    """Makes a batch in 0.15 s until the file `until` is there."""

    def __init__(self, *, until: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.until = until

    def batch(self, samples: Any, rng: Any) -> Any:
        if self.until and not Path(self.until).exists():
            threading.Event().wait(0.15)
        return super().batch(samples, rng)


class PlainLooked(Looked):
    """The table is a parameter, which begins as the rows of the job's table do."""

    def __init__(self, job: Job, **settings: Any) -> None:
        super().__init__(plain=True, **settings)
        self.job = job

    def model(self) -> nn.Module:
        made = super().model()
        table = raycloud.Embedding(6, optimizer="adagrad", lr=0.3, dtype=torch.float64)
        rows = torch.from_numpy(initial(spec_of(TABLE, table, self.job), IDS))
        assert isinstance(made, Looking)
        made.table.data.copy_(rows)
        return made


def reference(job: Job, steps: int, **settings: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters by name, and the table, after so many steps of a single process."""
    state = dict(plain_loop(job, PlainLooked(job, **settings), steps).state_dict())
    table = state.pop("table")
    return state, table
