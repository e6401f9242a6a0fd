"""What it costs of the held-out loss that members do not wait for each other, at equal samples.

    python -m benchmarks.stale_grid      # all points; what is in the file is not done again

Four members are simulated, as in `benchmarks.sync_grid`, whose small model and data these are, and
whose points with a period of 1 and with rounds are what to compare with. Two ways to exchange by
servers, where nobody waits:

    local   each makes steps of its own optimizer; every `period` of them, members in turn, it sends
            how far it has come, a quarter of which is added, and has the parameters of half of
            `lag` steps later after `lag` steps
    pushed  servers make a step of AdamW for each member's gradient, by the rules for a quarter of
            the batch (Malladi et al., NeurIPS 2022); a gradient is of the parameters before so many
            others were pushed (`lag`), or of where these are `predicted` to be by then

No time is measured here; a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.sync_grid import MEMBERS, Point, Side, machine, settings

RESULTS = Path(__file__).parent / "results" / "stale_grid.json"
PART = 1.0 / MEMBERS


@dataclass(frozen=True, order=True)
class Stale:
    """What is tried.

    Attributes:
        way: `local` or `pushed`.
        period: Steps between two exchanges of a member.
        lag: Steps until it has an answer; or pushes of others since its gradient's parameters.
        momentum: The first of AdamW's betas, where servers make its steps.
        predicted: How far of the way that the newest step shows, for each push of the lag.
        seed: Of weights and order.
    """

    way: str
    period: int
    lag: int
    momentum: float
    predicted: float
    seed: int


def grid() -> Iterator[Stale]:
    """All points."""
    lags = (1, 1), (1, 2), (2, 1), (4, 1), (4, 2), (8, 1), (8, 4), (16, 2), (16, 8), (32, 8)
    for seed, (period, lag) in product((0, 1), lags):
        yield Stale("local", period, lag, 0.9, 0.0, seed)
    for seed, lag, momentum in product((0, 1), (0, 3, 7), (0.9, 0.5, 0.0)):
        yield Stale("pushed", 1, lag, momentum, 0.0, seed)
    for seed, lag, predicted, momentum in product((0, 1), (3, 7), (0.5, 1.0), (0.9, 0.5)):
        yield Stale("pushed", 1, lag, momentum, predicted, seed)


class _Stale(Side):
    """Points of one way that train side by side.

    Attributes:
        servers: The parameters that servers have, a row for each point.
    """

    def __init__(self, points: list[Stale], device: torch.device) -> None:
        seeds = [Point("small", 8, "none", "mean", 0.0, 1.0, 0.0, one.seed) for one in points]
        super().__init__(settings(None)["small"], seeds, device)
        self.points, self.servers = points, self._rows[:, 0].clone()

    def batches(self, update: int) -> list[Tensor]:
        """Of an update, by point and member."""
        return [
            torch.stack(parts).to(self._device).unflatten(1, (MEMBERS, -1))[self._seed_of]
            for parts in zip(*(batches(update) for batches in self._batches), strict=True)
        ]

    def clipped(self, rows: Tensor) -> Tensor:
        """Gradients, each no longer than allowed."""
        norms = rows.norm(dim=-1, keepdim=True)
        return rows * (self._setting.clip / (norms + 1e-6)).clamp_max(1.0)

    def update(self, update: int) -> None:
        """Every member makes a step."""
        raise NotImplementedError

    @torch.no_grad()
    def losses(self) -> list[float]:
        """Held out, of what the servers have after all updates."""
        for update in range(self._setting.updates):
            self.update(update)
        self._rows.copy_(self.servers[:, None].expand_as(self._rows))
        return self._evaluate()


@dataclass
class _Sent:
    """An update on its way: what is added, where its sender stood, and when it has the answer."""

    moved: Tensor
    stood: Tensor
    adds: int
    answers: int
    answer: Tensor | None = None


class Local(_Stale):
    """Members with optimizers of their own."""

    def __init__(self, points: list[Stale], device: torch.device) -> None:
        super().__init__(points, device)
        self._last = self._rows.clone()  # when each has sent
        self._flying: list[list[list[_Sent]]] = [[[] for _ in range(MEMBERS)] for _ in points]

    def update(self, update: int) -> None:
        """See `_Stale.update`."""
        gradient = self._gradient(
            self._whole.data, *(b.flatten(0, 1) for b in self.batches(update))
        )
        self._whole.grad = self.clipped(gradient.view_as(self._rows)).view_as(gradient)
        self._optimizer.param_groups[0]["lr"] = self._setting.rate(update)
        self._optimizer.step()
        for at, point in enumerate(self.points):
            for member, flying in enumerate(self._flying[at]):
                self._hear(at, member, flying, update)
            for member, flying in enumerate(self._flying[at]):
                turn = (update - member * point.period // MEMBERS) % point.period == 0
                if turn and update > 0:
                    flying.append(self._send(at, member, update))
                    self._add(at, flying[-1], update)

    def _hear(self, at: int, member: int, flying: list[_Sent], update: int) -> None:
        while flying and flying[0].answers == update and flying[0].answer is not None:
            shift = flying[0].answer - flying.pop(0).stood
            self._rows[at, member] += shift
            self._last[at, member] += shift
            for other in flying:
                other.stood = other.stood + shift
        for sent in flying:
            self._add(at, sent, update)

    def _send(self, at: int, member: int, update: int) -> _Sent:
        now, lag = self._rows[at, member].clone(), self.points[at].lag
        moved, self._last[at, member] = now - self._last[at, member], now
        return _Sent(moved, now, update + lag // 2, update + lag)

    def _add(self, at: int, sent: _Sent, update: int) -> None:
        if sent.adds == update and sent.answer is None:
            self.servers[at] += PART * sent.moved
            sent.answer = self.servers[at].clone()


class Pushed(_Stale):
    """Members that push gradients; the optimizer is the servers'."""

    def __init__(self, points: list[Stale], device: torch.device) -> None:
        super().__init__(points, device)
        column = torch.tensor([[p.momentum, p.predicted * p.lag] for p in points], device=device)
        self._keeps, self._ahead = column[:, :1] ** PART, column[:, 1:]
        self._lags = torch.tensor([point.lag for point in points], device=device)
        self._mean, self._square = torch.zeros_like(self.servers), torch.zeros_like(self.servers)
        longest = max(point.lag for point in points)
        self._read = [self.servers.clone() for _ in range(longest + 1)]  # the newest last
        self._steps, self._which = 0, torch.arange(len(points), device=device)

    def update(self, update: int) -> None:
        """See `_Stale.update`."""
        rate, keeps = self._setting.rate(update), 0.95**PART
        for member in range(MEMBERS):
            read = torch.stack(self._read)[len(self._read) - 1 - self._lags, self._which]
            batch = [part[:, member] for part in self.batches(update)]
            gradient = self.clipped(self._gradient(read, *batch))
            self._steps += 1
            self._mean = self._keeps * self._mean + (1 - self._keeps) * gradient
            self._square = keeps * self._square + (1 - keeps) * gradient * gradient
            root = (self._square / (1 - keeps**self._steps)).sqrt() + 1e-8
            mean = self._mean / (1 - self._keeps**self._steps).clamp_min(1e-9)
            step = rate * math.sqrt(PART) * mean / root
            self.servers = self.servers * (1 - rate * PART * 0.1) - step
            self._read = [*self._read[1:], self.servers - self._ahead * step]


WAYS: dict[str, type[_Stale]] = {"local": Local, "pushed": Pushed}


def main() -> None:
    """Train by all points that the file lacks, and add each to it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    rows: list[dict[str, Any]] = json.loads(asked.json.read_text()) if asked.json.exists() else []
    here = [row for row in rows if row["machine"] == machine(device)]
    known = {tuple(row[name] for name in Stale.__annotations__) for row in here}
    left = [point for point in grid() if tuple(asdict(point).values()) not in known]
    for way, kind in WAYS.items():
        if points := [point for point in left if point.way == way]:
            for point, loss in zip(points, kind(points, device).losses(), strict=True):
                rows.append({**asdict(point), "machine": machine(device), "loss": loss})
                print(rows[-1], flush=True)
            asked.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
