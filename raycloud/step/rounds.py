"""Rounds of local steps (local SGD, DiLoCo): a member's own updates, until all become one.

In a round each member moves its parameters by the gradients of its own micro-batches. At the end it
gives how far it has come, theta_start - theta, weighted by what it has computed; the exchange is
that of gradients. The mean D moves the parameters that all had at the start:

    mean       theta <- theta_start - D
    nesterov   m <- 0.85 m + D;  theta <- theta_start - r (D + 0.85 m),  r = sqrt(H / 32) <= 1

for rounds of H steps (Stich, "Local SGD converges fast", ICLR 2019; Douillard et al., "DiLoCo",
2023, whose 0.9 and 0.7 are for rounds of hundreds of steps; these are what `benchmarks.sync_grid`
finds for 8 and 16). The round is a transaction as a step is. What the optimizer holds, its moments,
is each member's own, in a checkpoint too; where the state is handed over, it becomes the mean of
all.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raycloud.errors import TaskError
from raycloud.net.transport import finish
from raycloud.step.mutation import has_modes
from raycloud.step.residual import sum_of
from raycloud.step.state import layout
from raycloud.step.stateful import Commit, Stateful
from raycloud.sync.gradients import is_sparse
from raycloud.sync.period import Choice

if TYPE_CHECKING:
    from raycloud.net.lane import Lane
    from raycloud.order import Round
    from raycloud.step.collate import PartialStep
    from raycloud.step.state import ModelState, TrainedParameters, Update

OUTER_MOMENTUM = 0.85
_RATE_ONE = 32  # steps of a round whose outer rate is 1
_MOMENTUM, _INNER, _WEIGHT = "momentum/", "inner/", "weight"  # the last two by member
_IDLE = 2.0**-20  # the weight of the moments of who has computed nothing in a round


def outer_rate(period: int) -> float:
    """Nesterov's, for rounds of so many steps.

    In short ones the moments of the members' optimizers outlive a round, and go on where the outer
    step has already been.

    >>> [round(outer_rate(period), 2) for period in (8, 16, 100)]
    [0.5, 0.71, 1.0]
    """
    return min(1.0, math.sqrt(period / _RATE_ONE))


class Rounds(Stateful):
    """The parameters in a round: where it began, what this member has made of them, what all do.

    Order of calls in a round: `stage`, or `resume`; `start`; for each step `foretell`,
    `before_step`, `mean_gradient`, `take_step` and `after_step`; `give`, before the exchange; then
    `commit` or `discard`. A follower takes no step. Steps that are no part of a round leave all
    this alone.

    Args:
        trained: What is moved.
        model: Whose other tensors no step of a round may move.
        update: Steps optimizer and schedule.
        trains: Where the optimizer's tensors, its moments, are.
        nesterov: Momentum over rounds.
        choice: How many steps rounds have at first.
        adapts: That is chosen in the run.
        follows: This member has no state yet.
        moved: Called where parameters have moved, in the midst of a round.
        seat: This member's rank, and how many members there are.

    Attributes:
        choice: How many steps rounds have.
        weight: Of what this member has computed of the round before.
        given: The squared norm of what it has given for the exchange of that.
        unlike: Members' moments differ: a checkpoint has those of each, to be loaded as residuals
            are: as many members take up each their own, others the mean.
    """

    name = "outer"

    def __init__(  # noqa: PLR0913 - what is moved, by what, and what it must know of its member
        self,
        trained: TrainedParameters,
        model: nn.Module,
        update: Update,
        trains: ModelState,
        *,
        nesterov: bool,
        choice: Choice,
        adapts: bool,
        follows: Callable[[], bool],
        moved: Callable[[], None],
        seat: Callable[[], tuple[int, int]],
    ) -> None:
        if has_modes(trained.optimizer):
            raise TaskError(
                f"{type(trained.optimizer).__name__} keeps averages of the parameters itself, and "
                "the steps of a round would take them apart",
                hint="write sync.period 1, or let Task.optimizer return another optimizer",
            )
        self._trained, self._update, self._trains, self._seat = trained, update, trains, seat
        self._names = tuple(name for name, _ in trained.parameters)
        self._parameters = tuple(p for _, p in trained.parameters)
        mine = {id(p) for p in self._parameters}
        others = (*model.named_parameters(), *model.named_buffers())
        update.others = [(name, t) for name, t in others if id(t) not in mine]
        self._nesterov = nesterov
        self._momentum: list[torch.Tensor] = []
        self._remember(nesterov)
        self._follows, self._moved = follows, moved
        self.choice, self.adapts = choice, adapts
        self._start = [torch.empty(0)] * len(self._parameters)
        self._settings: Any = None  # of optimizer and schedule, at the start
        self._started = self._suspended = False
        self._averages = False  # it is known that all that the optimizer holds can be averaged
        self._stepped = 0  # steps of the round that the schedule has seen
        self.weight, self.given, self.unlike = 0.0, 0.0, False

    def stage(self) -> None:
        """See `Stateful.stage`: whether it is a round, `start` says."""
        self._started = self._suspended = False

    def start(self) -> None:
        """A round begins here; without effect in one that is under way, and for a follower."""
        if self._started or self._follows():
            return
        self._started, self._stepped = True, 0
        self._start = [p.detach().clone() for p in self._parameters]
        self._settings = self._now()

    def foretell(self, at: int, whole: Round, weight: float) -> None:
        """Step number `at` is about to begin: with it this member has computed that `weight`."""

    def before_step(self, at: int, kept: PartialStep, loss: torch.Tensor) -> None:
        """Step number `at` begins; of the round there is `kept`, with this sum of losses."""

    def after_step(self, at: int, whole: Round, kept: PartialStep, loss: torch.Tensor) -> None:
        """It is made."""

    def mean_gradient(self, weight: float, clip_norm: float | None) -> float:
        """Make this member's own gradient, a sum over so much `weight`, the mean, and clip it.

        Returns its norm before clipping; `nan` without weight, where there is none.
        """
        if weight == 0.0:
            self._forget_gradients()
            return float("nan")
        own = []
        for name, p in zip(self._names, self._parameters, strict=True):
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise is_sparse(name)
            p.grad.mul_(1.0 / weight)
            own.append(p)
        limit = float("inf") if clip_norm is None else clip_norm
        return float(nn.utils.clip_grad_norm_(own, limit))

    def take_step(self, step: int, at: int) -> None:
        """Make the optimizer's step by the gradient that is there: number `at` of its round.

        Without one nothing is moved. The schedule goes on once for each step of the round, whatever
        is computed of it later.

        Raises:
            TaskError: The optimizer's code raised, or moves what rounds cannot average.
        """
        again = at < self._stepped
        if not again or any(p.grad is not None for p in self._parameters):
            self._update.apply(step, schedules=not again)
            if self._update.moves:
                raise TaskError(
                    f"an optimizer's step changes {self._update.moves!r}, which it does not train: "
                    "each worker would make another change of it in the steps of a round",
                    hint="write sync.period 1, or change it in forward passes, as a buffer",
                )
            if not self._averages and (what := self.unaveraged):
                raise TaskError(
                    f"{what}, and members' cannot be averaged where others take a state of rounds",
                    hint="write sync.period 1, or let Task.optimizer return another optimizer",
                )
            self._averages = True
        self._stepped, self.unlike = max(self._stepped, at + 1), True
        self._forget_gradients()
        self._moved()

    @property
    def unaveraged(self) -> str:
        """What the optimizer holds that is no tensor of floating point, as words; empty: nothing.

        It holds nothing before its first step.
        """
        optimizer = self._trained.optimizer
        if self._update.moves:
            return f"a step of {type(optimizer).__name__} changes what it does not train"
        for of in getattr(optimizer, "state", {}).values():
            for key, held in of.items() if isinstance(of, Mapping) else [("state", of)]:
                floats = isinstance(held, torch.Tensor) and held.is_floating_point()
                if held is not None and not floats:
                    kind = held.dtype if isinstance(held, torch.Tensor) else type(held).__name__
                    return f"{type(optimizer).__name__} keeps {key!r}, of type {kind}"
        return ""

    def give(self, weight: float) -> None:
        """Make what this member has moved the parameters by their gradients, to be exchanged.

        So much `weight` has it computed in the round.
        """
        self.weight, self.given = weight, 0.0
        if self._follows():
            self._forget_gradients()
            return
        moved = self._way()
        if self.adapts:
            self.given = float(nn.utils.get_total_norm(moved)) ** 2
        for p, delta in zip(self._parameters, moved, strict=True):
            p.grad = delta

    def _way(self) -> list[torch.Tensor]:
        """How far this member has moved what all have."""
        return [base - p.detach() for p, base in zip(self._parameters, self._bases(), strict=True)]

    def _bases(self) -> Sequence[torch.Tensor]:
        """What all have, and have moved their own from."""
        return self._start

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`; the gradients in place are the mean of what all have moved."""
        if not step.local:
            return
        self.unlike = True
        means = [p.grad for p in self._parameters]
        starts, stepped = self._bases(), self._stepped
        if step.sums is not None:  # kept by a follower, whose parameters are those of the start
            starts, stepped = self._parameters, 0
        self._forget_gradients()
        with torch.no_grad():
            for k, (p, start, mean) in enumerate(zip(self._parameters, starts, means, strict=True)):
                p.copy_(start if mean is None else start - self._outer(k, mean))
        for number in range(stepped, step.steps):
            self._update.apply(step.step + number)
        self._started = False

    def _outer(self, k: int, mean: torch.Tensor) -> torch.Tensor:
        if not self._momentum:
            return mean
        momentum = self._momentum[k].mul_(OUTER_MOMENTUM).add_(mean)
        return outer_rate(self.choice.period) * (mean + OUTER_MOMENTUM * momentum)

    def discard(self) -> None:
        """See `Stateful.discard`; moments stay as the round has left them."""
        if self._started and not self._suspended:
            self._swap()
        self._started = self._suspended = False

    def suspend(self) -> None:
        """See `Stateful.suspend`; moments stay as the round has left them."""
        if self._started and not self._suspended:
            self._swap()
            self._suspended = True

    def resume(self) -> None:
        """See `Stateful.resume`."""
        if not self._started:
            return
        self._forget_gradients()  # what was to be exchanged
        if self._suspended:
            self._swap()
            self._suspended = False
            self._moved()

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `Stateful.tensors`."""
        named = zip(self._names, self._momentum, strict=False)
        return {f"{_MOMENTUM}{name}": momentum for name, momentum in named}

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """See `Stateful.own_tensors`."""
        if not self.unlike:
            return {}
        moments = self._trains.moments().items()
        own = {f"{_INNER}{name}": tensor.to("cpu", copy=True) for name, tensor in moments}
        return {**own, _WEIGHT: torch.tensor([max(self.weight, _IDLE)], dtype=torch.float64)}

    def values(self) -> dict[str, Any]:
        """See `Stateful.values`."""
        return {"choice": astuple(self.choice)} if self.adapts else {}

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> None:
        """See `Stateful.check_fits`; momentum begins from zero where there was none."""
        told = values.get("choice", (0, 1, 1))
        counts = isinstance(told, list | tuple) and all(type(one) is int for one in told)
        if not counts or len(told) != 3 or not 1 <= told[1] <= told[2]:  # noqa: PLR2004 - its fields
            raise TaskError(
                f"the checkpoint has rounds of {told!r}, not a number, a period and the longest",
                hint="resume from another checkpoint: this one was altered",
            )
        wanted = {name: tuple(t.shape) for name, t in self.tensors().items()}
        given = {name: shape for name, shape in shapes.items() if name.startswith(_MOMENTUM)}
        if wanted and given and given != wanted:
            raise TaskError(
                "the checkpoint has the momentum of rounds for other parameters",
                hint="resume with the task that the run was started with",
            )

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """See `Stateful.load`."""
        self.begin()
        own = self.choice
        if self.adapts and "choice" in values:  # the momentum is of that one
            number, period, most = values["choice"]
            self.choice = Choice(number, min(period, own.most), min(most, own.most))
        for name, momentum in self.tensors().items():
            if name in tensors:
                momentum.copy_(tensors[name])
        self.take(own)
        weights = _by_member(tensors, _WEIGHT).get("", {})
        rank, size = self._seat()
        self.unlike = sorted(weights) == list(range(size))
        taken = {}
        for name, of in _by_member(tensors, _INNER).items():
            if not self.unlike:
                whole = sum(float(weights[number]) for number in of)
                parts = (of[n].double() * (float(weights[n]) / whole) for n in sorted(of))
                taken[name] = sum_of(parts).to(next(iter(of.values())))
            elif rank in of:
                taken[name] = of[rank]
        self._trains.put_moments(taken)

    def take(self, choice: Choice) -> None:
        """Rounds have so many steps from the next one on; without effect where it is no newer.

        The momentum is of as many steps as a round has: it becomes longer or shorter with them, and
        begins anew after steps that were no part of a round.
        """
        if choice.number <= self.choice.number:
            return
        before, self.choice = self.choice.period, choice
        factor = choice.period / before if min(before, choice.period) > 1 else 0.0
        for momentum in self._momentum:
            momentum.mul_(factor)

    def pin(self, period: int) -> None:
        """Rounds have so many steps as long as nobody says otherwise; 1: there are none.

        Then there is no momentum either: it would begin anew after steps that were no part of one.
        """
        self.adapts = False
        if period != self.choice.period:  # before a checkpoint's momentum is loaded, not after
            self.take(Choice(self.choice.number + 1, period, period))
        self._remember(self._nesterov and period > 1)

    def _remember(self, wanted: bool) -> None:  # noqa: FBT001 - private, and the only one
        """Have momentum from now on, if it is not there, or none."""
        if bool(self._momentum) != wanted:
            self._momentum = [torch.zeros_like(p) for p in self._parameters] if wanted else []

    def begin(self) -> None:
        """See `Stateful.begin`."""
        self._started = self._suspended = self.unlike = False
        for momentum in self._momentum:
            momentum.zero_()

    def _forget_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None
        self._trained.clear()

    def _swap(self) -> None:
        """What is there and what is kept change places."""
        with torch.no_grad():
            for p, kept in zip(self._parameters, self._start, strict=True):
                now = p.detach().clone()
                p.copy_(kept)
                kept.copy_(now)
        (settings, schedule), self._settings = self._settings, self._now()
        for group, own in zip(self._trained.optimizer.param_groups, settings, strict=True):
            group.update(own)
        if self._update.scheduler is not None:
            self._update.scheduler.load_state_dict(schedule)

    def _now(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Copies of the settings of parameter groups, and of the schedule's state."""
        groups = self._trained.optimizer.param_groups
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        schedule = self._update.scheduler
        return copy.deepcopy((settings, {} if schedule is None else schedule.state_dict()))


