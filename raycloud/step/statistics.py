"""BatchNorm statistics, and other buffers that a forward pass changes, however a step is split.

A running average with momentum m, updated by the micro-batches k = 0..K-1 of a step in turn, ends
at

    r_K = (1 - m)^K r_0  +  sum_k  m (1 - m)^(K - 1 - k) stat_k

which is linear in the statistics: each worker contributes its own micro-batches' terms and one sum
over workers makes the whole, equal to what a single process would have computed. With
`momentum=None` (cumulative average) after n updates: r_K = (n r_0 + sum_k stat_k) / (n + K).

Other buffers have no rule that raycloud could know: each replica's value after its own
micro-batches is averaged, weighted, and the run's log says so. Which these are a trial shows. One
that begins to change in some later step joins them in that step: its member says that it has
something to tell (`astray`), all average it from then on, and exchange the step anew. One that is
not persistent is no state: where a trial shows that it carries nothing from pass to pass, or it
gets another size (a cache of positions, a mask), each replica keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycloud.errors import TaskError
from raycloud.net.transport import Transport, Work, finish
from raycloud.step.mutation import Buffer, Parameters, buffers_of, equal
from raycloud.step.stateful import Commit, Stateful


@dataclass(eq=False)
class _Average:
    """One running average pair (mean, variance) of one module."""

    name: str
    module: _BatchNorm
    start_mean: torch.Tensor
    start_var: torch.Tensor
    start_count: int
    sum_mean: torch.Tensor
    sum_var: torch.Tensor
    calls: int | None = None  # updates per micro-batch, the same in every one; None: not yet seen


class RunningStatistics(Stateful):
    """The changing buffers of a model as a part of a step's transaction.

    Order of calls, each step: `stage`; around each micro-batch `before` and `after`; `launch`;
    `collect`; then `commit` or `discard`. One that is `suspend`ed is `resume`d with more
    micro-batches. `notice` tells a person what is not exact, with details; no pass may change
    `parameters`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the running averages, and the buffers that are none."""
        self._every: list[_Average] = []
        self._averages: list[_Average] = []  # those in training mode; a frozen one does not change
        self._untracked = False
        known: set[int] = set()
        for name, module in model.named_modules():
            if not isinstance(module, _BatchNorm):
                continue
            if module.running_mean is None:
                self._untracked = True
                continue
            mean, var = module.running_mean, module.running_var
            count = module.num_batches_tracked
            if var is None or count is None:
                raise TaskError(f"{name!r} tracks a running mean without variance or count")
            start = mean.clone(), var.clone(), int(count)
            sums = torch.zeros_like(mean), torch.zeros_like(var)
            self._every.append(_Average(name, module, *start, *sums))
            known |= {id(mean), id(var), id(count)}
        self._others = [buffer for buffer in buffers_of(model) if id(buffer.seen) not in known]
        self._changing: list[Buffer] = []  # averaged, in the order of `_others`
        self._begun: list[Buffer] = []  # a pass has changed them, and not all members know it
        self._watched = list(self._others)  # no pass is known to change them
        self._model, self.parameters = model, Parameters(model)
        self._tried = False  # values are compared in the first trial, versions in each
        self._values: list[int] = []  # of the parameters, before it
        self._calls: list[torch.Tensor] = []  # a micro-batch's, see `_counts`
        self._flats: list[torch.Tensor] = []
        self._works: list[Work] = []
        self.notice: Callable[[str, Mapping[str, Any]], None] = lambda *_: None

    @property
    def per_batch(self) -> bool:
        """Whether the model has statistics of a micro-batch, so that fusing would change them."""
        return self._untracked or any(a.module.training for a in self._every)

    @property
    def exact(self) -> frozenset[str]:
        """Names of the running averages, which are the same on all members after each commit."""
        return frozenset(
            f"{a.name}.{name}" if a.name else name
            for a in self._every
            for name in ("running_mean", "running_var", "num_batches_tracked")
        )

    @property
    def changing(self) -> tuple[str, ...]:
        """Names of other buffers that a pass has changed, and that are averaged."""
        return tuple(other.name for other in (*self._changing, *self._begun))

    @property
    def others(self) -> int:
        """How many buffers there are that are no running averages: the same on every member."""
        return len(self._others)

    @property
    def begun(self) -> tuple[int, ...]:
        """Numbers of those that began to change here, of which not all members know yet."""
        return self._numbers(self._begun)

    @property
    def averaged(self) -> tuple[int, ...]:
        """Numbers of those that are averaged; the same on every member, once they have met."""
        return self._numbers(self._changing)

    def average(self, numbers: Iterable[int]) -> None:
        """From now on these are averaged, too; all members call this at the same place."""
        wanted = {*numbers, *self.averaged}
        if told := [other.name for other in self._others if other in self._begun]:
            self.notice("buffers averaged over replicas from now on, not exact", {"buffers": told})
        self._changing = [other for i, other in enumerate(self._others) if i in wanted]
        self._begun = [other for other in self._begun if other not in self._changing]
        self._watched = [other for other in self._watched if other not in self._changing]

    def begin_trial(self) -> None:
        """A pass without effect begins: any buffer may change."""
        self.stage()
        if self._tried:
            return
        self._values = self.parameters.values()
        for other in self._others:
            other.look()
            other.keep(whole=True)

    def end_trial(self, loss: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        """Undo the pass, and remember which buffers it changed: every pass will change them.

        Where `again`, which computes the same pass once more, gives another `loss`, or another
        value of a buffer that is not persistent, that buffer carries something from pass to pass.
        `TaskError`: it changed a parameter, or the size of a buffer that belongs to the state.
        """
        self.parameters.check()
        if self._tried:
            found = [other for other in self._watched if other.changed]
        else:
            self.parameters.check_values(self._values)
            self._check_new()
            found = [other for other in self._watched if other.differs]
        self._tried = True
        for other in found:
            if other.persistent and other.other_size:
                raise other.resized()
        state = [other for other in found if other.persistent]
        if caches := [other for other in found if not other.persistent]:
            state += self._carrying(caches, loss, again)
        self._watched = [other for other in self._watched if other not in found]
        self._changing = [o for o in self._others if o in state or o in self._changing]
        self.discard()
        for other in self._others:
            if other not in self._changing:
                other.look()
                other.keep()

    def _carrying(
        self, caches: list[Buffer], loss: torch.Tensor, again: Callable[[], torch.Tensor]
    ) -> list[Buffer]:
        """Those that carry something from pass to pass, and keep their size."""
        ends = [None if (now := other.now) is None else now.detach().clone() for other in caches]
        for other in self._others:
            if other.persistent:
                other.put_back()
        same = torch.equal(again().detach(), loss.detach())
        pairs = zip(caches, ends, strict=True)
        carrying = [other for other, end in pairs if not (same and equal(other.now, end))]
        self._tell_own(other for other in carrying if other.other_size)
        return [other for other in carrying if not other.other_size]

    def _tell_own(self, some: Iterable[Buffer]) -> None:
        if names := [other.name for other in some]:
            self.notice("buffers that each replica keeps for itself, not exact", {"buffers": names})

    def _check_new(self) -> None:
        """Refuse a buffer that belongs to the state, and that no fresh model has."""
        known = {other.name for other in self._others} | self.exact
        for buffer in buffers_of(self._model):
            if buffer.persistent and buffer.name not in known:
                raise TaskError(
                    f"a forward pass makes the buffer {buffer.name!r}, which the model does not "
                    "have before: no checkpoint could be resumed",
                    hint="register it in Task.model, with its size; or with persistent=False",
                )

    def stage(self) -> None:
        """A step begins: remember where the averages stand."""
        self._averages = [a for a in self._every if a.module.training]
        counts = self._counts()
        for a, count in zip(self._averages, [] if counts is None else counts.tolist(), strict=True):
            mean, var, _ = _buffers(a.module)
            a.start_mean.copy_(mean)
            a.start_var.copy_(var)
            a.start_count = count
            a.sum_mean.zero_()
            a.sum_var.zero_()
        self._calls = []
        for other in self._changing:
            other.look()
            other.keep(whole=True)
            other.suspended = None
        self._watch()
        self.parameters.mark()

    def _watch(self) -> None:
        for other in self._watched:
            other.look()

    def before(self) -> None:
        """A micro-batch begins: from zero, the averages end as this micro-batch's term alone."""
        for a in self._averages:
            for buffer in _buffers(a.module):
                buffer.zero_()

    def after(self, index: int, count: int) -> None:
        """Micro-batch `index` of the step's `count` is computed: add its term."""
        if (counts := self._counts()) is None:
            return
        self._calls.append(counts)  # compared in `collect`: a GPU would stand still to tell it
        if any(a.calls is None for a in self._averages):
            for a, calls in zip(self._averages, counts.tolist(), strict=True):
                a.calls = calls if a.calls is None else a.calls
        for a in self._averages:
            mean, var, _ = _buffers(a.module)
            calls = a.calls or 0
            if calls == 0:
                continue
            if a.module.momentum is None:
                factor = calls / (a.start_count + calls * count)
            else:
                factor = (1.0 - a.module.momentum) ** (calls * (count - 1 - index))
            a.sum_mean.add_(mean, alpha=factor)
            a.sum_var.add_(var, alpha=factor)

    def launch(self, transport: Transport, scale: float, weight: float) -> None:
        """All micro-batches are computed: start the sum over members, at the same place everywhere.

        The `scale` is one over the step's weight, of which this member's share has `weight`.
        """
        tensors = self.terms
        if self._changing:
            part = 1.0 if transport.size == 1 else scale * weight
            tensors += [other.term(part) for other in self._changing]
        self._flats, self._works = [], []
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            flat = torch.cat([t.reshape(-1) for t in tensors if t.dtype == dtype])
            self._flats.append(flat)
            if transport.size > 1:
                self._works.append(transport.all_reduce(flat))

    def forget(self) -> None:
        """What was launched is not waited for any more."""
        self._flats, self._works = [], []

    def collect(self, abandoned: Callable[[], bool]) -> None:
        """Wait for the sums; `TransportError`: the exchange broke, or was abandoned.

        `TaskError`: a batch normalisation was not applied equally often in each micro-batch.
        """
        for row in torch.stack(self._calls).tolist() if self._calls else ():
            for a, calls in zip(self._averages, row, strict=True):
                if calls != a.calls:
                    raise TaskError(
                        f"batch normalisation {a.name!r} was applied {calls} times in one "
                        f"micro-batch and {a.calls} times in another",
                        hint="apply it equally often, or normalise without running statistics",
                    )
        for work in self._works:
            finish(work, abandoned)
        self._works = []

    def _counts(self) -> torch.Tensor | None:
        """How often each average was updated since the counters were set; None: there is none."""
        counts = [_buffers(a.module)[2] for a in self._averages]
        return torch.stack(counts) if counts else None

    def suspend(self) -> None:
        """See `Stateful.suspend`: the terms so far are kept."""
        for other in (*self._changing, *self._begun):
            other.suspend()
        self._bring_back()

    def resume(self) -> None:
        """See `Stateful.resume`."""
        for other in (*self._changing, *self._begun):
            other.resume()
        self._watch()

    def commit(self, step: Commit) -> None:
        """See `Stateful.commit`; those sums of an older step do not disturb what is on its way."""
        if step.sums is None:
            self._move(step.count, step.left_out)
            return
        present = self._flats, self._changing
        device = next(self._model.parameters()).device
        self._flats = [flat.to(device) for flat in step.sums.statistics]
        self._changing = [self._others[i] for i in step.sums.averaged]
        self.stage()
        self._move(step.count, step.left_out)
        self._flats, self._changing = present

    def _move(self, count: int, left_out: Sequence[int]) -> None:
        """Move the averages past the `count` micro-batches of a step.

        In the place of the statistics of those that are `left_out` stand the averages before it.
        """
        sums = self._unpacked()
        for a in self._averages:
            mean, var, tracked = _buffers(a.module)
            calls = a.calls or 0
            updates = calls * count
            if a.module.momentum is None:
                before = a.start_count + calls * len(left_out)
                keep = before / (a.start_count + updates) if updates else 1.0
            else:
                slow = (1.0 - a.module.momentum) ** calls
                keep = slow**count + sum((1.0 - slow) * slow ** (count - 1 - k) for k in left_out)
            torch.add(next(sums), a.start_mean, alpha=keep, out=mean)
            torch.add(next(sums), a.start_var, alpha=keep, out=var)
            tracked.fill_(a.start_count + updates)
        for other in self._changing:
            other.take(next(sums))

    @property
    def sums(self) -> tuple[torch.Tensor, ...]:
        """What `collect` has waited for, on the CPU; nothing writes to it any more."""
        return tuple(flat.cpu() for flat in self._flats)

    def discard(self) -> None:
        """See `Stateful.discard`."""
        for other in (*self._changing, *self._begun):
            other.put_back()
            other.suspended = None
        self._watched += self._begun
        self._begun = []
        self._bring_back()

    def _bring_back(self) -> None:
        for a in self._averages:
            mean, var, tracked = _buffers(a.module)
            mean.copy_(a.start_mean)
            var.copy_(a.start_var)
            tracked.fill_(a.start_count)

    def check(self, *, fused: bool = False) -> bool:
        """After a pass: whether it may stand, though a buffer began to change in it.

        Not where micro-batches were `fused`: each of them is to change it. It is as before then.
        `TaskError` names a buffer that cannot be averaged.
        """
        if not (late := [other for other in self._watched if other.changed]):
            return True
        self._watched = [other for other in self._watched if other not in late]
        self._tell_own(o for o in late if not o.persistent and not o.other_size)
        state = [other for other in late if other.persistent]
        for other in state:
            if other.other_size:
                raise other.resized()
            if other.start is None:
                raise TaskError(
                    f"buffer {other.name!r} is changed by some forward passes, not by the first",
                    hint="change it in every training pass, or keep it outside the model's buffers",
                )
        self._begun += state
        if state and fused:
            self.discard()
        return not (state and fused)

    def settle(self) -> None:
        """All buffers are as they should be: what changes from now on is a forward pass's work."""
        for other in self._others:
            other.look()

    @property
    def terms(self) -> list[torch.Tensor]:
        """What the micro-batches so far have added up to; whoever asks may write to them."""
        return [t for a in self._averages for t in (a.sum_mean, a.sum_var)]

    def _numbers(self, some: Sequence[Buffer]) -> tuple[int, ...]:
        return tuple(i for i, other in enumerate(self._others) if other in some) if some else ()

    def _unpacked(self) -> Iterator[torch.Tensor]:
        """The sums over members: of `terms`, then of what is averaged beside them."""
        shapes = [(term.dtype, term.shape) for term in self.terms]
        shapes += [(torch.float64, other.term_shape) for other in self._changing]
        flats = {flat.dtype: flat for flat in self._flats}
        at = dict.fromkeys(flats, 0)
        for dtype, shape in shapes:
            begin, at[dtype] = at[dtype], at[dtype] + shape.numel()
            yield flats[dtype][begin : at[dtype]].view(shape)


def _buffers(module: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or var is None or count is None:
        raise TaskError("a batch normalisation lost its running statistics during training")
    return mean, var, count
