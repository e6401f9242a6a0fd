"""Several replicas in one process, step by step, over a loopback; and a plain loop beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raycloud.clock import SystemClock
from raycloud.errors import TransportError
from raycloud.net.lane import Lane, LaneReport
from raycloud.order import MicroBatch, Order, Position, Steps, StepSpan, assign, stream_seed
from raycloud.recovery.quorum import adopt
from raycloud.spec import Job
from raycloud.step.collate import Collate, StepWork
from raycloud.step.commit import collect, commit
from raycloud.step.compute import backward, compute
from raycloud.step.feed import Feed
from raycloud.step.replica import Replica
from raycloud.task import Splits, Task
from tests.loopback import Loopback

CPU = torch.device("cpu")


class Net(nn.Module):
    """Small, with what is hard to split: dropout, batch statistics, a branch not always used."""

    def __init__(self, *, norm: bool, dropout: float, branch: bool) -> None:
        super().__init__()
        # In front of batch statistics a bias has no gradient but rounding, which Adam makes large.
        self.first = nn.Linear(6, 16, bias=not norm)
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, 3)
        self.branch = branch
        self.sometimes = nn.Linear(16, 3)  # used only by batches whose first value is large

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.norm(self.first(x))))
        out: Tensor = self.last(hidden)
        return out + self.sometimes(hidden) if self.branch and x[0, 0] > 0.8 else out


class NetTask(Task):
    """Classification of random points; weights differ from sample to sample, as with tokens."""

    def __init__(
        self,
        *,
        norm: bool = False,
        dropout: float = 0.2,
        double: bool = True,
        sgd: bool = False,
        branch: bool = True,
        samples: int = 70,
    ) -> None:
        self.norm, self.dropout, self.double, self.sgd = norm, dropout, double, sgd
        self.samples, self.branch = samples, branch

    def model(self) -> nn.Module:
        net = Net(norm=self.norm, dropout=self.dropout, branch=self.branch)
        return net.double() if self.double else net

    def data(self, path: str | None) -> Splits:
        rng = np.random.default_rng(7)
        points = rng.normal(size=(self.samples, 6))
        labels = rng.integers(0, 3, size=self.samples)
        return Splits(train=list(zip(points, labels, strict=True)))  # type: ignore[arg-type]

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        points = torch.from_numpy(np.stack([s[0] for s in samples]))
        labels = torch.tensor([int(s[1]) for s in samples])
        return (points if self.double else points.float()), labels

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        each = F.cross_entropy(model(points), labels, reduction="none")
        weights = 1.0 + labels.to(each.dtype)
        return (each * weights).sum() / weights.sum()

    def weight(self, batch: Any, samples: int) -> float:
        return float((1 + batch[1]).sum())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.sgd:
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def job(**changes: Any) -> Job:
    """A small job of this module's task."""
    values: dict[str, Any] = {
        "task": NetTask,
        "steps": 50,
        "global_batch": 16,
        "micro_batch": 2,
        "clip_norm": 0.5,
        "seed": 3,
        "sync": {"bucket_bytes": 1024},
    }
    return Job(**(values | changes))


