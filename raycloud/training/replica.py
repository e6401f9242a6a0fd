"""One replica's step as a transaction.

    compute   forward and backward of this member's micro-batches; gradients leave as they are ready
    collect   wait for the others' gradients
    commit    only now parameters, optimizer, buffers and schedule change
    discard   or none of them does

A survivor of a fault keeps its model, its optimizer and its own gradients: when `collect` raises,
the step is `suspend`ed; `connect` and `compute` go on with it in another generation, and what is
computed then adds to what was.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raycloud.errors import DivergedError, TaskError, TransportError
from raycloud.order import stream_seed
from raycloud.sync.gradients import Exchanged, GradientExchange
from raycloud.training.calling import call, call_backward, check_loss
from raycloud.training.device import arrived
from raycloud.training.kept import Kept
from raycloud.training.randomness import random_state, seed_compute
from raycloud.training.state import ReplicaState
from raycloud.training.statistics import RunningStatistics

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.spec import Job
    from raycloud.sync.transport import Transport
    from raycloud.task import Task
    from raycloud.training.collate import Collate, Pass, StepWork
    from raycloud.training.following import Following

_MODEL_STREAM = 3
_UPDATE_STREAM = 4


class Replica:
    """A model and everything that a step changes with it.

    Args:
        job: What is asked.
        task: The user's task.
        device: Where to compute.
        steps: Steps of the whole job, for the schedule; a function is asked once the model is
            there, so that data may be made ready meanwhile.
        clock: For the seconds reported.

    Attributes:
        kept: What is computed of the step that is to be committed next; None: nothing.
        computing: In the midst of `compute`, which waits for others only in short turns.
        longest_s: The most seconds that it has taken; None before the first time.
        following: It has no state yet, and keeps what it would commit; None: it has.
        settle: Called before anything changes; returns once that may be.
    """

    def __init__(
        self,
        job: Job,
        task: Task,
        *,
        device: torch.device,
        steps: int | Callable[[], int],
        clock: Clock,
    ) -> None:
        """Build the model under the job's seed, then the optimizer and the schedule."""
        self._job = job
        self._task = task
        self._device = device
        self._clock = clock
        torch.default_generator.manual_seed(stream_seed(job.seed, _MODEL_STREAM))
        self.model = call("model", task.model).to(device)
        self.model.train()
        self.optimizer = call("optimizer", lambda: task.optimizer(self.model))
        self.steps = steps if isinstance(steps, int) else steps()
        self.scheduler = call("scheduler", lambda: task.scheduler(self.optimizer, self.steps))
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise TaskError(
                "Task.scheduler returned ReduceLROnPlateau, which waits for a measured loss",
                hint="return a schedule that is stepped once per step",
            )
        self.state = ReplicaState(self.model, self.optimizer, self.scheduler)
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        if not trained:
            raise TaskError(
                "the model has no parameter that requires a gradient", hint="check Task.model"
            )
        gradient_bytes = sum(p.numel() * p.element_size() for _, p in trained)
        self.gradients = GradientExchange(trained, bucket_bytes=job.bucket_bytes(gradient_bytes))
        self.statistics = RunningStatistics(self.model)
        self.fuse = self._largest_pass()
        self._forward: nn.Module = (
            torch.compile(self.model)  # type: ignore[assignment]
            if job.compile
            else self.model
        )
        self._transport: Transport | None = None
        self._broken: TransportError | None = None
        self.computing = False
        self.longest_s: float | None = None
        self.kept: Kept | None = None
        self.following: Following | None = None
        self.settle: Callable[[], None] = lambda: None
        self._loss = torch.zeros((), dtype=torch.float64, device=device)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def parameters(self) -> int:
        """Number of parameters, trained or not."""
        return sum(p.numel() for p in self.model.parameters())

    def connect(self, transport: Transport) -> None:
        """Exchange over `transport` from the next step on."""
        self._transport = transport
        self.statistics.forget()
        self.gradients.connect(transport)

    def compute(
        self,
        work: StepWork,
        collate: Collate,
        scale: Callable[[], float],
        at_hand: Callable[[], bool] = lambda: False,
    ) -> None:
        """Forward and backward of this member's part; the exchange starts on the way.

        An exchange that breaks meanwhile is told by `collect`: what is begun is computed.

        Args:
            work: The passes; beside what is kept of the same step, if anything is.
            collate: Makes single micro-batches again, where a fused pass turns out not exact.
            scale: One over the step's weight, from the control lane; may wait.
            at_hand: See `GradientExchange.arm`.
        """
        self.computing, began_s = True, self._clock.monotonic_s()
        try:
            self._compute(work, collate, scale, at_hand)
            self.longest_s = max(self.longest_s or 0.0, self._clock.monotonic_s() - began_s)
        finally:
            self.computing = False

    def _compute(
        self,
        work: StepWork,
        collate: Collate,
        scale: Callable[[], float],
        at_hand: Callable[[], bool],
    ) -> None:
        if self.kept is None:
            self.statistics.stage()
            self._loss.zero_()
        else:
            self.statistics.resume()
        self.kept = (self.kept or Kept(step=work.span.step)).and_also(work)
        count = len(work.span.micro_batches)
        todo = self._worth_computing(work.passes)
        last: tuple[Pass, torch.Tensor] | None = None
        while todo:
            one = todo.popleft()
            loss = self._exact_forward(one, count)
            if loss is None:
                todo.extendleft(collate.one(m) for m in reversed(one.micro_batches))
                continue
            if one.weight == 0.0:  # computed for the model's statistics alone
                continue
            self._loss += loss.detach() * one.weight
            if todo:
                call_backward(loss * one.weight)
            else:
                last = (one, loss)
        self._launch_last(last, self.kept.weight, scale, at_hand)

    def _worth_computing(self, passes: tuple[Pass, ...]) -> deque[Pass]:
        """All that weigh something, last; and before them the others, where they leave a trace."""
        traced = self.statistics.per_batch or bool(self.statistics.changing)
        weightless = [p for p in passes if p.weight == 0.0] if traced else []
        return deque([*weightless, *(p for p in passes if p.weight > 0.0)])

    def synchronize(self) -> None:
        """Wait until a GPU has computed what was asked of it, so that seconds are those of work."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _launch_last(
        self,
        last: tuple[Pass, torch.Tensor] | None,
        weight: float,
        scale: Callable[[], float],
        at_hand: Callable[[], bool],
    ) -> None:
        """The last backward, and all that travels beside it, in the same order everywhere."""
        self._broken = None
        if self._transport is not None:
            try:
                self.statistics.launch(self._transport, scale, weight)
            except TransportError as error:
                self._broken = error
        self.gradients.arm(scale, at_hand)
        if last is not None:
            call_backward(last[1] * last[0].weight)
        self.gradients.launch()

    def collect(self, step: int, abandoned: Callable[[], bool]) -> Exchanged:
        """Wait for the exchange; the mean gradients are then in place, clipped.

        Raises:
            DivergedError: A gradient is not finite.
            TransportError: The exchange broke, or was abandoned. Nothing has changed, and what is
                computed is kept.
        """
        if self._broken is not None:
            raise self._broken
        began_s = self._clock.monotonic_s()
        if self.following is not None:
            self.following.catch_up(self.gradients.arrived)
        self.statistics.collect(abandoned)
        exchanged = self.gradients.collect(abandoned)
        exchange_s = self._clock.monotonic_s() - began_s
        if not exchanged.norm < float("inf"):
            raise DivergedError(
                f"the gradient's norm is {exchanged.norm} at step {step}",
                hint="lower the learning rate, set clip_norm, or start from an earlier checkpoint",
            )
        if self._job.clip_norm is not None:
            self.gradients.clip(exchanged.norm, self._job.clip_norm)
        return replace(exchanged, exchange_s=exchange_s)

    def commit(self, work: StepWork) -> None:
        """The step counts; or it is kept, to be committed once the state is here."""
        step, count = work.span.step, len(work.span.micro_batches)
        self.kept = None
        self.settle()
        if self.following is not None:
            self.following.keep(step, count)
            return
        self.update(step)
        self.statistics.commit(count)
        self.gradients.clear()

    def update(self, step: int) -> None:
        """Optimizer and schedule take the gradients that are there."""
        seed_compute(stream_seed(self._job.seed, _UPDATE_STREAM, step), self._device)
        call("optimizer", self.optimizer.step)
        if self.scheduler is not None:
            call("scheduler", self.scheduler.step)

    def suspend(self) -> None:
        """The step has to wait for another generation: what is computed of it is kept.

        The model is as before it, to be saved, measured or handed over.
        """
        if self.kept is not None:
            self.statistics.suspend()

    def discard(self) -> None:
        """The step does not count; nothing of it remains."""
        self.statistics.discard()
        self.gradients.clear()
        self.kept = None

    def loss_sum(self) -> float:
        """Sum of weight * loss over this member's micro-batches of the step computed last."""
        return float(self._loss)

    def checked_loss(self, step: int) -> float:
        """The same, of a step that is to be committed.

        Raises:
            DivergedError: It is not finite.
        """
        loss = self.loss_sum()
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss of step {step} is {loss}",
                hint="lower the learning rate, or look at the samples of this step",
            )
        return loss

    def try_out(self, one: Pass) -> None:
        """Forward and backward without any effect: to measure, and to learn what the model does."""
        self.statistics.begin_trial()
        seed_compute(one.seed, self._device)
        before = random_state(self._device)
        loss = self._pass_forward(one, index=0, count=1)
        if random_state(self._device) != before:
            self.fuse = 1
        call_backward(loss * one.weight)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.statistics.end_trial()
        if self.statistics.changing:  # by each micro-batch: a fused pass would do it less often
            self.fuse = 1
        self.gradients.clear()

    def _exact_forward(self, one: Pass, count: int) -> torch.Tensor | None:
        """The loss of a pass; None where several micro-batches were fused that must not be.

        Each micro-batch has a random state of its own, so a fused pass that draws from the
        generator is not what was asked. It is thrown away, and nothing is fused from then on.
        """
        fused = len(one.micro_batches) > 1
        if fused and self.fuse == 1:
            return None
        seed_compute(one.seed, self._device)
        before = random_state(self._device) if fused else b""
        loss = self._pass_forward(one, index=one.micro_batches[0].index, count=count)
        if fused and random_state(self._device) != before:
            self.fuse = 1
            return None
        self.statistics.check()
        return loss

    def _pass_forward(self, one: Pass, *, index: int, count: int) -> torch.Tensor:
        batch = arrived(one.batch, self._device)
        single = len(one.micro_batches) == 1
        if single:
            self.statistics.before()
        cast: Any = contextlib.nullcontext()
        if self._job.precision == "bf16":
            cast = torch.autocast(self._device.type, dtype=torch.bfloat16)
        with cast:
            loss = call("loss", lambda: self._task.loss(self._forward, batch))
        check_loss(loss)
        if single:
            self.statistics.after(index, count)
        checked: torch.Tensor = loss
        return checked

    def _largest_pass(self) -> int:
        """Micro-batches a pass may fuse: 1 where the model has statistics of a micro-batch."""
        if self.statistics.per_batch:
            return 1
        whole = self._job.global_batch // self._job.micro_batch
        return whole if self._job.fuse == "auto" else int(self._job.fuse)
