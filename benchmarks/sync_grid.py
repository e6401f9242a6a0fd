"""Does it train? What rounds and codecs cost in held-out loss, at equal samples.

    python -m benchmarks.sync_grid       # the whole grid; what is in the file is not done again
    python -m benchmarks.sync_grid --model testbed --points 8,int4,nesterov,0.85,0.1 1,none,mean,0,0
    python -m benchmarks.sync_grid --model images --data DIRECTORY --points 1,int4,mean,0,0

Four members of each point are simulated, all in one process; points of one model train side by side
as one batch of models, on a GPU where there is one. Each member takes its quarter of every global
batch, and they exchange what a run of so many members would: at a period of 1 their gradients, else
once a round how far each has come. With a codec that goes as the direct exchange has it: each
member encodes what it sends, the owner of a chunk sums in fp32 and encodes the sum once, and what
either encoding lost is kept and added next time (error feedback). `int4-two-zones` is a tree of two
zones with two members each: these add up as it is, and sums of zones are encoded, once.

No time is measured here; a busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.workload import CLIP_NORM, Stream, Transformer, load_held_out, load_text, loss_of
from jobs.cifar import ResNet, shifted
from raycloud.data.images import decode
from raycloud.step.rounds import OUTER_MOMENTUM, outer_rate
from raycloud.sync.codecs import CODECS, Codec, Int4, Int8, TopK

MEMBERS, ZONES = 4, 2
MEASURED = 4  # times, evenly, the last one at the end
HELD_OUT = 512  # samples of text
LOWEST = 0.1  # of the peak of AdamW's rate, at the end
BLOCK = 256  # a whole number of every codec's blocks
TWO_ZONES = "int4-two-zones"
ALL: dict[str, Codec] = {
    **CODECS,
    TWO_ZONES: CODECS["int4"].for_pair,
    **{f"topk{ratio}": TopK(ratio) for ratio in (2, 4, 8, 16, 32)},
}
RESULTS = Path(__file__).parent / "results" / "sync_grid.json"

Batches = Callable[[int], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Setting:
    """A model, its data, and how long it is trained.

    Attributes:
        build: Its loss: a module whose inputs are a batch.
        data: Of a seed: what gives the batch of an update; and the held-out batches.
        optimizer: Over all parameters as one.
        rate: Of the optimizer at an update.
        batch: Samples of an update, of all members.
        updates: How many.
        clip: The largest norm of a gradient.
        decay: What part of each matrix is added to its gradient.
    """

    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[Batches, Sequence[tuple[Tensor, ...]]]]
    optimizer: Callable[[nn.Parameter], torch.optim.Optimizer]
    rate: Callable[[int], float]
    batch: int
    updates: int
    clip: float
    decay: float = 0.0


class TextLoss(nn.Module):
    """The workload's model at another width, and its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = Transformer(width=width)

    def forward(self, text: Tensor) -> Tensor:
        """Nats per byte of (rows, length + 1)."""
        return loss_of(self.model, text)


def text_data(seed: int, batch: int) -> tuple[Batches, Sequence[tuple[Tensor, ...]]]:
    """The workload's samples, in the order of a seed."""
    stream = Stream(load_text(), seed=seed)
    held_out = load_held_out(HELD_OUT).split(64)
    return lambda update: (stream.batch(update * batch, batch),), [(part,) for part in held_out]


