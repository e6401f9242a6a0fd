"""Buffers that a forward pass changes: running statistics that stay exact however a step is split.

A running average with momentum m, updated by the micro-batches k = 0..K-1 of a step in turn, ends
at

    r_K = (1 - m)^K r_0  +  sum_k  m (1 - m)^(K - 1 - k) stat_k

which is linear in the statistics: each worker contributes its own micro-batches' terms and one sum
over workers makes the whole, equal to what a single process would have computed. With
`momentum=None` (cumulative average) after n updates: r_K = (n r_0 + sum_k stat_k) / (n + K).

Other buffers that a forward pass changes have no rule that raycloud could know: each replica's
value after its own micro-batches is averaged, weighted, and the run's log says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raycloud.errors import TaskError
from raycloud.sync.transport import Transport, Work, finish


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


@dataclass(eq=False)
class _Other:
    """A buffer that is no running average. The model may change it in place, or put another there.

    `seen` and `version` are the tensor, and its state, that are known.
    """

    name: str
    module: nn.Module
    key: str
    seen: torch.Tensor
    version: int

    @property
    def buffer(self) -> torch.Tensor:
        """The tensor that is there now."""
        return self.module.get_buffer(self.key)

    @property
    def changed(self) -> bool:
        """Whether it is not as it was when it was last looked at."""
        buffer = self.buffer
        return buffer is not self.seen or buffer._version != self.version  # noqa: SLF001

    def look(self) -> None:
        """From now on it is as it should be."""
        self.seen = self.buffer
        self.version = self.seen._version  # noqa: SLF001 - torch offers no public name


class RunningStatistics:
    """The changing buffers of a model as a part of a step's transaction.

    Order of calls, each step: `stage`; around each micro-batch `before` and `after`; `launch`;
    `collect`; then `commit` or `discard`. A step that has to wait for another generation is
    `suspend`ed, and later `resume`d with more micro-batches.
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
            self._every.append(
                _Average(
                    name=name,
                    module=module,
                    start_mean=mean.clone(),
                    start_var=var.clone(),
                    start_count=int(count),
                    sum_mean=torch.zeros_like(mean),
                    sum_var=torch.zeros_like(var),
                )
            )
            known |= {id(mean), id(var), id(count)}
        self._others = [
            _other(model, name, buffer)
            for name, buffer in model.named_buffers()
            if id(buffer) not in known
        ]
        self._changing: list[_Other] = []
        self._starts: list[torch.Tensor] = []
        self._suspended: list[torch.Tensor] | None = None
        self._flats: list[torch.Tensor] = []
        self._works: list[Work | None] = []

    @property
    def per_batch(self) -> bool:
        """Whether the model has statistics of a micro-batch, so that fusing would change them."""
        return self._untracked or any(a.module.training for a in self._every)

    @property
    def changing(self) -> tuple[str, ...]:
        """Names of other buffers that a trial pass changed."""
        return tuple(other.name for other in self._changing)

    def begin_trial(self) -> None:
        """A pass without effect begins: any buffer may change."""
        self._changing = list(self._others)
        self.stage()

    def end_trial(self) -> None:
        """Undo the pass, and remember which buffers it changed: every pass will change them."""
        found = [other for other in self._others if other.changed]
        self.discard()
        self._changing = found

    def stage(self) -> None:
        """A step begins: remember where the averages stand."""
        self._averages = [a for a in self._every if a.module.training]
        for a in self._averages:
            mean, var, count = _buffers(a.module)
            a.start_mean.copy_(mean)
            a.start_var.copy_(var)
            a.start_count = int(count)
            a.sum_mean.zero_()
            a.sum_var.zero_()
        self._starts = [other.buffer.clone() for other in self._changing]
        self._suspended = None

    def before(self) -> None:
        """A micro-batch begins: from zero, the averages end as this micro-batch's term alone."""
        for a in self._averages:
            for buffer in _buffers(a.module):
                buffer.zero_()

    def after(self, index: int, count: int) -> None:
        """Micro-batch `index` of the step's `count` is computed: add its term."""
        for a in self._averages:
            mean, var, tracked = _buffers(a.module)
            calls = int(tracked)
            if a.calls is None:
                a.calls = calls
            if calls != a.calls:
                raise TaskError(
                    f"batch normalisation {a.name!r} was applied {calls} times in one "
                    f"micro-batch and {a.calls} times in another",
                    hint="apply it equally often, or normalise without running statistics",
                )
            if calls == 0:
                continue
            if a.module.momentum is None:
                factor = calls / (a.start_count + calls * count)
            else:
                factor = (1.0 - a.module.momentum) ** (calls * (count - 1 - index))
            a.sum_mean.add_(mean, alpha=factor)
            a.sum_var.add_(var, alpha=factor)

    def launch(self, transport: Transport, scale: Callable[[], float], weight: float) -> None:
        """All of this member's micro-batches are computed: start the sum over members.

        Args:
            transport: The gradients' transport; every member calls this at the same place.
            scale: One over the step's weight.
            weight: Weight of this member's share.
        """
        tensors = self.terms
        if self._changing:
            part = scale() * weight
            tensors += [other.buffer.to(torch.float64) * part for other in self._changing]
        self._flats, self._works = [], []
        for dtype in sorted({t.dtype for t in tensors}, key=str):
            flat = torch.cat([t.reshape(-1) for t in tensors if t.dtype == dtype])
            self._flats.append(flat)
            self._works.append(transport.all_reduce(flat) if transport.size > 1 else None)

    def forget(self) -> None:
        """What was launched is not waited for any more."""
        self._flats, self._works = [], []

    def collect(self, abandoned: Callable[[], bool]) -> None:
        """Wait for the sums."""
        for work in self._works:
            if work is not None:
                finish(work, abandoned)
        self._works = []

    def suspend(self) -> None:
        """The step has to wait: the model's buffers are as before it, and its terms are kept."""
        if self._suspended is None:
            self._suspended = [other.buffer.clone() for other in self._changing]
            self._bring_back()

    def resume(self) -> None:
        """The step goes on where it was suspended, if it was."""
        suspended, self._suspended = self._suspended, None
        for other, value in zip(self._changing, suspended or (), strict=False):
            other.buffer.copy_(value)

    def commit(self, count: int, left_out: Sequence[int] = ()) -> None:
        """The step counts: move the averages past its `count` micro-batches.

        In the place of the statistics of those that are `left_out` stand the averages before it.
        """
        sums = self._unpack()
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
            mean, buffer = next(sums), other.buffer
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
        self.settle()

    @property
    def sums(self) -> tuple[torch.Tensor, ...]:
        """What `collect` has waited for, on the CPU; nothing writes to it any more."""
        return tuple(flat.cpu() for flat in self._flats)

    def replay(
        self, sums: Sequence[torch.Tensor], count: int, left_out: Sequence[int] = ()
    ) -> None:
        """`commit` such sums of an older step; those that are on their way are not disturbed."""
        present = self._flats
        self._flats = [a.to(b.device) for a, b in zip(sums, present, strict=True)]
        self.stage()
        self.commit(count, left_out)
        self._flats = present

    def discard(self) -> None:
        """The step does not count: back to where the averages stood."""
        self._bring_back()
        self._suspended = None

    def _bring_back(self) -> None:
        for a in self._averages:
            mean, var, tracked = _buffers(a.module)
            mean.copy_(a.start_mean)
            var.copy_(a.start_var)
            tracked.fill_(a.start_count)
        for other, start in zip(self._changing, self._starts, strict=False):
            other.buffer.copy_(start)
        self.settle()

    def check(self) -> None:
        """After a pass: refuse a buffer that starts to change later than in the trial pass.

        Raises:
            TaskError: Names the buffer.
        """
        late = {other.name for other in self._others if other.changed} - set(self.changing)
        if late:
            raise TaskError(
                f"buffer {sorted(late)[0]!r} is changed by some forward passes, not by the first",
                hint="change it in every training pass, or keep it outside the model's buffers",
            )

    def settle(self) -> None:
        """All buffers are as they should be: what changes from now on is a forward pass's work."""
        for other in self._others:
            other.look()

    @property
    def terms(self) -> list[torch.Tensor]:
        """What the micro-batches so far have added up to; whoever asks may write to them."""
        return [t for a in self._averages for t in (a.sum_mean, a.sum_var)]

    def _unpack(self) -> _Unpacked:
        shapes: list[tuple[torch.dtype, torch.Size]] = [
            (t.dtype, t.shape) for a in self._averages for t in (a.sum_mean, a.sum_var)
        ]
        shapes += [(torch.float64, other.buffer.shape) for other in self._changing]
        return _Unpacked(self._flats, shapes)


class _Unpacked:
    """Iterates over tensors that were packed by type."""

    def __init__(
        self, flats: Sequence[torch.Tensor], shapes: Sequence[tuple[torch.dtype, torch.Size]]
    ) -> None:
        self._at = {flat.dtype: 0 for flat in flats}
        self._flats = {flat.dtype: flat for flat in flats}
        self._shapes = iter(shapes)

    def __iter__(self) -> _Unpacked:
        return self

    def __next__(self) -> torch.Tensor:
        dtype, shape = next(self._shapes)
        at = self._at[dtype]
        self._at[dtype] = at + shape.numel()
        return self._flats[dtype][at : at + shape.numel()].view(shape)


def _other(model: nn.Module, name: str, buffer: torch.Tensor) -> _Other:
    path, _, key = name.rpartition(".")
    return _Other(
        name=name,
        module=model.get_submodule(path),
        key=key,
        seen=buffer,
        version=buffer._version,  # noqa: SLF001
    )


def _buffers(module: _BatchNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or var is None or count is None:
        raise TaskError("a batch normalisation lost its running statistics during training")
    return mean, var, count
