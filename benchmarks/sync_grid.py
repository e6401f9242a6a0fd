"""Does it train? What rounds and codecs cost in held-out loss, at equal samples.

    python -m benchmarks.sync_grid       # the whole grid; what is in the file is not done again
    python -m benchmarks.sync_grid --model testbed --points 4,int4,nesterov,0.1 1,none,mean,0

Four members are simulated in one process. Each takes its quarter of every global batch, and they
exchange what a run of so many members would: at a period of 1 their gradients, else once a round
how far each has come. With a codec that goes as the direct exchange has it: each member encodes
what it sends, the owner of a chunk sums in fp32 and encodes the sum once, and what either encoding
lost is kept and added next time (error feedback).

No time is measured here; a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workload import CLIP_NORM, Stream, Transformer, load_held_out, load_text, loss_of
from raycloud.sync.codecs import CODECS, Codec

MEMBERS = 4
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of Nesterov's outer step
MEASURED = 4  # times, evenly, the last one at the end
HELD_OUT = 512  # samples
WARM_UP, LOWEST = 0.05, 0.1  # of the inner rate: a part of all updates, and of its peak at the end
RESULTS = Path(__file__).parent / "results" / "sync_grid.json"


@dataclass(frozen=True)
class Setting:
    """A model and how long it is trained.

    Attributes:
        width: Of the model; its depth is the workload's.
        rate: AdamW's, at its peak.
        batch: Samples of an update, of all members.
        updates: How many.
    """

    width: int
    rate: float
    batch: int
    updates: int


SETTINGS = {
    "small": Setting(width=66, rate=3e-3, batch=32, updates=800),  # 254,000 parameters
    "testbed": Setting(width=192, rate=1e-3, batch=32, updates=1000),  # 1.9 million
}


@dataclass(frozen=True, order=True)
class Point:
    """What is tried.

    Attributes:
        model: A key of `SETTINGS`.
        period: Updates between two exchanges.
        codec: A key of `CODECS`.
        outer: `mean` or `nesterov`: what is made of the members' mean progress in a round.
        warm: The part of all updates that come first with a period of 1.
        seed: Of weights and order.
    """

    model: str
    period: int
    codec: str
    outer: str
    warm: float
    seed: int


def grid(seeds: Sequence[int]) -> Iterator[Point]:
    """All points of the small model; with a period of 1 neither outer step nor warm start exist."""
    for seed, codec in product(seeds, ("none", "int4")):
        yield Point("small", 1, codec, "mean", 0.0, seed)
    for period, codec, outer, warm, seed in product(
        (4, 8, 16, 32), ("none", "int4"), ("mean", "nesterov"), (0.1, 0.0), seeds
    ):
        yield Point("small", period, codec, outer, warm, seed)


class Exchange:
    """The weighted sum over members, through a codec, with error feedback.

    Args:
        codec: Of both ways.
        size: Values of one member.
    """

    def __init__(self, codec: Codec, size: int) -> None:
        self._codec = codec
        self._residuals = torch.zeros(MEMBERS, size)
        edges = [size * i // MEMBERS for i in range(MEMBERS + 1)]
        self._chunks = [slice(a, b) for a, b in pairwise(edges)]

    def mean(self, rows: Tensor) -> Tensor:
        """What every member has after the exchange of `rows`, shape (MEMBERS, size)."""
        if self._codec.name == "none":
            return rows.mean(0)
        sums = torch.zeros(rows.shape[1])
        self._residuals += rows / MEMBERS
        for owner, chunk in enumerate(self._chunks):
            total = torch.zeros(chunk.stop - chunk.start)
            codes = torch.empty(self._codec.bound(len(total)), dtype=torch.uint8)
            for residual in self._residuals[:, chunk]:
                self._codec.encode(residual, codes)
                self._codec.add(codes, total)
                self._codec.subtract(codes, residual)
            self._codec.encode(total, codes)
            self._codec.add(codes, sums[chunk])
            self._codec.subtract(codes, total)
            self._residuals[owner, chunk] += total
        return sums

    @property
    def residual_norm(self) -> float:
        """Of the sum of what members keep back."""
        return float(self._residuals.sum(0).norm())


class Member:
    """A replica whose parameters are one vector, with AdamW."""

    def __init__(self, setting: Setting, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(width=setting.width)
        self.parameters = list(self.model.parameters())
        self.flat = nn.utils.parameters_to_vector(self.parameters).detach()
        self.grad = torch.zeros_like(self.flat)
        nn.utils.vector_to_parameters(self.flat, self.parameters)
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.numel()
            parameter.data = self.flat[begin:end].view(parameter.shape)
            parameter.grad = self.grad[begin:end].view(parameter.shape)
            begin = end
        whole = nn.Parameter(self.flat)  # the same memory: one tensor to update
        whole.grad = self.grad
        self.optimizer = torch.optim.AdamW(
            [whole], lr=setting.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def backward(self, batch: Tensor) -> None:
        """Fill `grad` with the gradient of the mean loss."""
        self.grad.zero_()
        loss_of(self.model, batch).backward()

    def update(self, rate: float) -> None:
        """Step by `grad`, clipped."""
        self.grad.mul_(min(1.0, CLIP_NORM / (float(self.grad.norm()) + 1e-6)))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()


def rate_at(update: int, setting: Setting) -> float:
    """The inner rate: up linearly, then down by a cosine."""
    warm = WARM_UP * setting.updates
    if update < warm:
        return setting.rate * (update + 1) / warm
    done = (update - warm) / (setting.updates - warm)
    return setting.rate * (LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Tensor) -> float:
    """Nats per byte."""
    losses = [float(loss_of(model, part)) for part in held_out.split(64)]
    return sum(losses) / len(losses)


def train(point: Point) -> dict[str, Any]:
    """Train by one point.

    Returns:
        The point, the held-out losses by update, and the norm of what error feedback held at last.
    """
    setting, codec = SETTINGS[point.model], CODECS[point.codec]
    stream, held_out = Stream(load_text(), seed=point.seed), load_held_out(HELD_OUT)
    members = [Member(setting, point.seed)]
    size = members[0].flat.numel()
    gradients, progress = Exchange(codec, size), Exchange(codec, size)
    momentum = torch.zeros(size)
    warm = round(point.warm * setting.updates)
    anchor = torch.zeros(0)
    losses: dict[int, float] = {}
    for update in range(setting.updates):
        batch, rate = stream.batch(update * setting.batch, setting.batch), rate_at(update, setting)
        if point.period == 1 or update < warm:  # replicas are the same: one stands for all
            one = members[0]
            if codec.name == "none":
                one.backward(batch)
            else:
                rows = []
                for part in batch.chunk(MEMBERS):
                    one.backward(part)
                    rows.append(one.grad.clone())
                one.grad.copy_(gradients.mean(torch.stack(rows)))
            one.update(rate)
        else:
            if len(members) == 1:
                members += [copy_of(members[0], setting) for _ in range(MEMBERS - 1)]
                anchor = members[0].flat.clone()
            for member, part in zip(members, batch.chunk(MEMBERS), strict=True):
                member.backward(part)
                member.update(rate)
            in_round = (update + 1 - warm) % point.period
            if in_round == 0 or update + 1 == setting.updates:
                delta = progress.mean(torch.stack([anchor - member.flat for member in members]))
                if point.outer == "nesterov":
                    momentum.mul_(OUTER_MOMENTUM).add_(delta)
                    delta = OUTER_RATE * (delta + OUTER_MOMENTUM * momentum)
                anchor -= delta
                for member in members:
                    member.flat.copy_(anchor)
        if (update + 1) % (setting.updates // MEASURED) == 0:
            losses[update + 1] = loss_of_mean(members, held_out)
    kept = gradients.residual_norm, progress.residual_norm
    return {**asdict(point), "losses": losses, "residual_norms": kept}


def loss_of_mean(members: Sequence[Member], held_out: Tensor) -> float:
    """The held-out loss of the members' mean."""
    with torch.no_grad():
        mean = torch.stack([member.flat for member in members]).mean(0)
        own = members[0].flat.clone()
        members[0].flat.copy_(mean)
        found = held_out_loss(members[0].model, held_out)
        members[0].flat.copy_(own)
    return found


