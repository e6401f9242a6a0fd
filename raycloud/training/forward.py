"""The passes of a step: exact, as if their micro-batches had been computed one by one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from raycloud.training.calling import call, call_backward, check_loss
from raycloud.training.device import arrived
from raycloud.training.randomness import random_state, seed_compute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from raycloud.order import MicroBatch
    from raycloud.spec import Job
    from raycloud.sync.gradients import GradientExchange
    from raycloud.task import Task
    from raycloud.training.collate import Collate, Pass
    from raycloud.training.statistics import RunningStatistics
    from raycloud.training.todo import Todo


class Forward:
    """Computes passes: losses, and of a step's passes all backward ones but the last.

    Args:
        job: What is asked.
        task: The user's task.
        model: Its model.
        statistics: The model's.
        device: Where to compute.

    Attributes:
        fuse: Micro-batches of a pass, at most.
        loss: Sum of weight * loss over the passes of the present step.
        at: The micro-batches of the pass under way.
        gradients: Whose no backward pass but the step's own may make; None: nobody's.
    """

    def __init__(
        self,
        job: Job,
        task: Task,
        model: nn.Module,
        statistics: RunningStatistics,
        device: torch.device,
    ) -> None:
        """Passes may be as large as the job allows."""
        self._job, self._task, self._device = job, task, device
        self._statistics = statistics
        self._model: nn.Module = (
            torch.compile(model)  # type: ignore[assignment]
            if job.compile
            else model
        )
        self.fuse = self._largest_pass()
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.at: tuple[MicroBatch, ...] = ()
        self.gradients: GradientExchange | None = None

    def all_but_last(
        self, todo: Todo, collate: Collate, count: int
    ) -> tuple[Pass, torch.Tensor] | None:
        """Compute all but the last backward: its pass and loss; None: none was the last.

        Args:
            todo: What is to be computed, of what is `worth_computing`.
            collate: Makes smaller passes.
            count: Micro-batches of the whole step.
        """
        last: tuple[Pass, torch.Tensor] | None = None
        while (one := todo.begin()) is not None:
            self.at = one.micro_batches
            loss = self._exact(one, count)
            if loss is None:
                todo.instead(collate.passes(one.micro_batches, self.fuse))
                continue
            if one.weight == 0.0:  # computed for the model's statistics alone
                continue
            self.loss += loss.detach() * one.weight
            if todo.more():
                call_backward(loss * one.weight)
            else:
                last = (one, loss)
        if todo.begun:
            self._statistics.check_parameters()
        return last

    def try_out(self, one: Pass) -> None:
        """A pass of which nothing stays but gradients, and what is learned of the model."""
        self._statistics.begin_trial()

        def again() -> torch.Tensor:
            seed_compute(one.seed, self._device)
            return self.plain(one, index=0, count=1)

        seed_compute(one.seed, self._device)
        before = random_state(self._device)
        loss = self.plain(one, index=0, count=1)
        if self.gradients is not None:
            self.gradients.check_none()
        if random_state(self._device) != before:
            self.fuse = 1
        call_backward(loss * one.weight)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._statistics.end_trial(loss, again)
        if self._statistics.changing:  # by each micro-batch: a fused pass would do it less often
            self.fuse = 1

    def worth_computing(self, passes: Sequence[Pass]) -> list[Pass]:
        """All that weigh something, last; and before them the others, where they leave a trace."""
        traced = self._statistics.per_batch or bool(self._statistics.changing)
        weightless = [p for p in passes if p.weight == 0.0] if traced else []
        return [*weightless, *(p for p in passes if p.weight > 0.0)]

    def _exact(self, one: Pass, count: int) -> torch.Tensor | None:
        """The loss of a pass; None where more micro-batches were fused than may be.

        Each micro-batch has a random state of its own, so a fused pass that draws from the
        generator is not what was asked. It is thrown away, and nothing is fused from then on.
        """
        fused = len(one.micro_batches) > 1
        if fused and len(one.micro_batches) > self.fuse:
            return None
        seed_compute(one.seed, self._device)
        before = random_state(self._device) if fused else b""
        loss = self.plain(one, index=one.micro_batches[0].index, count=count)
        if fused and random_state(self._device) != before:
            self.fuse = 1
            return None
        stands = self._statistics.check(fused=fused)
        if self._statistics.begun or not stands:
            self.fuse = 1
        return loss if stands else None

    def plain(self, one: Pass, *, index: int, count: int) -> torch.Tensor:
        """The loss of a pass, whatever that draws."""
        batch = arrived(one.batch, self._device)
        single = len(one.micro_batches) == 1
        if single:
            self._statistics.before()
        cast: Any = contextlib.nullcontext()
        if self._job.precision == "bf16":
            cast = torch.autocast(self._device.type, dtype=torch.bfloat16)
        own: Any = contextlib.nullcontext() if self.gradients is None else self.gradients.refused()
        with cast, own:
            loss = call("loss", lambda: self._task.loss(self._model, batch))
        check_loss(loss)
        if single:
            self._statistics.after(index, count)
        checked: torch.Tensor = loss
        return checked

    def _largest_pass(self) -> int:
        """Micro-batches a pass may fuse: 1 where the model has statistics of a micro-batch."""
        if self._statistics.per_batch:
            return 1
        whole = self._job.global_batch // self._job.micro_batch
        return whole if self._job.fuse == "auto" else int(self._job.fuse)
