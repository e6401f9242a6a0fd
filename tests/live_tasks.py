"""Tasks for runs on a real Ray: ones that wait, fail, differ or slow down on purpose.

A real run cannot be told from outside what to do at which step, so its task is told by settings.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raycloud.task import Splits
from tests.lockstep import Net, NetTask

GATE_S = 120.0
STOPS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


def claim(path: str | None) -> bool:
    """Whether this process is the first to ask for `path`: one member of a run, whichever."""
    if path is None:
        return False
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


class Steady(NetTask):
    """A schedule that does not depend on how long the run is, so that a run may be made longer."""

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return super().scheduler(optimizer, 200)


class Sparse(Steady):
    """Rows by id, whose gradients are sparse; `Adagrad` moves the rows that a step touches."""

    def __init__(self, rows: int = 60) -> None:
        super().__init__(dropout=0.0, branch=False)
        self.rows = rows

    def model(self) -> nn.Module:
        table = nn.Embedding(self.rows, 6, sparse=True)
        return nn.ModuleDict({"rows": table, "net": super().model()}).double()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        ids = (points[:, 0].abs() * 40).long() % self.rows
        return super().loss(lambda x: model["net"](x + model["rows"](ids)), (points, labels))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.05)


class Still(Steady):
    """Never moves, and each sample weighs the same: its gradients are those of the start."""

    def __init__(self, samples: int = 2000) -> None:
        super().__init__(dropout=0.0, branch=False, samples=samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        return nn.functional.cross_entropy(model(points), labels)

    def weight(self, batch: Any, samples: int) -> float:
        return float(samples)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0)


class Pair(nn.Module):
    """Two nets that answer together: one normalises each sample, the other over a micro-batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            Net(norm=norm, dropout=dropout, branch=not norm) for norm in (False, True)
        )

    def forward(self, x: Tensor) -> Tensor:
        one, other = (net(x) for net in self.nets)
        answer: Tensor = one + other
        return answer


class PairTask(NetTask):
    """Both kinds of normalisation in one model: what is hard for one of them shows here."""

    def model(self) -> nn.Module:
        return Pair(self.dropout).double()