class Fleet:
    """N replicas that compute steps together, of `samples` in `order` where those are given."""

    def __init__(
        self,
        job: Job,
        task: NetTask,
        shares: Sequence[int],
        *,
        fuse: int = 1,
        samples: Any = None,
        order: Order | None = None,
    ) -> None:
        samples = task.data(None).train if samples is None else samples
        self.job, self.shares = job, tuple(shares)
        self.order = order or Order(samples=len(samples), seed=job.seed)
        self.steps = Steps(
            samples=len(samples), global_batch=job.global_batch, micro_batch=job.micro_batch
        )
        self.fuse = fuse
        self.collate = Collate(task, samples, self.order, pinned=False)
        made = []
        for _ in shares:
            replica = Replica(job, task, device=CPU, steps=50, clock=SystemClock())
            replica.try_out(self.collate.one(self.span(0, Position()).micro_batches[0]))
            made.append(replica)
        self.join(made, shares)
        self.position = Position()

    def span(self, step: int, at: Position) -> StepSpan:
        return self.steps.span(step, at)

    def step(self, number: int) -> float:
        """Compute and commit one step; returns its loss."""
        works = self.compute(number)
        for replica in self.replicas:
            collect(replica, number, never)
        for replica, work in zip(self.replicas, works, strict=True):
            commit(replica, work)
        self.position = self.steps.after(works[0].span)
        total = sum(work.weight for work in works)
        return sum(replica.loss_sum() for replica in self.replicas) / total

    def lose(self, rank: int, number: int, *, during: str) -> None:
        """Step `number`, in which the member of `rank` dies; the others go on with what they have.

        Args:
            rank: Who.
            number: Which step.
            during: It dies before it has said anything (`lane`), before it has sent gradients
                (`gradients`), or after both, and the others hear it too late (`after`).
        """
        span = self.span(number, self.position)
        survivors = [r for r in range(len(self.shares)) if r != rank]
        before = [{n: t.clone() for n, t in r.state.tensors().items()} for r in self.replicas]
        if during == "lane":
            self.hubs[1].cut("a member died")
        works = self.compute(
            number,
            ranks=None if during == "after" else survivors,
            silent=(rank,) if during == "lane" else (),
        )
        self.hubs[0].cut("a member died")
        left, have = [self.replicas[r] for r in survivors], [-1] * len(span.micro_batches)
        for at, replica in enumerate(left):
            if during != "after":
                self._hear(replica, number)
            assert replica.kept is not None
            replica.suspend()  # what would be saved, measured or handed over meanwhile
            state, was = replica.state.tensors(), before[survivors[at]]
            assert all(torch.equal(state[name], was[name]) for name in was)
            for k in replica.kept.micro_batches:
                have[k] = at
        self.join(left, [self.shares[r] for r in survivors])
        adopted = adopt(have, self.shares)
        assert sum(map(len, adopted)) == works[rank].micro_batches
        works = self.compute(number, adopted=adopted)
        for replica in left:
            collect(replica, number, never)
        for replica, work in zip(left, works, strict=True):
            commit(replica, work)
        self.position = self.steps.after(span)

    def _hear(self, replica: Replica, number: int) -> None:
        try:
            collect(replica, number, never)
        except TransportError:
            return
        raise AssertionError("an exchange was complete without a member")

    def join(self, replicas: Sequence[Replica], shares: Sequence[int]) -> None:
        """These replicas are members of a new generation."""
        self.replicas, self.shares = list(replicas), tuple(shares)
        self.hubs = Loopback(len(shares)), Loopback(len(shares))
        for replica, member in zip(self.replicas, self.hubs[0].members, strict=True):
            replica.connect(member)
        self.lanes = [Lane(member) for member in self.hubs[1].members]

    def compute(
        self,
        number: int,
        ranks: Sequence[int] | None = None,
        adopted: Sequence[Sequence[int]] | None = None,
        silent: Sequence[int] = (),
    ) -> list[StepWork]:
        """Compute one step, up to the exchange; returns each member's work.

        Args:
            number: Which step.
            ranks: Who computes; None: all.
            silent: Who says nothing on the lane.
            adopted: What each member computes beside what it has kept; None: its share.
        """
        span = self.span(number, self.position)
        every = span.micro_batches
        dealt = assign(self.shares, len(every))
        mine = [dealt.of(r) for r in range(len(self.shares))] if adopted is None else adopted
        works = [
            StepWork(span=span, passes=self.collate.passes([every[k] for k in some], self.fuse))
            for some in mine
        ]
        there = list(range(len(self.shares))) if ranks is None else ranks
        for rank, (replica, lane) in enumerate(zip(self.replicas, self.lanes, strict=True)):
            before = 0.0 if replica.kept is None else replica.kept.weight
            if rank not in silent:
                lane.send(LaneReport(weight=works[rank].weight + before))
        for rank in there:
            exchange(self.replicas[rank], works[rank], self.collate, self.lanes[rank])
        return works


def exchange(replica: Replica, work: StepWork, collate: Collate, lane: Lane) -> StepWork:
    """Compute a member's part of a step, and send it; returns what it has computed."""
    mine = compute(replica, work, collate)
    try:
        scale = 1.0 / lane.read().weight
    except TransportError as error:
        backward(replica, work.span, collate, None)
        replica.broken = error  # a loop raises it at once
        return mine
    backward(replica, work.span, collate, scale)
    replica.send(behind=True, late=False)
    return mine


def feeding(feed: Feed) -> bool:
    """Whether a thread of the feed is alive."""
    return any(thread.is_alive() for thread in feed._threads)


def never() -> bool:
    """No generation here is abandoned."""
    return False


def plain_loop(
    job: Job,
    task: NetTask,
    steps: int,
    *,
    samples: Any = None,
    order: Order | None = None,
    backwards: bool = False,
    without: Callable[[MicroBatch], bool] = lambda _: False,
    passed_over: Callable[[StepSpan], bool] = lambda _: False,
) -> nn.Module:
    """What a single process computes, written without any of raycloud's training code.

    Args:
        samples: Those to train on, in `order`; None: the task's own.
        backwards: Sum the micro-batches' gradients in reverse order: the rounding of float32 alone.
        without: Micro-batches that weigh nothing.
        passed_over: Steps that are not made.
    """
    torch.default_generator.manual_seed(stream_seed(job.seed, 3))
    model = task.model()
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer, 50)
    samples = task.data(None).train if samples is None else samples
    order = order or Order(samples=len(samples), seed=job.seed)
    cut = Steps(samples=len(samples), global_batch=job.global_batch, micro_batch=job.micro_batch)
    at = Position()

    def batch_of(m: MicroBatch) -> Any:
        ids = order.ids(m.epoch, m.start, m.stop)
        read = samples.gather(ids) if hasattr(samples, "gather") else [samples[i] for i in ids]
        key = stream_seed(job.seed, 1, m.epoch, m.start)
        return task.batch(read, np.random.Generator(np.random.Philox(key=key)))

    for number in range(steps):
        span = cut.span(number, at)
        batches = [(m, batch_of(m)) for m in span.micro_batches if not without(m)]
        at = cut.after(span)
        if passed_over(span) or not batches:
            continue
        weights = [task.weight(batch, m.samples) for m, batch in batches]
        total = sum(weights)
        pairs = list(zip(batches, weights, strict=True))
        for (m, batch), weight in reversed(pairs) if backwards else pairs:
            torch.default_generator.manual_seed(stream_seed(job.seed, 2, m.epoch, m.start))
            (task.loss(model, batch) * (weight / total)).backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between any two entries of parameters or buffers."""
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for (_, a), b in pairs)
