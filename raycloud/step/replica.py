"""One replica's step as a transaction.

    compute   forward and backward of this member's micro-batches; gradients leave as they are ready
    collect   wait for the others' gradients
    commit    only now parameters, optimizer, buffers and schedule change
    discard   or none of them does

A pass that fails is computed again (`again`), and what a member cannot compute at all is left out:
`collect` then brings nothing to go on with, and after `exchange_anew` the mean of the others.

A survivor of a fault keeps its model, its optimizer and its own gradients: when `collect` raises,
the step is `suspend`ed; `connect` and `compute` go on with it in another generation, and what is
computed then adds to what was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from raycloud.errors import DivergedError, TransportError
from raycloud.order import stream_seed
from raycloud.step.contract import (
    RaisedError,
    call,
    call_backward,
    check_model,
    check_optimizer,
    check_scheduler,
    goes_by_measured,
)
from raycloud.step.device import processor
from raycloud.step.eager import without_compiler
from raycloud.step.forward import Forward, Fusing
from raycloud.step.mutation import extra_states, has_modes
from raycloud.step.pace import Pace
from raycloud.step.partial import Kept
from raycloud.step.randomness import others_state
from raycloud.step.retry import compute_again, skip, trouble_of
from raycloud.step.share import Share
from raycloud.step.state import ModelState, Trained
from raycloud.step.stateful import (
    PARTS,
    CatchingUp,
    Commit,
    History,
    ReplicaState,
)
from raycloud.step.statistics import RunningStatistics
from raycloud.sync.gradients import Exchanged, GradientExchange, Gradients
from raycloud.sync.strategy import STRATEGIES

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.net.transport import Transport
    from raycloud.order import Skip
    from raycloud.spec import ErrorsSection, Job
    from raycloud.step.collate import Collate, Pass, StepWork
    from raycloud.step.speculation import Backing
    from raycloud.task import Task

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
        notice: Tells a person what had to be done in another way, with details.
        processor: Of which kind it is.
        state: All parts of it.
        trains: The part that is model, optimizer and schedule.
        history: The part that is what did not count.
        trained: Which parameters are exchanged.
        pace: Of `compute`, which waits for others only in short turns.
        backing: Whom it backs up in this generation, and who backs it up; None: nobody.
        following: It has no state yet, and keeps what it would commit; None: it has.
        by_measured: Its schedule is not stepped once per step, but by `take_measured`.
        own_extra: Forward passes change what modules hold beside parameters and buffers.
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
        self.processor = processor(device)
        torch.default_generator.manual_seed(stream_seed(job.seed, _MODEL_STREAM))
        model = call("model", task.model)
        check_model(model)
        self.model = model.to(device)
        self.model.train()
        if not job.compile:
            without_compiler()
        self.optimizer = call("optimizer", lambda: task.optimizer(self.model))
        check_optimizer(self.optimizer)
        if has_modes(self.optimizer):
            call("optimizer", self.optimizer.train)
        self.trained = Trained(task, self.model, self.optimizer)
        self.steps = steps if isinstance(steps, int) else steps()
        self.scheduler = call("scheduler", lambda: task.scheduler(self.optimizer, self.steps))
        check_scheduler(self.scheduler, job.evaluate.every_steps)
        self.by_measured = goes_by_measured(self.scheduler)
        bucket_bytes = job.bucket_bytes(
            sum(p.numel() * p.element_size() for _, p in self.trained.parameters)
        )
        self.gradients = GradientExchange(
            self.trained.parameters, bucket_bytes=bucket_bytes, strategy=STRATEGIES["exact"]()
        )
        self.statistics, self.history = RunningStatistics(self.model), History()
        self.trains = ModelState(self.model, self.optimizer, self.scheduler, self._update)
        self.state = ReplicaState(
            (self.statistics, self.trains, self.history, *(make(self) for make in PARTS))
        )
        self.statistics.notice = self._tell
        self.notice: Callable[[str, Mapping[str, Any]], None] = lambda *_: None
        self.forward = Forward(job, task, self.model, self.statistics, device, self._tell)
        self.forward.gradients = self.gradients
        self._update_draws = True  # from numpy's or Python's generator; or none was made yet
        self._transport: Transport | None = None
        self._broken: TransportError | None = None
        self.pace = Pace(clock)
        self.kept: Kept | None = None
        # Told what is skipped, in this generation; seen that a checkpoint can hold the state.
        self.own_extra = self._told = self._held = False
        self.following: CatchingUp | None = None
        self.backing: Backing | None = None
        self.settle: Callable[[], None] = lambda: None

    @property
    def processor_number(self) -> int:
        """A number for its kind, that float64 holds exactly."""
        return int(hashlib.sha256(self.processor.encode()).hexdigest()[:12], 16)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def fuse(self) -> int:
        """Micro-batches of a pass, at most."""
        return self.forward.size.now

    @fuse.setter
    def fuse(self, most: int) -> None:
        self.forward.size.most = most

    def _tell(self, what: str, detail: Mapping[str, Any]) -> None:
        """As `notice` does by then."""
        self.notice(what, detail)

    @property
    def errors(self) -> ErrorsSection:
        """What the job says of them."""
        return self._job.errors

    @property
    def parameters(self) -> int:
        """Number of parameters, trained or not."""
        return sum(p.numel() for p in self.model.parameters())

    def connect(self, transport: Transport) -> None:
        """Exchange over `transport` from the next step on."""
        self._transport, self._told = transport, False
        self.statistics.forget()
        self.gradients.connect(transport)

    def compute(
        self,
        work: StepWork,
        collate: Collate,
        scale: Callable[[], float],
        at_hand: Callable[[], bool] = lambda: False,
    ) -> StepWork:
        """Forward and backward of this member's part; the exchange starts on the way.

        An exchange that breaks meanwhile is told by `collect`: what is begun is computed.

        Args:
            work: The passes; beside what is kept of the same step, if anything is.
            collate: Makes smaller passes, where one fails or turns out not exact.
            scale: One over the step's weight, from the control lane; may wait.
            at_hand: See `GradientExchange.arm`.

        Returns:
            What it has computed in the end: `work`, but for what counts where it is backed up.

        Raises:
            TaskError: The task fails on a micro-batch each time, and the job does not skip it.
        """
        foreseen = self.backing is None and self._device.type == "cpu"
        self.pace.begin(work.micro_batches if foreseen else 0)
        done: StepWork | None = None
        try:
            done = self._compute(work, collate, self.pace.waiting(scale), at_hand)
        finally:
            self.forward.randomness.release()
            self.pace.end(done=done is not None and bool(work.passes))
        return done

    def _compute(
        self,
        work: StepWork,
        collate: Collate,
        scale: Callable[[], float],
        at_hand: Callable[[], bool],
    ) -> StepWork:
        kept = (self.kept or Kept(step=work.span.step)).and_also(work)
        if leaves_out := self.leaves_out(kept.step):
            work = replace(work, passes=(), failed=())
        share = Share(self, work, collate)
        if self.kept is None:
            self._told = False
            self.stage()
        else:
            for part in self.state.parts:
                part.resume()
        self.kept = kept
        if leaves_out:
            self.forward.loss.fill_(math.nan)  # so that all hear of it, also who does not know
        for failed in work.failed:
            skip(self, work.span.step, failed, collate)
        try:
            last = self.forward.all_but_last(share, collate, len(work.span.micro_batches))
            work = share.settle()
            self._launch_last(last, scale, at_hand, share.broken)
        except RaisedError as error:
            if self.gradients.sent:
                raise
            trouble = trouble_of(self.forward.at, error)
            work = share.settle(whole=False)
        else:
            return work
        compute_again(self, work.span, collate, trouble)
        if self.gradients.begun:
            self.gradients.launch()
        else:
            self._launch_last(None, scale, at_hand)
        return work

    def exchange_anew(self, scale: Callable[[], float], at_hand: Callable[[], bool]) -> None:
        """All know what is skipped: exchange once more what all have computed; see `compute`."""
        self._told = True
        self._launch_last(None, scale, at_hand)

    def average(self, buffers: Iterable[int]) -> None:
        """Average these buffers too from now on; see `RunningStatistics.average`."""
        self.statistics.average(buffers)
        if self.statistics.changing:  # by each micro-batch: a fused pass would do it less often
            self.fuse = 1

    def leaves_out(self, step: int) -> bool:
        """Whether a step is not to change anything, since the run has gone back because of it."""
        return self.errors.on_nan == "rollback" and step in self.history.left_out

    def synchronize(self) -> None:
        """Wait until a GPU has computed what was asked of it, so that seconds are those of work."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _launch_last(
        self,
        last: tuple[Pass, torch.Tensor] | None,
        scale: Callable[[], float],
        at_hand: Callable[[], bool],
        broken: TransportError | None = None,
    ) -> None:
        """The last backward, and all that travels beside it, in the same order everywhere."""
        self._broken = broken
        if broken is not None:  # nothing travels: what counts in this member's sum is not known
            return
        if self._transport is not None:
            try:
                weight = 0.0 if self.kept is None else self.kept.weight
                self.statistics.launch(self._transport, scale, weight)
            except TransportError as error:
                self._broken = error
        self.gradients.arm(scale, at_hand, self._astray, self.pace.told)
        if last is not None:
            call_backward(last[1] * last[0].weight)
        self.gradients.launch()

    def _astray(self) -> torch.Tensor | float:
        """Not 0 where this member has something to tell before the step can be committed."""
        if self.kept is not None and self.kept.skipped and not self._told:
            return 1.0
        if self.statistics.begun:
            return 1.0
        return 0.0 if self.errors.on_nan == "stop" else ~self.forward.loss.isfinite()

    def collect(self, step: int, abandoned: Callable[[], bool]) -> Exchanged:
        """Wait for the exchange; the mean gradients are then in place, clipped.

        They are not where it is `astray`, or its norm not finite and `errors.on_nan` not stop.

        Raises:
            DivergedError: A gradient is not finite, and that ends the run.
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
        exchanged = replace(exchanged, exchange_s=self._clock.monotonic_s() - began_s)
        finite = math.isfinite(exchanged.norm)
        if exchanged.astray or (not finite and self.errors.on_nan != "stop"):
            return exchanged
        if not finite:
            raise DivergedError(
                f"the gradient's norm is {exchanged.norm} at step {step}",
                hint="lower the learning rate, set clip_norm, or start from an earlier checkpoint",
            )
        if self._job.clip_norm is not None:
            self.gradients.clip(exchanged.norm, self._job.clip_norm)
        return exchanged

    def commit(
        self, work: StepWork, left_out: Sequence[int] = (), skips: tuple[Skip, ...] = ()
    ) -> None:
        """The step counts, but for `left_out`, as `skips` say; without a state it is kept."""
        step, count = work.span.step, len(work.span.micro_batches)
        self.kept = None
        self.settle()
        done = Commit(step=step, count=count, left_out=left_out, skips=skips)
        if self.following is not None:
            self.following.keep(done)
        else:
            self.commit_parts(done)

    def pass_over(self, step: int, skips: tuple[Skip, ...]) -> None:
        """The step changes nothing but `skips`, here or once the state is here."""
        if self.following is not None:
            self.kept = None
            self.following.keep_nothing(step, skips)
            return
        self.discard()
        self.history.skips += skips

    def stage(self) -> None:
        """Begin to compute a step, of which nothing is kept."""
        for part in self.state.parts:
            part.stage()
        self.forward.loss.zero_()

    def commit_parts(self, step: Commit) -> None:
        """All parts take a step whose mean gradients are in place; one that has the state."""
        for part in self.state.parts:
            part.commit(step)
        self.gradients.clear()

    def _update(self, step: int) -> None:
        """Optimizer and schedule take the gradients that are there, seeded alike everywhere.

        The first one shows whether numpy's and Python's generators have to be seeded, too.
        """
        self.trained.check(step)
        randomness, everything = self.forward.randomness, self._update_draws
        randomness.seed(stream_seed(self._job.seed, _UPDATE_STREAM, step), everything=everything)
        before = others_state()
        try:
            call("optimizer", self.optimizer.step)
            if self.scheduler is not None and not self.by_measured:
                call("scheduler", self.scheduler.step)
            self._update_draws = others_state() != before
        finally:
            randomness.release()
        if self._update_draws and not everything:
            what = "the optimizer began to draw from numpy's or Python's generator: in this step "
            what += "replicas may have drawn unlike numbers, from now on they draw the same"
            self.notice(what, {"step": step})
        self.trained.check_groups(step + 1)
        self.trained.clear()
        if not self._held:  # the optimizer has made its state by now
            self.state.check()
            self._held = True

    def take_measured(self, steps: int, value: float) -> None:
        """The schedule goes by what is measured after so many steps, once; or it is kept."""
        if self.following is not None:
            self.following.keep_measured(steps, value)
        else:
            self.step_schedule(steps, value)

    def step_schedule(self, steps: int, value: float) -> None:
        """The same of one that has the state, or is catching up."""
        if self.history.measured is not None and self.history.measured[0] >= steps:
            return
        self.settle()
        schedule: Any = self.scheduler
        call("scheduler", lambda: schedule.step(value))
        self.history.measured = steps, value

    def suspend(self) -> None:
        """The step has to wait for another generation: what is computed of it is kept.

        The model is as before it, to be saved, measured or handed over.
        """
        if self.kept is not None:
            for part in self.state.parts:
                part.suspend()

    def discard(self) -> None:
        """The step does not count; nothing of it remains."""
        for part in self.state.parts:
            part.discard()
        self.gradients.clear()
        self.trained.clear()
        self.kept = None

    def loss_sum(self) -> float:
        """Sum of weight * loss over this member's micro-batches of the step computed last."""
        return float(self.forward.loss)

    def try_out(
        self, one: Pass, keep: Callable[[Pass, torch.Tensor, Gradients], None] | None = None
    ) -> None:
        """Forward and backward without any effect: to measure, and to learn what the model does.

        Args:
            one: A pass.
            keep: Gets it, with its loss and the gradients of that times its weight.
        """
        kept = extra_states(self.model)
        before = self.trains.extra() if kept else ""
        loss = self.forward.try_out(one)
        if kept and self.trains.extra() != before:
            self.own_extra = True
        for module, state in kept:
            module.set_extra_state(state)
        if keep is not None:
            keep(one, loss, self.gradients.take())
        self.gradients.clear()
        self.trained.clear()

    def may_fuse(self, fusing: Fusing) -> None:
        """All members know this of fused passes, and go by it."""
        self.forward.fusing = fusing
        if fusing in (Fusing.NEVER, Fusing.UNKNOWN):
            self.forward.size.most = 1
