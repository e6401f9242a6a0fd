"""Members that compute rounds together over a loopback; and the algorithm in plain words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from raycloud.net.lane import Lane, LaneReport
from raycloud.order import (
    MicroBatch,
    Order,
    Position,
    Round,
    Steps,
    assign,
    round_at,
    stream_seed,
    whole_shares,
)
from raycloud.recovery.quorum import adopt
from raycloud.spec import Job
from raycloud.step.collate import StepWork
from raycloud.step.commit import collect, commit
from raycloud.step.feed import adopted_by_step
from raycloud.step.local import begin_round, compute_step
from raycloud.step.replica import Replica
from raycloud.step.residual import sum_of
from raycloud.step.rounds import OUTER_MOMENTUM, average_moments, outer_rate
from raycloud.sync.buckets import lay_out
from raycloud.sync.codecs import CODECS, TopK
from tests.coded import simulated
from tests.lockstep import Fleet, NetTask, never
from tests.sockets import gloo_members, together


class RoundFleet(Fleet):
    """Replicas that compute rounds together, and exchange at the end of each."""

    at_step = 0  # where a generation begins

    def whole(self, step: int, end: int) -> Round:
        """The round of steps [step, end)."""
        return round_at(self.steps, step, self.position, end)

    def compute_steps(
        self,
        whole: Round,
        ranks: Sequence[int] | None = None,
        adopted: Sequence[Sequence[int]] | None = None,
        until: int | None = None,
    ) -> None:
        """Compute a round up to its step number `until`; of what is `adopted`, where that is."""
        dealt = adopted_by_step(whole, None if adopted is None else tuple(map(tuple, adopted)))

        def compute(rank: int, replica: Replica) -> None:
            if replica.residual is not None:
                replica.residual.encode(of_updates=True)
            begin_round(replica, whole)
            for at, span in enumerate(whole.spans[:until]):
                plain = self.steps.span(span.step, Position(epoch=span.epoch, offset=span.start))
                every = plain.micro_batches
                mine = assign(whole_shares(self.shares, span.step), len(every)).of(rank)
                mine = dealt[span.step][rank] if dealt else mine
                passes = self.collate.passes([every[k] for k in mine], self.fuse)
                work = StepWork(span=plain, passes=passes).within(span)
                compute_step(replica, work, at, whole, self.collate)

        several = enumerate(self.replicas)
        self.in_turns([partial(compute, k, r) for k, r in several if ranks is None or k in ranks])

    def in_turns(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make calls of members; none waits for another where nothing travels within a round."""
        for call in calls:
            call()

    def exchange(self, whole: Round, *, arrives: bool = True) -> None:
        """Exchange what all have computed of a round, and commit it, if it `arrives`."""
        for replica, lane in zip(self.replicas, self.lanes, strict=True):
            lane.send(LaneReport(weight=0.0 if replica.kept is None else replica.kept.weight))
        for replica, lane in zip(self.replicas, self.lanes, strict=True):
            replica.begin_exchange(1.0 / lane.read().weight)
            replica.send(behind=True, late=False)
        if not arrives:
            return
        for replica in self.replicas:
            collect(replica, whole.step, never)
        for replica in self.replicas:
            commit(replica, StepWork(span=whole, passes=()))
        self.position = self.steps.after(whole.spans[-1])

    def round(self, step: int, end: int) -> None:
        """Compute and commit one round."""
        whole = self.whole(step, end)
        self.compute_steps(whole)
        self.exchange(whole)

    def lose_in_round(self, rank: int, step: int, end: int, *, after: int) -> None:
        """A round in which the member of `rank` dies, where all have computed `after` steps of it.

        As many steps as there are: before the exchange is complete.
        """
        self.at_step, whole = step, self.whole(step, end)
        start = [[p.detach().clone() for p in r.model.parameters()] for r in self.replicas]
        self.compute_steps(whole, until=after)
        have = [-1] * len(whole.micro_batches)
        survivors = [r for r in range(len(self.shares)) if r != rank]
        if after == len(whole.spans):
            self.hubs[0].cut("a member died")
            self.exchange(whole, arrives=False)
        for at, one in enumerate(survivors):
            replica = self.replicas[one]
            replica.suspend()
            pairs = zip(replica.model.parameters(), start[one], strict=True)
            assert all(torch.equal(p, was) for p, was in pairs)
            for k in replica.kept.micro_batches if replica.kept else ():
                have[k] = at
        self.join([self.replicas[r] for r in survivors], [self.shares[r] for r in survivors])
        if self.replicas[0].stop:  # what was computed of it is a round of its own
            whole = self.whole(step, self.replicas[0].stop)
            have = have[: len(whole.micro_batches)]
        self.compute_steps(whole, adopted=adopt(have, self.shares))
        kept = [k for r in self.replicas if r.kept for k in r.kept.micro_batches]
        assert sorted(kept) == list(range(len(have)))
        self.exchange(whole)

    def average(self) -> None:
        """Average what optimizers hold."""
        with gloo_members(len(self.replicas)) as members:
            several = zip(self.replicas, map(Lane, members), strict=True)
            together(
                partial(average_moments, r.rounds, r.trains, lane, has=True)
                for r, lane in several
                if r.rounds is not None
            )


