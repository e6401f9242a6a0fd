"""Replica: the model and all that a step changes with it. A step is a transaction.

    compute    forward passes of this member's part, and all backward passes but the last
    backward   the last one: each bucket of gradients travels as soon as it is full (`step.compute`)
    send       what it did not fill, and the flags
    collect    wait for the sum over members (`step.commit`, like what follows)
    commit     only now parameters, optimizer, buffers and schedule change
    discard    or none of them does

What a member cannot compute at all is left out: `collect` then brings nothing to go on with, and
after `exchange_anew` the mean of the others. A survivor of a fault keeps its model, its optimizer
and its own gradients: when `collect` raises, the step is `suspend`ed; `connect` and `compute` go on
with it in another generation, and what is computed then adds to what was.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from raycloud.errors import InternalError, TaskError, TransportError
from raycloud.net.served import LostServerError
from raycloud.order import stream_seed
from raycloud.step.adascale import AdaScale
from raycloud.step.asynchronous import Asynchronous
from raycloud.step.contract import (
    call,
    check_model,
    check_optimizer,
    check_scheduler,
    goes_by_measured,
    scale_rates,
)
from raycloud.step.device import processor
from raycloud.step.forward import Forward, Fusing
from raycloud.step.fragments import Fragments
from raycloud.step.hyperparameters import Hyperparameters
from raycloud.step.mutation import extra_states, has_modes
from raycloud.step.residual import ResidualPart
from raycloud.step.rounds import Rounds
from raycloud.step.servers import Summing
from raycloud.step.state import ModelState, TrainedParameters, Update, without_compiler
from raycloud.step.stateful import CatchingUp, Commit, History, ReplicaState, Stateful
from raycloud.step.statistics import RunningStatistics
from raycloud.step.straggler import StragglerWatch
from raycloud.step.tables import Tables
from raycloud.sync.gradients import GradientExchange, Gradients
from raycloud.sync.period import Choice
from raycloud.sync.sparse import sparse_parameters
from raycloud.sync.strategy import strategy_of

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import SyncPoint
    from raycloud.net.transport import Transport
    from raycloud.spec import Job
    from raycloud.step.collate import PartialStep, Pass
    from raycloud.step.speculation import Backing
    from raycloud.task import Task

MODEL_STREAM = 3

# Makes further parts of each replica, which are committed after its own, in this order.
PARTS: list[Callable[[Replica], Stateful]] = []


class Replica:
    """A model and everything that a step of a job's task changes with it.

    Args:
        steps: Of the whole job, for the schedule; a function is asked once the model is there, so
            that data may be made ready meanwhile.

    Attributes:
        kept: What is computed of the step that is to be committed next; None: nothing.
        last: Its last pass, whose backward one is to come, and its loss.
        told: All know, in this generation, what of it is skipped.
        broken: Why this step cannot be exchanged in this generation; None: it can.
        notice: Tells a person what had to be done in another way, with details.
        state: All parts of it.
        trains: The part that is model, optimizer and schedule.
        history: The part that is what did not count.
        residual: The part that is what encoding has lost; None: nothing is encoded.
        tables: The part that is rows on servers; None: the model has no `Embedding`.
        adascale: The part that sets the rates of a larger batch as it goes; None: nothing does.
        update: What moves the parameters.
        summing: The servers that sum what is exchanged in lockstep; None: members do.
        rounds: The part that makes one update of the members' own in a round; None: there are none.
        fragments: The same, where fragments travel within them.
        backing: Whom it backs up in this generation, and who backs it up; None: nobody.
        following: It has no state yet, and keeps what it would commit; None: it has.
        by_measured: Its schedule is not stepped once per step, but by `take_measured`.
        local: What is computed is a round of local steps.
        waited_s: In the midst of rounds for exchanges, in all.
        own_extra: Forward passes change what modules hold beside parameters and buffers.
        point: By which updates travel, where the driver has said so; None: as the job says.
        settle: Called before anything changes; returns once that may be.
    """

    point: SyncPoint | None = None

    def __init__(
        self,
        job: Job,
        task: Task,
        *,
        device: torch.device,
        steps: int | Callable[[], int],
        clock: Clock,
    ) -> None:
        self._device, self.errors = device, job.errors
        self.clock, self.clip_norm = clock, job.clip_norm
        self.processor = processor(device)
        torch.default_generator.manual_seed(stream_seed(job.seed, MODEL_STREAM))
        model = call("Task.model", task.model)
        check_model(model)
        self.model = model.to(device)
        self.model.train()
        if not job.compile:
            without_compiler()
        self.optimizer = call("Task.optimizer", lambda: task.optimizer(self.model))
        check_optimizer(self.optimizer)
        scale_rates(self.optimizer, job.rate_factor)
        if has_modes(self.optimizer):
            call("Task.optimizer", self.optimizer.train)
        self.trained = TrainedParameters(task, self.model, self.optimizer)
        self.steps = steps if isinstance(steps, int) else steps()
        self.scheduler = call("Task.scheduler", lambda: task.scheduler(self.optimizer, self.steps))
        check_scheduler(self.scheduler, job.evaluate.every_steps)
        self.by_measured = goes_by_measured(self.scheduler)
        self.gradients = GradientExchange(
            self.trained.parameters,
            bucket_bytes=job.bucket_bytes(self.trained.bytes),
            strategy=strategy_of(job.sync_point),
            clock=clock,
            sparse=sparse_parameters(self.model),
            measured=job.rate_scaling == "adascale",
        )
        self.notice: Callable[[str, Mapping[str, Any]], None] = lambda *_: None
        self.statistics, self.history = RunningStatistics(self.model), History()
        self.forward = Forward(job, task, self.model, self.statistics, device, self._tell)
        self.forward.gradients = self.gradients
        self.following: CatchingUp | None = None
        self.rounds, self.trains = self._trained_by(job)
        self.residual = ResidualPart.of(self.gradients, self._seat)
        self.tables, self.summing = (
            Tables.of(self.model, job, self._seat),
            Summing.of(job, self.gradients.buckets),
        )
        self.adascale = self._scaled_by(job)
        self.state = ReplicaState((*self._own_parts(), *(make(self) for make in PARTS)))
        self.statistics.notice = self._tell
        self._transport: Transport | None = None
        self.broken: TransportError | None = None
        self.pace = StragglerWatch(clock, meets=not job.asynchronous)
        self.kept: PartialStep | None = None
        self.last: tuple[Pass, torch.Tensor] | None = None
        self.own_extra, self.told, self.local, self.waited_s = False, False, False, 0.0
        self.backing: Backing | None = None
        self.settle: Callable[[], None] = lambda: None

    def _own_parts(self) -> Iterable[Stateful]:
        given = Hyperparameters(self.optimizer, self.scheduler)
        more = filter(None, [self.residual, self.rounds, self.tables])
        before = filter(None, [self.adascale])
        return self.statistics, *before, self.trains, given, self.history, *more

    def _scaled_by(self, job: Job) -> AdaScale | None:
        """What sets the rates of a larger batch as it goes; None: nothing does.

        `TaskError`: some gradients do not travel as one, so that their noise is not known.
        """
        if job.rate_scaling != "adascale":
            return None
        if self.tables is not None or self.gradients.sparse_bytes:
            raise TaskError(
                "rate_scaling adascale measures the noise of gradients that all travel as one, and "
                "this model has rows of embeddings that travel apart",
                hint="write rate_scaling sqrt or linear, or use nn.Embedding without sparse=True",
            )
        return AdaScale(
            job.batch_ratio,
            job.micro_batches,
            self.steps,
            measured=lambda: self.gradients.measured,
            update=self.update,
            notice=self._tell,
        )

    def _trained_by(self, job: Job) -> tuple[Rounds | None, ModelState]:
        """The part that is model, optimizer and schedule, and what makes rounds, if any does."""
        stepped = None if self.by_measured else self.scheduler
        update = Update(self.trained, stepped, self.forward.randomness, job.seed, self._tell)
        self.update = update
        trains = ModelState(self.model, self.optimizer, self.scheduler, update)
        first, most = job.first_period, job.most_period
        adapts = first < most and not has_modes(self.optimizer)
        plain = isinstance(self.optimizer, torch.optim.SGD)
        outer = {"auto": "mean" if plain else "nesterov"}.get(job.sync.outer, job.sync.outer)
        given: dict[str, Any] = {
            "trained": self.trained,
            "model": self.model,
            "update": update,
            "trains": trains,
            "choice": Choice(0, first, most),
            "follows": lambda: self.following is not None,
            "moved": self.statistics.parameters.mark,
            "seat": self._seat,
        }
        nesterov = outer == "nesterov"
        self._rounds = partial(Rounds, **given, nesterov=nesterov, adapts=adapts)
        if first == 1 and not adapts:
            return None, trains
        if job.asynchronous:
            if norms := sorted(self.statistics.exact):
                raise TaskError(
                    f"the model has running averages, {norms[0]!r} first, which workers that "
                    "exchange by servers do not keep alike",
                    hint="use GroupNorm or LayerNorm, or write another sync.topology than servers",
                )
            return Asynchronous(job, **given), trains
        if job.sync.stream == 1:
            return self._rounds(), trains
        given |= {"nesterov": nesterov, "adapts": adapts}
        given |= {"round_steps": job.round_steps, "clock": self.clock}
        # A running average counts with all micro-batches that the round was to have.
        given["ends_early"] = not self.statistics.exact
        return Fragments(job.sync.stream, self.gradients, **given), trains

    def make_rounds(self) -> Rounds:
        """Be able to make rounds from now on; between two steps."""
        self.rounds = made = self._rounds()
        self.state.add(made)
        return made

    def make_residual(self) -> ResidualPart:
        """Keep what encoding loses from now on; between two steps."""
        made = ResidualPart.of(self.gradients, self._seat)
        if made is None:
            raise InternalError("what is to be kept of an exchange that loses nothing?")
        self.residual = made
        self.state.add(made)
        return made

    @property
    def fragments(self) -> Fragments | None:
        """The rounds, where fragments travel within them."""
        return self.rounds if isinstance(self.rounds, Fragments) else None

    @property
    def round_steps(self) -> int:
        """Steps of the longest round; 1: there are none."""
        return self.period if self.fragments is None else self.fragments.round_steps

    @property
    def stop(self) -> int:
        """Where a round that is under way ends, where that is sooner than others do; 0: nowhere."""
        return 0 if self.fragments is None else self.fragments.stop

    def take_hidden_s(self) -> float:
        """Seconds in which fragments travelled while this member computed, since the last call."""
        return 0.0 if self.fragments is None else self.fragments.take_hidden_s()

    @property
    def asynchronous(self) -> Asynchronous | None:
        """The rounds, where members exchange updates within them by servers."""
        return self.rounds if isinstance(self.rounds, Asynchronous) else None

    @property
    def has_sums(self) -> bool:
        """Whether a step can be committed later by what its exchange has brought, of fixed size."""
        return self.asynchronous is None and not self.gradients.sparse_bytes

    @property
    def served(self) -> tuple[Tables | Asynchronous | Summing, ...]:
        """What asks servers."""
        every = self.tables, self.asynchronous, self.summing
        return tuple(one for one in every if one is not None)

    def check_servers(self) -> None:
        """`LostServerError`: there are others, or again, and all have to meet for them.

        Rank 0 says so. Those of tables are taken between two steps, without a meeting.
        """
        rank, size = self._seat()
        summing = self.summing if size > 1 else None  # alone, it asks none
        parts = (summing, self.asynchronous) if rank == 0 else ()
        if any(part is not None and part.returned for part in parts):
            raise LostServerError("servers have come, or come back: all meet anew")

    @property
    def processor_number(self) -> int:
        """A number for its kind, that float64 holds exactly."""
        return int(hashlib.sha256(self.processor.encode()).hexdigest()[:12], 16)

    @property
    def courier_s(self) -> float:
        """Processor seconds that the exchanges of this generation have taken beside computing."""
        return getattr(self._transport, "courier_s", 0.0)

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group, with the newest gain of AdaScale's."""
        return float(self.optimizer.param_groups[0]["lr"]) * self.update.factor

    @property
    def period(self) -> int:
        """Steps of a round; 1: each is exchanged by itself."""
        return 1 if self.rounds is None else self.rounds.choice.period

    @property
    def fuse(self) -> int:
        """Micro-batches of a pass, at most."""
        return self.forward.size.now

    @fuse.setter
    def fuse(self, most: int) -> None:
        self.forward.size.most = most

    def _tell(self, what: str, detail: Mapping[str, Any]) -> None:
        self.notice(what, detail)  # whoever that is by then

    @property
    def parameters(self) -> int:
        """Number of parameters, trained or not."""
        return sum(p.numel() for p in self.model.parameters())

    def _seat(self) -> tuple[int, int]:
        return (0, 1) if self._transport is None else (self._transport.rank, self._transport.size)

    def connect(self, transport: Transport) -> None:
        """Exchange over `transport` from the next step on."""
        self._transport, self.told, self.broken = transport, False, None
        self.statistics.forget()
        self.gradients.connect(transport)

    @property
    def foreseeable(self) -> bool:
        """Whether a share's seconds tell those of the next: not on a GPU, nor with a backup."""
        return self.backing is None and self._device.type == "cpu"

    def send(self, *, behind: bool, late: bool) -> None:
        """All is computed: send the rest, and the flags; see `GradientExchange.send`.

        Servers have what is told of rows before the others hear the last of this member.
        """
        if self.broken is None:
            if self.tables is not None:
                if not self.tables.fold():
                    self.forward.loss.fill_(math.nan)
                self.tables.push()
            weight = 0.0 if self.kept is None else self.kept.weight
            moves = self.tables is not None and self._seat()[0] == 0 and self.tables.due
            self.gradients.send(
                behind=behind, astray=self._astray(), late=late, weight=weight, moves=moves
            )

    def exchange_anew(self, scale: float, *, behind: bool) -> None:
        """All know what is skipped: exchange once more what all have computed."""
        self.told = True
        self.begin_exchange(scale)
        self.send(behind=behind, late=False)

    def begin_exchange(self, scale: float) -> None:
        """Send the statistics, then gradients as they come: in the same order everywhere."""
        if self.broken is not None:  # what counts in this member's sum is not known
            return
        if self._transport is not None:
            weight = 0.0 if self.kept is None else self.kept.weight
            try:
                self.statistics.launch(self._transport, scale, weight)
            except TransportError as error:
                self.broken = error
                return
        if self.tables is not None:
            self.tables.scale = scale
        if self.rounds is not None and self.local:
            weight = 0.0 if self.kept is None else self.kept.weight
            with self.waiting():
                self.rounds.give(weight)
            scale *= weight
        self.gradients.begin(scale, nothing=self.local and self.asynchronous is not None)

    def average(self, buffers: Iterable[int]) -> None:
        """Average these buffers too from now on; see `RunningStatistics.average`."""
        self.statistics.average(buffers)
        if self.statistics.changing:  # by each micro-batch: a fused pass would do it less often
            self.fuse = 1

    def leaves_out(self, step: int) -> bool:
        """Whether a step is not to change anything, since the run has gone back because of it."""
        return self.errors.on_nan == "rollback" and step in self.history.left_out

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Meanwhile this member exchanges what it has computed, in the midst of a round."""
        began_s = self.clock.monotonic_s()
        with self.pace.waiting():
            yield
        self.waited_s += self.clock.monotonic_s() - began_s

    def synchronize(self) -> None:
        """Wait until a GPU has computed what was asked of it, so that seconds are those of work."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _astray(self) -> torch.Tensor | float:
        """Not 0 where this member has something to tell before the step can be committed."""
        if self.kept is not None and self.kept.skipped and not self.told:
            return 1.0
        if self.statistics.begun:
            return 1.0
        return 0.0 if self.errors.on_nan == "stop" else ~self.forward.loss.isfinite()

    def stage(self) -> None:
        """Begin to compute a step, of which nothing is kept."""
        self.state.stage()
        self.forward.loss.zero_()

    def reclaim(self, claim: PartialStep | None, loss: float) -> None:
        """Of the round under way this member has what it claims, with this sum of losses."""
        if self.kept is not None:
            self.discard()
        if claim is not None:
            self.stage()
            self.kept = claim
            self.forward.loss.fill_(loss)

    def common_tensors(self) -> dict[str, torch.Tensor]:
        """Those of the state that no member has for itself, as each has moments after a round."""
        tensors = self.state.tensors()
        if self.rounds is None or not self.rounds.unlike:
            return tensors
        moments = self.trains.moments()
        return {name: tensor for name, tensor in tensors.items() if name not in moments}

    def commit_parts(self, step: Commit) -> None:
        """All parts take a step whose mean gradients are in place; one that has the state."""
        self.state.commit(step)
        self.gradients.clear()

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
        call("Task.scheduler", lambda: schedule.step(value))
        self.history.measured = steps, value

    def rows_bytes(self) -> tuple[int, int]:
        """Sent beside exchanges since the last call; what rows are without a codec and copies."""
        sent = 0 if self.asynchronous is None else self.asynchronous.take_bytes()
        sent += 0 if self.fragments is None else self.fragments.take_bytes()
        rows, plain = (0, 0) if self.tables is None else self.tables.take_bytes()
        return sent + rows, plain

    def residual_norm(self) -> float:
        """Of what encoding has lost here, and is kept for the next step."""
        return 0.0 if self.residual is None else self.residual.norm

    def hand_over_residual(self, leaving: Sequence[int], abandoned: Callable[[], bool]) -> None:
        """Members of ranks `leaving` go: what they keep of error feedback stays with the others.

        All members call this. `TransportError`: it broke, or was abandoned.
        """
        if self.residual is not None and self._transport is not None and leaving:
            self.residual.give(self._transport, leaving).finish(abandoned)

    def suspend(self) -> None:
        """The step waits for another generation: what is kept stays, the model is as before."""
        if self.kept is not None:
            self.state.suspend()

    def discard(self) -> None:
        """The step does not count; nothing of it remains."""
        self.state.discard()
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

        `keep` gets the pass, its loss and the gradients of that times its weight.
        """
        kept = extra_states(self.model)
        before = self.trains.extra() if kept else ""
        with contextlib.nullcontext() if self.tables is None else self.tables.trying():
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