class BatchNorm(nn.Module):
    """By the batch's own statistics; torch's cannot be batched over models on a GPU."""

    def __init__(self, of: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias = of.weight, of.bias

    def forward(self, x: Tensor) -> Tensor:
        """Of (rows, channels, height, width) each channel with mean `bias`, deviation `weight`."""
        mean = x.mean((0, 2, 3), keepdim=True)
        variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
        scale = (variance + 1e-5).rsqrt() * self.weight[:, None, None]
        return (x - mean) * scale + self.bias[:, None, None]


class ImageLoss(nn.Module):
    """The ResNet of `jobs/cifar.py` and its loss; batches are normalised by their own statistics.

    Where the model is evaluated, too: running averages are not what an exchange carries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = ResNet(width=32, depth=1, classes=10)
        for module in self.model.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, BatchNorm(child))
            if isinstance(module, nn.ReLU):
                module.inplace = False

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy, without smoothing."""
        return nn.functional.cross_entropy(self.model(images), labels)


class Images:
    """CIFAR-10 from Parquet files, decoded once.

    Args:
        directory: Of files with `train` or `test` in their names.
    """

    def __init__(self, directory: Path) -> None:
        self._of = {part: self._load(directory, part) for part in ("train", "test")}

    @staticmethod
    def _load(directory: Path, part: str) -> tuple[npt.NDArray[np.uint8], Tensor]:
        tables = [pq.read_table(path) for path in sorted(directory.glob(f"*{part}*.parquet"))]
        images = [decode(table["image"].to_pylist(), size=(32, 32)) for table in tables]
        labels = [table["label"].to_numpy() for table in tables]
        return np.concatenate(images), torch.from_numpy(np.concatenate(labels)).long()

    def data(self, seed: int, batch: int) -> tuple[Batches, Sequence[tuple[Tensor, ...]]]:
        """Shuffled once an epoch, moved and mirrored; as `Setting.data`."""
        images, labels = self._of["train"]
        an_epoch = len(labels) // batch

        def batch_of(update: int) -> tuple[Tensor, ...]:
            epoch, step = divmod(update, an_epoch)
            order = np.random.default_rng((seed, epoch)).permutation(len(labels))
            ids = order[step * batch : (step + 1) * batch]
            moved = shifted(images[ids], np.random.default_rng((seed, epoch, step)))
            return torch.from_numpy(moved), labels[torch.from_numpy(ids)]

        tested, right = self._of["test"]
        parts = zip(torch.from_numpy(tested).split(1000), right.split(1000), strict=True)
        return batch_of, list(parts)


def adamw(whole: nn.Parameter) -> torch.optim.Optimizer:
    """What the workload trains with; its weight decay is its own."""
    return torch.optim.AdamW([whole], betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def sgd(whole: nn.Parameter) -> torch.optim.Optimizer:
    """What `jobs/cifar.py` trains with."""
    return torch.optim.SGD([whole], momentum=0.9, nesterov=True)


def cosine(peak: float, updates: int, warm_up: float = 0.05) -> Callable[[int], float]:
    """A rate that goes up linearly, then down by a cosine."""

    def rate(update: int) -> float:
        warm = warm_up * updates
        if update < warm:
            return peak * (update + 1) / warm
        done = (update - warm) / (updates - warm)
        return peak * (LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * done)))

    return rate


def triangle(peak: float, updates: int, warm_up: float = 0.2) -> Callable[[int], float]:
    """A rate that goes up and down in straight lines."""

    def rate(update: int) -> float:
        done = (update + 1) / (updates + 1)
        return peak * min(done / warm_up, (1 - done) / (1 - warm_up))

    return rate


def text_setting(width: int, peak: float, updates: int) -> Setting:
    """Bytes of text, 32 samples an update."""
    return Setting(
        build=lambda: TextLoss(width),
        data=lambda seed: text_data(seed, 32),
        optimizer=adamw,
        rate=cosine(peak, updates),
        batch=32,
        updates=updates,
        clip=CLIP_NORM,
    )


def settings(images: Path | None) -> dict[str, Setting]:
    """By name: 254,000 and 1.9 million parameters of text, and 310,000 of images where they are."""
    found = {"small": text_setting(66, 3e-3, 800), "testbed": text_setting(192, 1e-3, 1000)}
    if images:
        read = Images(images)
        found["images"] = Setting(
            build=ImageLoss,
            data=lambda seed: read.data(seed, 128),
            optimizer=sgd,
            rate=triangle(0.4, 1500),
            batch=128,
            updates=1500,
            clip=5.0,
            decay=5e-4,
        )
    return found


@dataclass(frozen=True, order=True)
class Point:
    """What is tried.

    Attributes:
        model: A key of `settings`.
        period: Updates between two exchanges.
        codec: A key of `ALL`; with `topk` and a ratio gradients go by int4.
        outer: `mean` or `nesterov`: what is made of the members' mean progress in a round.
        momentum: Of the latter.
        rate: Of the latter; 1 for the mean.
        warm: The part of all updates that come first with a period of 1.
        seed: Of weights and order.
    """

    model: str
    period: int
    codec: str
    outer: str
    momentum: float
    rate: float
    warm: float
    seed: int


