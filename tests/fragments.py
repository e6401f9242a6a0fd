"""Members whose rounds have fragments that travel; and the algorithm in plain words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from raycloud.order import Position, Steps, assign
from raycloud.spec import Job
from raycloud.step.fragments import in_fragments
from raycloud.step.replica import Replica
from raycloud.step.residual import sum_of
from raycloud.step.rounds import OUTER_MOMENTUM, outer_rate
from raycloud.sync.buckets import lay_out
from raycloud.sync.codecs import CODECS, TopK
from tests.coded import simulated
from tests.lockstep import NetTask
from tests.rounds import Plain, RoundFleet
from tests.turns import Turns


class FragmentFleet(RoundFleet):
    """Replicas that exchange fragments within their rounds."""

    def join(self, replicas: Sequence[Replica], shares: Sequence[int]) -> None:
        """See `Fleet.join`; the steps that are made next begin with `at_step`."""
        super().join(replicas, shares)
        self.turns = Turns()
        for hub in self.hubs:
            hub.idle = self.turns.pass_on
        self.in_turns([partial(self._enter, rank) for rank in range(len(shares))])

    def in_turns(self, calls: Sequence[Callable[[], None]]) -> None:
        """Each member waits for the others within a round."""
        self.turns.run(calls)

    def _enter(self, rank: int) -> None:
        fragments = self.replicas[rank].fragments
        assert fragments is not None
        fragments.enter(
            self.lanes[rank],
            self.at_step,
            mine=True,
            travels=True,
            behind=lambda: True,
        )


class Simulation:
    """Rounds of members in one process, without raycloud's training code.

    Args:
        asked: The job.
        task: Its task.
        shares: Of each step.
    """

    def __init__(self, asked: Job, task: NetTask, shares: Sequence[int]) -> None:
        self._asked, self._shares = asked, shares
        self._members = [Plain(asked, task) for _ in shares]
        first = self._members[0]
        self.model, named = first.model, list(first.named.items())
        self._steps = Steps(
            samples=len(first.samples),
            global_batch=asked.global_batch,
            micro_batch=asked.micro_batch,
        )
        buckets = lay_out(named, asked.bucket_bytes(sum(p.nbytes for _, p in named)))
        self._fragments = [
            [b.names for b in some] for some in in_fragments(buckets, asked.sync.stream)
        ]
        self._residuals: dict[tuple[str, ...], list[Tensor]] = {
            names: [torch.zeros(0)] * len(shares) for some in self._fragments for names in some
        }
        self._momentum = {name: torch.zeros_like(p) for name, p in named}
        self._base: dict[str, Tensor] = {}
        self._at, self._step = Position(), 0

    def round(self, end: int) -> None:
        """One round, that ends before step `end`."""
        members, count = self._members, len(self._fragments)
        every = self._asked.most_period // count
        self._base = {n: p.detach().clone() for n, p in members[0].named.items()}
        counted, before = [0] * count, [[0.0] * len(members)] * count
        flight, begin = None, self._step
        while self._step < end:
            self._make_step()
            done = self._step - begin
            if flight is not None and (done % every == 0 or self._step == end):
                steps, theirs, means = flight
                self._apply(means, steps, theirs)
                flight = None
            if done % every == 0 and self._step < end:
                number = (done // every - 1) % count
                weights = [m.weight - w for m, w in zip(members, before[number], strict=True)]
                theirs = self._now()
                means = self._means(number, theirs, weights)
                flight = done - counted[number], theirs, means
                counted[number], before[number] = done, [one.weight for one in members]
        theirs, weights = self._now(), [one.weight for one in members]
        for number in range(count):
            means = self._means(number, theirs, weights)
            self._apply(means, end - begin - counted[number], None)
        for one in members:
            one.weight = 0.0

    def _now(self) -> list[dict[str, Tensor]]:
        return [{n: p.detach().clone() for n, p in m.named.items()} for m in self._members]

    def _make_step(self) -> None:
        span = self._steps.span(self._step, self._at)
        self._step, self._at = self._step + 1, self._steps.after(span)
        dealt = assign(self._shares, len(span.micro_batches))
        for rank, one in enumerate(self._members):
            one.step([span.micro_batches[k] for k in dealt.of(rank)])

    def _apply(
        self, means: dict[str, Tensor], steps: int, theirs: list[dict[str, Tensor]] | None
    ) -> None:
        """What all have moves, and each member with it; without `theirs` each has the same."""
        for name, mean in means.items():
            now = self._base[name] - self._outer(name, mean, steps)
            with torch.no_grad():
                for rank, one in enumerate(self._members):
                    if theirs is None:
                        one.named[name].copy_(now)
                    else:
                        one.named[name].add_(now - theirs[rank][name])
            self._base[name] = now

    def _outer(self, name: str, mean: Tensor, steps: int) -> Tensor:
        if self._asked.sync.outer != "nesterov":
            return mean
        keeps = OUTER_MOMENTUM ** (steps / self._asked.most_period)
        momentum = self._momentum[name] = self._momentum[name] * keeps + mean
        factor = OUTER_MOMENTUM * (1.0 - keeps) / (1.0 - OUTER_MOMENTUM)
        return outer_rate(self._asked.most_period) * (mean + factor * momentum)

    def _means(
        self, number: int, theirs: list[dict[str, Tensor]], weights: Sequence[float]
    ) -> dict[str, Tensor]:
        """Of how far members have moved the parameters of a fragment, as they come."""
        point, means, base = self._asked.sync_point, {}, self._base
        codec = CODECS[point.codec] if point.ratio is None else TopK(point.ratio)
        for names in self._fragments[number]:
            residuals, rows = self._residuals[names], []
            for own, weight, residual in zip(theirs, weights, residuals, strict=True):
                moved = torch.cat([(base[n] - own[n]).flatten() for n in names])
                rows.append(moved * (1.0 / sum(weights) * weight))
                if residual.numel():
                    rows[-1] += residual
            if codec.name == "none" or len(rows) == 1:
                total = sum_of(rows)
            else:
                total, residuals[:] = simulated(rows, codec)
            parts = total.split([base[n].numel() for n in names])
            means |= {n: p.view_as(base[n]) for n, p in zip(names, parts, strict=True)}
        return means