class Gated(Steady):
    """Makes `free` batches, and the next ones only once the file `gate` is there.

    So a run stands still where a test wants it, without anyone measuring time.
    """

    def __init__(self, *, gate: str | None = None, free: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.gate, self.free = gate, free
        self.made = 0

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        self.made += 1
        if self.gate is not None and self.made > self.free:
            pause, left_s = threading.Event(), GATE_S
            while not Path(self.gate).exists() and left_s > 0:
                pause.wait(0.02)
                left_s -= 0.02
        return super().batch(samples, rng)


class Paced(Steady):
    """Makes a batch in `pause_s` until the file `gate` is there, and then as fast as it can."""

    def __init__(self, *, gate: str | None = None, pause_s: float = 0.02, **settings: Any) -> None:
        super().__init__(**settings)
        self.gate, self.pause_s = gate, pause_s

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        if self.gate is not None and not Path(self.gate).exists():
            threading.Event().wait(self.pause_s)
        return super().batch(samples, rng)


class Tardy(Paced):
    """One worker, whichever comes first, has its model only once the file `comes` is there."""

    def __init__(self, *, first: str | None = None, comes: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.first, self.comes = first, comes

    def model(self) -> nn.Module:
        pause, left_s = threading.Event(), GATE_S if claim(self.first) else 0.0
        while not Path(self.comes).exists() and left_s > 0:
            pause.wait(0.02)
            left_s -= 0.02
        return super().model()


class Broad(Paced):
    """Wide enough that servers sum each of its weights' gradients."""

    def model(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 1500), nn.Tanh(), nn.Linear(1500, 3))
        return net.double() if self.double else net


class FailingGpu(Steady):
    """One worker, whichever comes first, computes `after` losses, and then its GPU is said to fail.

    So does every loss that it computes from then on.
    """

    def __init__(self, *, first: str | None = None, after: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.first, self.after = first, after
        self.calls, self.fails = 0, False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        self.fails = self.fails or (self.calls > self.after and claim(self.first))
        if self.fails:
            raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        return super().loss(model, batch)


class DiesOnGpu(Steady):
    """The first process to come to its fifth step dies or freezes: by a signal, or an assert."""

    def __init__(self, *, first: str, how: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.first, self.how, self.calls = first, how, 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls > 40:
            if self.how == "memory":
                torch.empty(2**50, dtype=torch.uint8, device="cuda")
            if self.how and claim(self.first):
                if self.how in STOPS:
                    os.kill(os.getpid(), STOPS[self.how])
                torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
        return super().loss(model, batch)


class SharesGpu(DiesOnGpu):
    """Members that share a GPU: told that they are on machines of their own, NCCL allows it."""

    def __init__(self, **settings: Any) -> None:
        os.environ["NCCL_HOSTID"] = str(os.getpid())
        super().__init__(**settings)


class Faulty(Steady):
    """Breaks where `fault` says; in the middle of a run after `after` calls."""

    def __init__(
        self, *, fault: str = "", after: int = 0, first: str | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.fault, self.after, self.first = fault, after, first
        if fault == "constructor":
            raise ValueError("width must be even")
        self.calls = 0

    def model(self) -> nn.Module:
        if self.fault == "model":
            raise ValueError("no such width")
        return super().model()

    def data(self, path: str | None) -> Splits:
        if self.fault == "data":
            raise KeyError("column 'label'")
        if self.fault == "unreadable":
            raise FileNotFoundError(2, "No such file or directory", "points.csv")
        if self.fault == "empty":
            return Splits(train=[])
        if self.fault == "metric":
            train = super().data(path).train
            return Splits(train=train, held_out=train)
        if self.fault == "sizes" and claim(self.first):
            self.samples -= 6
        return super().data(path)

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        if self.fault == "draws":
            torch.rand(1)
        if self._now("batch"):
            raise IndexError("sample 7 has no label")
        return super().batch(samples, rng)

    def metrics(self, model: nn.Module, batch: Any, samples: int) -> Any:
        return (
            {"accuracy": "half"}
            if self.fault == "metric"
            else super().metrics(model, batch, samples)
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        found = super().loss(model, batch)
        if self._now("loss"):
            raise RuntimeError("the shapes do not match")
        if self._now("nan"):
            return found * float("nan")
        return found

    def _now(self, fault: str) -> bool:
        if fault != self.fault:
            return False
        self.calls += 1
        return self.calls > self.after


class Slowed(Steady):
    """After `after` batches one member, whoever is first to `claimed`, has more to compute."""

    def __init__(
        self, *, claimed: str | None = None, after: int = 0, size: int = 256, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.claimed, self.after, self.size = claimed, after, size
        self.calls = 0
        self.slow = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.after:
            self.slow = claim(self.claimed)
        if self.slow:
            work = torch.full((self.size, self.size), 1.0 / self.size)
            for _ in range(16):
                work = work @ work  # stays what it is; takes its time
        return super().loss(model, batch)


class Stuck(Steady):
    """After `after` batches one member, whoever is first to `claimed`, waits for ever."""

    def __init__(self, *, claimed: str | None = None, after: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.claimed, self.after = claimed, after
        self.calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.after and claim(self.claimed):
            threading.Event().wait()
        return super().loss(model, batch)


class Late(Steady):
    """Takes `pace_s` for each loss; one member, from its loss number `after` on, takes `late_s`.

    It is whoever is first to `claimed`.
    """

    def __init__(
        self,
        *,
        claimed: str | None = None,
        after: int = 0,
        pace_s: float = 0.003,
        late_s: float = 0.04,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.claimed, self.after = claimed, after
        self.pace_s, self.late_s = pace_s, late_s
        self.calls = 0
        self.late = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == self.after:
            self.late = claim(self.claimed)
        threading.Event().wait(self.late_s if self.late else self.pace_s)
        return super().loss(model, batch)