def copy_of(member: Member, setting: Setting) -> Member:
    """Another replica in the same state."""
    other = Member(setting, 0)
    other.flat.copy_(member.flat)
    other.optimizer.load_state_dict(member.optimizer.state_dict())
    state = member.optimizer.state_dict()["state"]
    copied = {k: {n: v.clone() for n, v in entry.items()} for k, entry in state.items()}
    other.optimizer.load_state_dict({**member.optimizer.state_dict(), "state": copied})
    return other


def parse_point(text: str, model: str, seed: int) -> Point:
    """A point as `period,codec,outer,warm`."""
    period, codec, outer, warm = text.split(",")
    return Point(model, int(period), codec, outer, float(warm), seed)


def main() -> None:
    """Train by all points that the file lacks, and add each to it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--model", choices=SETTINGS, default="small")
    parser.add_argument("--points", nargs="*", help="each period,codec,outer,warm; not: the grid")
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(asked.seeds)
    points = (
        [parse_point(text, asked.model, seed) for seed in seeds for text in asked.points]
        if asked.points
        else list(grid(seeds))
    )
    for point in points:
        rows = json.loads(asked.json.read_text()) if asked.json.exists() else []
        known = {tuple(row[field] for field in asdict(point)) for row in rows}
        if tuple(asdict(point).values()) in known:
            continue
        rows.append(train(point))
        draft = asked.json.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(rows, indent=1) + "\n")
        draft.replace(asked.json)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