def grid(model: str, seeds: Sequence[int]) -> Iterator[Point]:
    """All points of a model; with a period of 1 neither outer step nor warm start exist."""
    for seed, codec in product(seeds, CODECS):
        yield Point(model, 1, codec, "mean", 0.0, 1.0, 0.0, seed)
    for period, codec, outer, warm, seed in product(
        (4, 8, 16, 32), ("none", "int4"), ("mean", "nesterov"), (0.1, 0.0), seeds
    ):
        momentum = OUTER_MOMENTUM if outer == "nesterov" else 0.0
        rate = outer_rate(period) if outer == "nesterov" else 1.0
        yield Point(model, period, codec, outer, momentum, rate, warm, seed)


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    """What `values` are after encoding and decoding, on their device."""
    if codec.name == "none":
        return values
    if codec.name == "bf16":
        return values.bfloat16().float()
    if isinstance(codec, TopK):
        parts = values.reshape(-1, values.shape[-1] // MEMBERS)
        decoded = torch.zeros_like(parts)
        codes = torch.empty(codec.bound(parts.shape[1]), dtype=torch.uint8)
        for part, to in zip(parts, decoded, strict=True):
            codec.encode(part, codes)
            codec.add(codes, to)
        return decoded.view(values.shape)
    flat = values.reshape(-1)
    if flat.is_cuda:
        assert isinstance(codec, Int4 | Int8)  # noqa: S101 - the codecs that have operators
        codes = codec.encode_by_operators(flat)
        return codec.decode_by_operators(codes, len(flat)).view(values.shape)
    codes, decoded = torch.empty(codec.bound(len(flat)), dtype=torch.uint8), torch.zeros_like(flat)
    codec.encode(flat, codes)
    codec.add(codes, decoded)
    return decoded.view(values.shape)


@dataclass
class Signals:
    """What tells how well an exchange fares, summed over exchanges of a point.

    Attributes:
        cosine: Between what a member sends and its own; the mean over members.
        consensus: The square of the mean's length, over the mean square of the members'.
        count: Exchanges.
    """

    cosine: float = 0.0
    consensus: float = 0.0
    count: int = 0

    def see(self, cosine: float, consensus: float) -> None:
        """One exchange."""
        self.cosine += cosine
        self.consensus += consensus
        self.count += 1

    def means(self) -> dict[str, float]:
        """Of one exchange."""
        count = max(self.count, 1)
        return {"cosine": self.cosine / count, "consensus": self.consensus / count}


class Exchange:
    """The mean over the members of many points, through a codec, with error feedback.

    Args:
        codec: Of both ways, but for the part that a member owns: it is added as it is.
        shape: Points, members, values; of these a whole number of blocks for each owner.
        device: Where they are.
    """

    def __init__(self, codec: Codec, shape: tuple[int, int, int], device: torch.device) -> None:
        self.signals = [Signals() for _ in range(shape[0])]
        self._codec = codec
        kept = shape if codec.name != "none" else (shape[0], 1, 1)
        self._residuals = torch.zeros(kept, device=device)

    def mean(self, rows: Tensor, which: Tensor) -> Tensor:
        """Of `rows`, shape (points, MEMBERS, values), of the points numbered; (points, values)."""
        mean = rows.mean(1)
        consensus = mean.square().sum(-1) / rows.square().sum(-1).mean(-1).clamp_min(1e-30)
        cosines = torch.ones(len(which))
        if self._codec.name != "none":
            mean, cosines = self._encoded(rows, which)
        for at, one, other in zip(
            which.tolist(), cosines.tolist(), consensus.tolist(), strict=True
        ):
            self.signals[at].see(one, other)
        return mean

    def _encoded(self, rows: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """The mean, and how near what is sent is to a member's own; of each point."""
        own = self._residuals[which] + rows / MEMBERS
        sent = round_trip(self._codec, own)
        for owner in range(MEMBERS):
            self._part(sent, owner).copy_(self._part(own, owner))
        cosines = nn.functional.cosine_similarity(sent, rows, dim=-1).mean(1)
        own -= sent
        total = sent.sum(1)
        mean = round_trip(self._codec, total)
        lost = (total - mean).view(len(which), MEMBERS, -1)
        for owner in range(MEMBERS):
            self._part(own, owner).add_(lost[:, owner])
        self._residuals[which] = own
        return mean, cosines

    @staticmethod
    def _part(rows: Tensor, owner: int) -> Tensor:
        """What a member has of the values that it owns, shape (points, values / MEMBERS)."""
        return rows.view(len(rows), MEMBERS, MEMBERS, -1)[:, owner, owner]

    def residual_norm(self, point: int) -> float:
        """Of the sum of what its members keep back."""
        return float(self._residuals[point].sum(0).norm())


class ZonesExchange(Exchange):
    """The same of two zones, whose sums are told as codes; the residuals are the zones'."""

    def __init__(self, codec: Codec, shape: tuple[int, int, int], device: torch.device) -> None:
        super().__init__(codec, (shape[0], ZONES, shape[2]), device)

    def _encoded(self, rows: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        sums = rows.unflatten(1, (ZONES, -1)).sum(2) / MEMBERS
        own = self._residuals[which] + sums
        sent = round_trip(self._codec, own)
        self._residuals[which] = own - sent
        return sent.sum(1), nn.functional.cosine_similarity(sent, sums, dim=-1).mean(1)


class Side:
    """Points of one setting and codec that train side by side: replicas are rows of one tensor.

    Args:
        setting: Of them all.
        points: What is tried.
        device: Where they train.
    """

    def __init__(self, setting: Setting, points: Sequence[Point], device: torch.device) -> None:
        self._setting, self._points, self._device = setting, points, device
        self._seeds = sorted({point.seed for point in points})
        data = [setting.data(seed) for seed in self._seeds]
        self._batches = [batches for batches, _ in data]
        self._held_out = data[0][1]
        inits = []
        for seed in self._seeds:
            torch.manual_seed(seed)
            module = setting.build().to(device)
            inits.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
        shapes = {name: p.shape for name, p in module.named_parameters()}
        sizes = [shape.numel() for shape in shapes.values()]
        padding = -sum(sizes) % (MEMBERS * BLOCK)

        def loss(flat: Tensor, *batch: Tensor) -> Tensor:
            parts = flat.split([*sizes, padding])
            named = {n: part.view(s) for (n, s), part in zip(shapes.items(), parts, strict=False)}
            with sdpa_kernel(SDPBackend.MATH):  # the one that can be batched over models
                out: Tensor = functional_call(module, named, batch)
            return out

        self._loss = vmap(loss, in_dims=(0, *[None] * len(self._held_out[0])))
        self._gradient = vmap(grad(loss))
        self._seed_of = torch.tensor([self._seeds.index(p.seed) for p in points], device=device)
        start = nn.functional.pad(torch.stack(inits), (0, padding))[self._seed_of]
        self._whole = nn.Parameter(start.repeat_interleave(MEMBERS, 0))
        self._rows = self._whole.data.view(len(points), MEMBERS, -1)  # the same memory
        self._optimizer = setting.optimizer(self._whole)
        decays = [torch.full((s.numel(),), float(len(s) > 1)) for s in shapes.values()]
        self._decays = setting.decay * torch.cat([*decays, torch.zeros(padding)]).to(device)
        codec, shape = ALL[points[0].codec], (len(points), MEMBERS, start.shape[1])
        stepwise = CODECS["int4"] if isinstance(codec, TopK) else codec
        kind = ZonesExchange if points[0].codec == TWO_ZONES else Exchange
        self._gradients = kind(stepwise, shape, device)
        self._progress = kind(codec, shape, device)
        self._anchors, self._momenta = start.clone(), torch.zeros_like(start)
        self._warm = [round(point.warm * setting.updates) for point in points]

    def train(self) -> list[dict[str, Any]]:
        """All of them, to the end.

        Returns:
            Of each the point, held-out losses by update, what the exchanges signalled, and the
            norms of what error feedback held at last.
        """
        every = self._setting.updates // MEASURED
        losses: list[dict[int, float]] = [{} for _ in self._points]
        for update in range(self._setting.updates):
            self._update(update)
            if (update + 1) % every == 0:
                for of, loss in zip(losses, self._evaluate(), strict=True):
                    of[update + 1] = loss
        exchanges = {"gradients": self._gradients, "progress": self._progress}
        return [
            {
                **asdict(point),
                "machine": machine(self._device),
                "losses": losses[at],
                **{
                    name: {**one.signals[at].means(), "residual": one.residual_norm(at)}
                    for name, one in exchanges.items()
                },
            }
            for at, point in enumerate(self._points)
        ]

    def _update(self, update: int) -> None:
        batch = [
            torch.stack(parts).to(self._device).unflatten(1, (MEMBERS, -1))[self._seed_of]
            for parts in zip(*(batches(update) for batches in self._batches), strict=True)
        ]
        gradient = self._gradient(self._whole.data, *(part.flatten(0, 1) for part in batch))
        rows = gradient.view_as(self._rows)
        if len(every := self._where(lambda p, warm: p.period == 1 or update < warm)):
            rows[every] = self._gradients.mean(rows[every], every)[:, None]
        norms = rows.norm(dim=-1, keepdim=True)
        rows *= (self._setting.clip / (norms + 1e-6)).clamp_max(1.0)
        if self._setting.decay:
            rows += self._decays * self._rows
        self._whole.grad = gradient
        self._optimizer.param_groups[0]["lr"] = self._setting.rate(update)
        self._optimizer.step()
        if len(begun := self._where(lambda _, warm: update + 1 == warm)):
            self._anchors[begun] = self._rows[begun, 0]
        if len(ended := self._where(lambda p, warm: self._ends(p, update + 1 - warm))):
            self._end_rounds(ended)

    def _ends(self, point: Point, done: int) -> bool:
        last = done == self._setting.updates - round(point.warm * self._setting.updates)
        return point.period > 1 and done > 0 and (done % point.period == 0 or last)

    def _end_rounds(self, ended: Tensor) -> None:
        anchors = self._anchors[ended]
        delta = self._progress.mean(anchors[:, None] - self._rows[ended], ended)
        points = [self._points[at] for at in ended.tolist()]
        keeps = torch.tensor([[point.momentum] for point in points], device=self._device)
        momenta = self._momenta[ended] * keeps + delta
        self._momenta[ended] = momenta
        rates = torch.tensor([[point.rate] for point in points], device=self._device)
        delta = rates * (delta + keeps * momenta)
        self._anchors[ended] = anchors - delta
        self._rows[ended] = (anchors - delta)[:, None]

    def _where(self, holds: Callable[[Point, int], bool]) -> Tensor:
        which = [at for at, p in enumerate(self._points) if holds(p, self._warm[at])]
        return torch.tensor(which, dtype=torch.int64, device=self._device)

    @torch.no_grad()
    def _evaluate(self) -> list[float]:
        """The held-out loss of each point's mean over members."""
        means = self._rows.mean(1)
        losses = torch.zeros(len(means), device=self._device)
        for part in self._held_out:
            losses += self._loss(means, *(one.to(self._device) for one in part))
        found: list[float] = (losses / len(self._held_out)).tolist()
        return found


def parse_point(text: str, model: str, seed: int) -> Point:
    """A point as `period,codec,outer,momentum,warm`."""
    try:
        period, codec, outer, momentum, warm = text.split(",")
        rate = outer_rate(int(period)) if outer == "nesterov" else 1.0
        point = Point(model, int(period), codec, outer, float(momentum), rate, float(warm), seed)
    except ValueError:
        raise SystemExit(f"{text!r} is no point: write period,codec,outer,momentum,warm") from None
    if point.period < 1 or codec not in ALL or outer not in {"mean", "nesterov"}:
        known = ", ".join(ALL)
        raise SystemExit(
            f"{text!r}: periods are at least 1, codecs {known}, outer mean or nesterov"
        )
    return point


def machine(device: torch.device) -> str:
    """Of what rows are to be compared: the same processor, torch and text."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    python = platform.python_version()
    return f"{name}, torch {torch.__version__.partition('+')[0]}, the text of Python {python}"


def sides(points: Iterable[Point], most: int) -> Iterator[list[Point]]:
    """Points that can train side by side, at most so many at once."""
    by: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        by[point.model, point.codec].append(point)
    for alike in by.values():
        for begin in range(0, len(alike), most):
            yield alike[begin : begin + most]


def main() -> None:
    """Train by all points that the file lacks, and add each to it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--model", choices=("small", "testbed", "images"), default="small")
    parser.add_argument(
        "--points", nargs="*", help="each period,codec,outer,momentum,warm; not: the grid"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--data", type=Path, help="the directory of CIFAR-10's Parquet files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--together", type=int, help="points at once; not: 1, on a GPU 64")
    asked = parser.parse_args()
    if asked.model == "images" and not (asked.data and list(asked.data.glob("*train*.parquet"))):
        parser.error("--model images needs --data, a directory of Parquet files of CIFAR-10")
    torch.set_num_threads(1)
    seeds = range(asked.seeds)
    points = (
        [parse_point(text, asked.model, seed) for seed in seeds for text in asked.points]
        if asked.points
        else list(grid(asked.model, seeds))
    )
    setting = settings(asked.data)[asked.model]
    device = torch.device(asked.device)
    rows = json.loads(asked.json.read_text()) if asked.json.exists() else []
    here = [row for row in rows if row["machine"] == machine(device)]  # the text is Python's
    known = {tuple(row[name] for name in asdict(points[0])) for row in here}
    left = [point for point in points if tuple(asdict(point).values()) not in known]
    for some in sides(left, asked.together or (64 if device.type == "cuda" else 1)):
        found = Side(setting, some, device).train()
        rows = json.loads(asked.json.read_text()) if asked.json.exists() else []
        draft = asked.json.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps([*rows, *found], indent=1) + "\n")
        draft.replace(asked.json)
        print(*found, sep="\n", flush=True)


if __name__ == "__main__":
    main()