def _by_member(
    tensors: Mapping[str, torch.Tensor], begin: str
) -> dict[str, dict[int, torch.Tensor]]:
    """Those whose names begin so, by the rest of the name, and by the member that had them."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(begin):
            rest, _, number = name.removeprefix(begin).rpartition("/")
            found.setdefault(rest, {})[int(number)] = tensor
    return found


def average_moments(rounds: Rounds, trains: ModelState, lane: Lane, *, has: bool) -> int:
    """Make the optimizer's tensors the mean over members, by weight; all members call this.

    Who has none of a tensor gets it; a member that `has` no state gets nothing, and counts not.
    Without effect where they are the same. Returns the bytes that this member has sent.
    `TransportError`: the exchange broke, or was abandoned.
    """
    unlike = has and rounds.unlike
    [differ] = lane.sum([float(unlike)])
    if not differ:
        return 0
    own = trains.moments() if has else {}
    listed = _listed(own, lane, counts=has)
    counts = max(rounds.weight if has else 0.0, _IDLE)
    told = lane.sum([counts if name in own else 0.0 for name in listed])
    wholes = dict(zip(listed, told, strict=True))
    single = [name for name, one in listed.items() if one.numel() == 1]
    # In fp64: counts of steps, where all have made as many, stay what they are.
    sums = lane.sum([float(own[n]) * counts if n in own else 0.0 for n in single])
    sent_bytes = 0
    means = {
        n: torch.tensor(s / wholes[n], dtype=torch.float64)
        for n, s in zip(single, sums, strict=True)
    }
    for dtype in sorted({one.dtype for one in listed.values()}, key=str):
        some = {n: t for n, t in listed.items() if t.dtype is dtype and n not in means}
        wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
        parts = [
            own[n].detach().to("cpu", wide).reshape(-1) * (counts / wholes[n])
            if n in own
            else torch.zeros(one.numel(), dtype=wide)
            for n, one in some.items()
        ]
        if not parts:
            continue
        flat = torch.cat(parts)
        if lane.transport.size > 1:
            finish(lane.transport.all_reduce(flat), lane.abandoned)
        sent_bytes += lane.transport.all_reduce_bytes(flat.nbytes)
        means |= dict(zip(some, flat.split([one.numel() for one in some.values()]), strict=True))
    if has:
        trains.put_moments({n: means[n].to(t.dtype).view(t.shape) for n, t in listed.items()})
        rounds.unlike = False
    return sent_bytes


def _listed(
    own: Mapping[str, torch.Tensor], lane: Lane, *, counts: bool
) -> dict[str, torch.Tensor]:
    """What any member has, by name, without memory; all have the same as a rule."""
    listed = {n: torch.empty_like(t, device="meta") for n, t in sorted(own.items())}
    heads = lane.gather([float(layout(listed)) if counts else -1.0])
    if len({head for [head] in heads}) == 1:
        return listed
    told = [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in listed.items()]
    for text in lane.gather_text(json.dumps(told)):
        for name, kind, shape in json.loads(text):
            listed[name] = torch.empty(shape, dtype=getattr(torch, kind), device="meta")
    return dict(sorted(listed.items()))