class Plain:
    """One member of the simulation."""

    def __init__(self, asked: Job, task: NetTask) -> None:
        torch.default_generator.manual_seed(stream_seed(asked.seed, 3))
        self.asked, self.task, self.model = asked, task, task.model()
        self.optimizer = task.optimizer(self.model)
        self.schedule = task.scheduler(self.optimizer, 50)
        self.named = dict(self.model.named_parameters())
        self.samples = task.data(None).train
        self.order = Order(samples=len(self.samples), seed=asked.seed)
        self.weight = 0.0

    def step(self, some: Sequence[MicroBatch]) -> None:
        """Make a step by these alone."""
        own = 0.0
        for m in some:
            ids = self.order.ids(m.epoch, m.start, m.stop)
            batch = self.task.batch([self.samples[i] for i in ids], None)
            torch.default_generator.manual_seed(stream_seed(self.asked.seed, 2, m.epoch, m.start))
            weight = self.task.weight(batch, m.samples)
            (self.task.loss(self.model, batch) * weight).backward()
            own += weight
        used = [p for p in self.model.parameters() if p.grad is not None]
        for p in used:
            p.grad = None if p.grad is None else p.grad * (1.0 / own)
        torch.nn.utils.clip_grad_norm_(used, self.asked.clip_norm or float("inf"))
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.weight += own


def simulated_rounds(
    asked: Job,
    task: NetTask,
    shares: Sequence[float],
    ends: Sequence[int],
    *,
    without: Callable[[MicroBatch], bool] = lambda _: False,
) -> list[nn.Module]:
    """What members of such shares end with, without raycloud's training code.

    Args:
        asked: The job.
        task: Its task.
        shares: Of each step.
        ends: One past the last step of each round.
        without: Micro-batches that weigh nothing.
    """
    members = [Plain(asked, task) for _ in shares]
    first = members[0]
    cut = Steps(
        samples=len(first.samples), global_batch=asked.global_batch, micro_batch=asked.micro_batch
    )
    layout = [b.names for b in lay_out(list(first.named.items()), asked.bucket_bytes(0))]
    kept = [[torch.zeros(0)] * len(shares) for _ in layout]
    momentum = {name: torch.zeros_like(p) for name, p in first.named.items()}
    at, step = Position(), 0
    for end in ends:
        start = {name: p.detach().clone() for name, p in first.named.items()}
        while step < end:
            span = cut.span(step, at)
            step, at = step + 1, cut.after(span)
            dealt = assign(whole_shares(shares, step - 1), len(span.micro_batches))
            for rank, one in enumerate(members):
                mine = (span.micro_batches[k] for k in dealt.of(rank))
                one.step([m for m in mine if not without(m)])
        for names, residuals in zip(layout, kept, strict=True):
            total = _exchanged(asked, members, start, names, residuals)
            for name, part in zip(
                names, total.split([start[n].numel() for n in names]), strict=True
            ):
                mean = part.view_as(start[name])
                if asked.sync.outer == "nesterov":
                    momentum[name].mul_(OUTER_MOMENTUM).add_(mean)
                    rate = outer_rate(asked.most_period)
                    mean = rate * (mean + OUTER_MOMENTUM * momentum[name])
                with torch.no_grad():
                    for one in members:
                        one.named[name].copy_(start[name] - mean)
        for one in members:
            one.weight = 0.0
    return [one.model for one in members]


def _exchanged(
    asked: Job,
    members: Sequence[Plain],
    start: dict[str, Tensor],
    names: Sequence[str],
    residuals: list[Tensor],
) -> Tensor:
    """The weighted mean of what all have moved these, as it comes out of the exchange."""
    point = asked.sync_point
    codec = CODECS[point.codec] if point.ratio is None else TopK(point.ratio)
    whole = sum(one.weight for one in members)
    rows = []
    for one, residual in zip(members, residuals, strict=True):
        moved = [(start[n] - one.named[n].detach()).flatten() for n in names]
        rows.append(torch.cat(moved) * (1.0 / whole * one.weight))
        if residual.numel():
            rows[-1] += residual
    if codec.name == "none" or len(rows) == 1:
        return sum_of(rows)
    total, residuals[:] = simulated(rows, codec)
    return total
