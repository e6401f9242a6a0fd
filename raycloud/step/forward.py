"""Forward: the passes of a step, exact as if their micro-batches had been computed one by one."""

from __future__ import annotations

import contextlib
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

from raycloud.step.contract import DrawnError, call, check_loss, raised
from raycloud.step.device import PassSize, arrived
from raycloud.step.randomness import Randomness, others_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from raycloud.order import MicroBatch
    from raycloud.spec import Job
    from raycloud.step.collate import Collate, Pass
    from raycloud.step.statistics import RunningStatistics
    from raycloud.sync.gradients import GradientExchange
    from raycloud.task import Task


class Fusing(IntEnum):
    """What is known of passes of several micro-batches. Where members know unlike, the least holds.

    `NEVER`: one was seen to differ from its micro-batches, computed one by one. `COLLATED`: they
    are the same, where `Task.batch` makes one batch of all samples. `JOINED`: the same, too, where
    the batches of single micro-batches are joined. `UNKNOWN`: none was compared.
    """

    NEVER = 0
    COLLATED = 1
    JOINED = 2
    UNKNOWN = 3


class PassQueue:
    """Passes that are still to be computed, one after the other."""

    def __init__(self, passes: Iterable[Pass]) -> None:
        self._left = deque(passes)
        self.begun = False

    def begin(self) -> Pass | None:
        """The next one, which is computed now; None: there is none."""
        self.begun = self.begun or bool(self._left)
        return self._left.popleft() if self._left else None

    def instead(self, passes: Iterable[Pass]) -> None:
        """The one that was begun is not computed; these are in its place."""
        self._left.extendleft(reversed(tuple(passes)))

    def more(self) -> bool:
        """Whether something may follow the one that is begun. Once it is False that is final."""
        return bool(self._left)


class Forward:
    """Computes passes: losses, and of a step's passes all backward ones but the last.

    Attributes:
        size: Micro-batches of a pass, at most.
        fusing: Whether passes of several are known to be exact.
        randomness: What passes draw from.
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
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._job, self._task, self._device = job, task, device
        self._statistics = statistics
        self._model: nn.Module = (
            torch.compile(model)  # type: ignore[assignment]
            if job.compile
            else model
        )
        self.size = PassSize(
            self._largest_pass(),
            device,
            stepwise=job.fuse == "auto",
            reserved_bytes=job.resources.worker.memory_bytes,
            notice=notice,
        )
        self.fusing = Fusing.UNKNOWN
        self.randomness = Randomness(device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.at: tuple[MicroBatch, ...] = ()
        self.gradients: GradientExchange | None = None

    def all_but_last(
        self, todo: PassQueue, collate: Collate, count: int
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
                todo.instead(collate.passes(one.micro_batches, self.size.now))
                continue
            if one.weight == 0.0:  # computed for the model's statistics alone
                continue
            self.loss += loss.detach() * one.weight
            if todo.more():
                call("the backward pass", (loss * one.weight).backward)
            else:
                last = (one, loss)
        if todo.begun:
            self._statistics.parameters.check()
        return last

    def compute(self, passes: Sequence[Pass], collate: Collate, count: int) -> None:
        """Compute what of these is worth it, the last backward pass, too."""
        last = self.all_but_last(PassQueue(self.worth_computing(passes)), collate, count)
        if last is not None:
            call("the backward pass", (last[1] * last[0].weight).backward)

    def try_out(self, one: Pass) -> torch.Tensor:
        """A pass of which nothing stays but gradients of its weighted loss; returns the loss."""
        self._statistics.begin_trial()
        randomness = self.randomness

        def again() -> torch.Tensor:
            randomness.seed(one.seed, everything=True)
            return self.plain(one, index=0, count=1)

        try:
            randomness.seed(one.seed, everything=True)
            before, others = randomness.torch_state(), others_state()
            loss = self.plain(one, index=0, count=1)
            if self.gradients is not None:
                self.gradients.check_none()
            call("the backward pass", (loss * one.weight).backward)
            drawn, others_drawn = randomness.torch_state() != before, others_state() != others
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._statistics.end_trial(loss, again)
        finally:
            randomness.release()
        randomness.everything |= others_drawn
        # By each micro-batch: a fused pass would do it less often.
        if drawn or others_drawn or self._statistics.changing:
            self.size.most = 1
        return loss.detach()

    def worth_computing(self, passes: Sequence[Pass]) -> list[Pass]:
        """All that weigh something, last; and before them the others, where they leave a trace."""
        traced = self._statistics.per_batch or bool(self._statistics.changing)
        weightless = [p for p in passes if p.weight == 0.0] if traced else []
        return [*weightless, *(p for p in passes if p.weight > 0.0)]

    def _exact(self, one: Pass, count: int) -> torch.Tensor | None:
        """The loss of a pass; None where more micro-batches were fused than may be.

        Each micro-batch has a random state of its own, so a fused pass that draws is thrown away,
        and nothing is fused from then on. `DrawnError`: it draws from numpy's or Python's
        generator, which was not seeded for it; from now on it is.
        """
        randomness = self.randomness
        fused = len(one.micro_batches) > 1
        if fused and len(one.micro_batches) > self.size.now:
            return None
        randomness.seed(one.seed)
        before = randomness.torch_state() if fused else b""
        others = None if randomness.everything else others_state()
        loss = self.plain(one, index=one.micro_batches[0].index, count=count)
        if others is not None and others_state() != others:
            randomness.everything, self.size.most = True, 1
            raise DrawnError("numpy's or Python's global random generator was drawn from")
        if fused and randomness.torch_state() != before:
            self.size.most = 1
            return None
        stands = self._statistics.check(fused=fused)
        if self._statistics.begun or not stands:
            self.size.most = 1
        return loss if stands else None

    def plain(self, one: Pass, *, index: int, count: int) -> torch.Tensor:
        """The loss of a pass, whatever that draws."""
        try:
            batch = arrived(one.batch, self._device)
        except RuntimeError as error:  # there may be too little memory for it
            raise raised("moving a batch to the device", error) from error
        single = len(one.micro_batches) == 1
        if single:
            self._statistics.before()
        cast: Any = contextlib.nullcontext()
        if self._job.precision == "bf16":
            cast = torch.autocast(self._device.type, dtype=torch.bfloat16)
        own: Any = contextlib.nullcontext() if self.gradients is None else self.gradients.refused()
        with cast, own:
            loss = call("Task.loss", lambda: self._task.loss(self._model, batch))
        check_loss(loss)
        if single:
            self._statistics.after(index, count)
        checked: torch.Tensor = loss
        return checked

    def _largest_pass(self) -> int:
        if self._statistics.per_batch:
            return 1
        whole = self._job.global_batch // self._job.micro_batch
        return whole if self._job.fuse == "auto" else int(self._job.fuse)
