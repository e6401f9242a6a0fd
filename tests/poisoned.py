"""A task that breaks on some samples, whoever computes them; and loops of it over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raycloud.checkpoint.store import LocalStore
from raycloud.clock import SystemClock
from raycloud.events import Event, Noticed, StepsCommitted
from raycloud.net.lane import Lane
from raycloud.order import MicroBatch, Order, Position, Steps
from raycloud.recovery.rendezvous import HOST
from raycloud.spec import Job
from raycloud.step.collate import Collate, Making
from raycloud.step.feed import Adopted
from raycloud.step.replica import Replica
from raycloud.task import Splits
from raycloud.worker.context import Changes, LoopContext, Membership
from raycloud.worker.loop import Loop
from raycloud.worker.saver import Saver
from tests.live_tasks import Paced
from tests.lockstep import CPU, NetTask, never
from tests.sockets import gloo_members, together

_MARK = 50.0


class Raises(torch.autograd.Function):
    """Lets a backward pass come half way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ArithmeticError("half way back")


class Poisoned(NetTask):
    """Breaks on the samples `bad`, in the way it is told.

    Args:
        bad: Their ids.
        how: `loss`, `backward` (half of the gradients are there then), `batch`, `nan`, `hidden` (a
            loss that is not finite, with gradients that are), `data` (a value of the sample is not
            finite), or `memory` (there is only enough for `most` samples at once).
        times: So often only; None: each time.
        most: See `how`.
    """

    def __init__(
        self,
        *,
        bad: Sequence[int] = (),
        how: str = "loss",
        times: int | None = None,
        most: int = 4,
        **settings: Any,
    ) -> None:
        super().__init__(**({"dropout": 0.0, "branch": False} | settings))
        self.bad, self.how, self.left, self.most = tuple(bad), how, times, most
        self.largest = 0

    def data(self, path: str | None) -> Splits:
        rows = list(super().data(path).train)  # type: ignore[call-overload]
        for i in self.bad:
            rows[i][0][1] = float("nan") if self.how == "data" else _MARK
        return Splits(train=rows)

    def batch(self, samples: Sequence[Any], rng: Any) -> Any:
        if self.how == "batch" and any(s[0][1] == _MARK for s in samples) and self._now():
            raise LookupError("no such picture")
        return super().batch(samples, rng)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        hit = bool((batch[0][:, 1] == _MARK).any()) and self.how not in {"batch", "memory"}
        if self.how == "memory":
            if len(batch[0]) > self.most:
                torch.empty(2**56)
            self.largest = max(self.largest, len(batch[0]))
        if not (hit and self._now()):
            return super().loss(model, batch)
        return self._break(model, batch)

    def _break(self, model: nn.Module, batch: Any) -> Tensor:
        if self.how == "loss":
            raise ValueError("a bad sample")
        if self.how == "backward":
            norm = model.get_submodule("norm")
            hook = norm.register_forward_hook(lambda _module, _given, out: Raises.apply(out))
            try:
                return super().loss(model, batch)
            finally:
                hook.remove()
        found = super().loss(model, batch)
        return found * float("nan") if self.how == "nan" else found + float("nan")

    def _now(self) -> bool:
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


class PacedPoison(Paced, Poisoned):
    """The same, as slow as a test wants it."""


def hit(job: Job, task: Poisoned, m: MicroBatch) -> bool:
    """Whether a micro-batch holds a bad sample."""
    order = Order(samples=task.samples, seed=job.seed)
    return any(i in task.bad for i in order.ids(m.epoch, m.start, m.stop))


class Looped:
    """A member's loop with all its parts."""

    def __init__(self, root: Path, asked: Job, task: NetTask, steps: int) -> None:
        samples = task.data(None).train
        clock = SystemClock()
        self.task, self.job, self.steps = task, asked, steps
        self.events: list[Event] = []
        self.replica = Replica(asked, task, device=CPU, steps=50, clock=clock)
        self.replica.notice = lambda what, detail: self.events.append(
            Noticed(what=what, detail=detail)
        )
        order = Order(samples=len(samples), seed=asked.seed)
        skips = asked.errors.on_error == "skip"
        self.parts = LoopContext(
            extend=lambda *_: None,
            host=HOST,
            job=asked,
            steps=Steps(
                samples=len(samples), global_batch=asked.global_batch, micro_batch=asked.micro_batch
            ),
            replica=self.replica,
            collate=Collate(task, samples, order, pinned=False, making=Making(skips=skips)),
            saver=Saver(LocalStore(root), member=0, clock=clock, report=self.events.append),
            changes=Changes(feed_depth=asked.data.prefetch_steps),
            clock=clock,
            report=self.events.append,
            evaluate=lambda _step, _seat: None,
        )
        if task.norm:  # as each member does before its first step: it sees the statistics then
            first = MicroBatch(index=0, epoch=0, start=0, stop=asked.micro_batch)
            self.replica.try_out(self.parts.collate.one(first))

    def run(
        self,
        gradients: Any,
        lane: Any,
        shares: tuple[int, ...],
        abandoned: Callable[[], bool] = never,
    ) -> bool:
        """All steps, as one of the members of these shares."""
        seat = Membership(
            members=tuple(range(len(shares))),
            rank=gradients.rank,
            generation=1,
            shares=shares,
            step=0,
            position=Position(),
            last_step=self.steps,
        )
        self.replica.connect(gradients)
        self.loop = Loop(self.parts, seat)
        self.loop.enter(seat, Lane(lane, abandoned))
        finished = self.loop.run()
        self.parts.saver.wait()
        return finished

    def run_on(self, gradients: Any, lane: Any, shares: tuple[int, ...], adopted: Adopted) -> bool:
        """The same from where it stands, in another generation."""
        seat = replace(
            self.loop.seat,
            members=tuple(range(len(shares))),
            generation=2,
            shares=shares,
            step=self.loop.step,
            position=self.loop.position,
        )
        self.replica.connect(gradients)
        self.loop.enter(seat, Lane(lane), adopted)
        return self.loop.run()

    def notices(self) -> list[str]:
        """What a person is told, but for random numbers that others draw: here they share those."""
        told = [event.what for event in self.events if isinstance(event, Noticed)]
        return [what for what in told if "draw" not in what]

    def skips(self) -> list[dict[str, Any]]:
        """What did not count, as reported."""
        reports = [event for event in self.events if isinstance(event, StepsCommitted)]
        return [dict(skip) for event in reports for skip in event.skips]


def ran(
    root: Path, asked: Job, shares: tuple[int, ...], steps: int, **settings: Any
) -> list[Looped]:
    """Members that have computed `steps` steps together, each with a task of its own."""
    made = [Looped(root, asked, Poisoned(**settings), steps) for _ in shares]
    with gloo_members(len(shares)) as gradients, gloo_members(len(shares)) as lanes:
        several = zip(made, gradients, lanes, strict=True)
        assert all(together(partial(one.run, g, lane, shares) for one, g, lane in several))
    return made
