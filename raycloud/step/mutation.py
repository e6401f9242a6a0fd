"""In-place mutation by the task's code: of parameters, which is refused, and of buffers.

An in-place operation raises a tensor's version, and assigning a buffer puts another tensor there. A
change through `.data` is neither, so values are compared, too, before the first step and around an
evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raycloud.errors import TaskError
from raycloud.step.contract import call
from raycloud.step.randomness import preserved_random

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = 8  # bytes
_COLUMNS = 8191  # words that are summed apart
_MASK = 2**48 - 1  # exact in float64
_MOST_KEPT_BYTES = 2**24  # of a buffer of which a copy is kept though no pass has changed it


@dataclass(eq=False)
class Buffer:
    """A buffer, the tensor and the version that are known of it, and its value before a step.

    Attributes:
        name: Qualified; `key` is its name in its `module`.
        persistent: Whether it belongs to the model's state.
        seen: The tensor that is known, of this `version` and `size` (shape and type).
        start: A copy of its value before the step; None: it is large, and nothing has changed it.
        suspended: Its value within a step that has to wait.
    """

    name: str
    module: nn.Module
    key: str
    persistent: bool
    seen: torch.Tensor
    start: torch.Tensor | None = None
    suspended: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """It is as it should be."""
        self._know(self.seen)
        self.keep()

    def _know(self, tensor: torch.Tensor) -> None:
        self.seen, self.size = tensor, (tensor.shape, tensor.dtype)
        self.version = tensor._version  # noqa: SLF001 - torch offers no public name

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor that is there; None: there is none any more."""
        return self.module._buffers.get(self.key)  # noqa: SLF001 - public ways copy, or search

    @property
    def changed(self) -> bool:
        """Whether it was written to, or another tensor put there, since it was looked at."""
        now = self.now
        return now is not self.seen or now._version != self.version  # noqa: SLF001

    @property
    def other_size(self) -> bool:
        """Whether it has another shape or type than the tensor that is known, or is gone."""
        now = self.now
        return now is None or (now.shape, now.dtype) != self.size

    @property
    def differs(self) -> bool:
        """Whether it is another, or has another value than `start`; each value is read."""
        return self.changed or self.start is None or not _same(self.seen, self.start)

    def keep(self, *, whole: bool = False) -> None:
        """Copy its value, however large it is where that is asked for."""
        wanted = whole or self.seen.numel() * self.seen.element_size() <= _MOST_KEPT_BYTES
        self.start = self.seen.detach().clone() if wanted else None

    def look(self) -> None:
        """From now on it is as it should be."""
        if self.changed and (now := self.now) is not None:
            self._know(now)
            self.keep()

    def put_back(self) -> None:
        """The tensor that is known is there again, with its value before the step."""
        self.module._buffers[self.key] = self.seen  # noqa: SLF001
        if self.start is not None and not _same(self.seen, self.start):
            with torch.no_grad():
                if self.seen.shape != self.start.shape:
                    self.seen.resize_(self.start.shape)
                self.seen.copy_(self.start)
        self.version = self.seen._version  # noqa: SLF001

    def suspend(self) -> None:
        """Put it back, and remember what it was; from the second time on nothing happens."""
        if self.suspended is None and (now := self.now) is not None:
            self.suspended = now.detach().clone()
            self.put_back()

    def resume(self) -> None:
        """It is again what it was when it was suspended, if it was."""
        if self.suspended is not None:
            with torch.no_grad():
                self.seen.copy_(self.suspended)
        self.suspended = None

    def term(self, part: float) -> torch.Tensor:
        """What it adds to the mean over members, in float64: `part` is this member's of the whole.

        Of an integer it is the change, so that it stays exact beyond 2^53. `TaskError`: it has
        another size than on the other members.
        """
        now = self.now
        if now is None or self.other_size:
            raise self.resized()
        if part == 0.0:  # of an infinite value it would be NaN
            return torch.zeros(self.term_shape, dtype=torch.float64, device=self.seen.device)
        now = now.detach()
        if now.is_complex():
            return torch.view_as_real(now.to(torch.complex128).resolve_conj()) * part
        if _is_integer(now) and self.start is not None:
            now = now.to(torch.int64) - self.start.to(torch.int64)
        return now.to(torch.float64) * part

    @property
    def term_shape(self) -> torch.Size:
        """Of `term`: a complex number takes two."""
        return torch.Size((*self.size[0], 2)) if self.size[1].is_complex else self.size[0]

    def take(self, mean: torch.Tensor) -> None:
        """Become the mean over members, in the tensor that is known: it is that after each step."""
        if self.seen.is_complex():
            mean = torch.view_as_complex(mean.contiguous())
        elif _is_integer(self.seen) and self.start is not None:
            mean = self.start.to(torch.int64) + mean.round().to(torch.int64)
        elif not self.seen.is_floating_point():
            mean = mean.round()
        self.module._buffers[self.key] = self.seen  # noqa: SLF001
        with torch.no_grad():
            self.seen.copy_(mean)
        self.version, self.suspended = self.seen._version, None  # noqa: SLF001

    def resized(self) -> TaskError:
        """The refusal of one that does not keep its size."""
        now = "none" if (t := self.now) is None else f"{tuple(t.shape)} of {t.dtype}"
        return TaskError(
            f"a forward pass makes {now} of buffer {self.name!r}, which is "
            f"{tuple(self.size[0])} of {self.size[1]}: the model's state must keep its sizes",
            hint="give it its largest size in Task.model; or register it with persistent=False "
            "where it is no state: a cache, a mask",
        )


def buffers_of(model: nn.Module) -> list[Buffer]:
    """All buffers there are, each once; the same order on every member."""
    found: list[Buffer] = []
    known: set[int] = set()
    for path, module in model.named_modules():
        for key, tensor in module._buffers.items():  # noqa: SLF001 - named_buffers hides the module
            if tensor is None or id(tensor) in known:
                continue
            known.add(id(tensor))
            persistent = key not in module._non_persistent_buffers_set  # noqa: SLF001
            name = f"{path}.{key}" if path else key
            found.append(Buffer(name, module, key, persistent, tensor))
    return found


def extra_states(model: nn.Module) -> list[tuple[nn.Module, object]]:
    """Modules with state of their own (`get_extra_state`), each with a copy of it."""
    own = [m for m in model.modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
    return [(module, copy.deepcopy(module.get_extra_state())) for module in own]


class Parameters:
    """Watches that nothing but the optimizer changes a model's parameters, also frozen ones."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = dict(model.named_parameters())
        self._names, self._every = list(named), list(named.values())
        self._versions: list[int] = []

    def mark(self) -> None:
        """A step begins."""
        self._versions = [p._version for p in self._every]  # noqa: SLF001

    def check(self) -> None:
        """`TaskError`: a forward pass of the step has changed a parameter; it names it."""
        versions = [p._version for p in self._every]  # noqa: SLF001
        if versions != self._versions:
            self._refuse(versions, self._versions)

    def values(self) -> list[int]:
        """Fingerprints of them."""
        return fingerprints([p if _has_bits(p) else p.new_empty(0) for p in self._every])

    def check_values(self, before: Sequence[int]) -> None:
        """Compare `values`; `TaskError` also where the model has other parameters than before."""
        now, was = ([id(p) for p in some] for some in (self._model.parameters(), self._every))
        if now == was:
            now, was = self.values(), list(before)
        if now != was:
            self._refuse(now, was)

    def changed(self, before: Sequence[int]) -> str | None:
        """Which one has other `values` than before; None: none."""
        pairs = zip(self._names, before, self.values(), strict=True)
        return next((name for name, was, now in pairs if now != was), None)

    def _refuse(self, now: Sequence[int], before: Sequence[int]) -> None:
        at = next((i for i, (a, b) in enumerate(zip(now, before, strict=False)) if a != b), -1)
        path, _, key = self._names[at].rpartition(".")
        module, parameter = self._model.get_submodule(path), self._every[at]
        if key == "weight" and getattr(module, "max_norm", None) is not None:
            raise TaskError(
                f"{type(module).__name__} {path!r} has max_norm, with which a forward pass changes "
                "the rows that it looks up: each worker would change others",
                hint="leave max_norm out, and limit the rows after each step: "
                "optimizer.register_step_post_hook, see Task.optimizer",
            )
        kind = "trained" if parameter.requires_grad else "frozen"
        raise TaskError(
            f"a forward pass changes the {kind} parameter {self._names[at]!r}: what it becomes "
            "would depend on the workers",
            hint="change it after each step instead: optimizer.register_step_post_hook, see "
            "Task.optimizer; give it its first value in Task.model; or make it a buffer, which "
            "is averaged over workers",
        )


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it evaluates other parameters than it trains, as schedule-free ones do."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


@contextmanager
def evaluating(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The parameters are those to evaluate; afterwards they are as before, to the bit.

    Going there and back by the optimizer's own formula rounds twice, and members evaluate at unlike
    times; so copies of the parameters are put back.
    """
    if not has_modes(optimizer):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    copies = [p.detach().clone() for p in parameters]
    modes: Any = optimizer
    call("Task.optimizer", modes.eval)
    try:
        yield
    finally:
        call("Task.optimizer", modes.train)
        with torch.no_grad():
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.copy_(copy)


@contextmanager
def preserved(model: nn.Module, what: str) -> Iterator[None]:
    """Whatever `what` does to the model, its state is as it was afterwards.

    Persistent buffers, modules' own state, gradients and random generators are put back. Buffers
    that are not persistent may be caches of which their module knows more: they stay.

    Raises:
        TaskError: A parameter has another value.
    """
    parameters = Parameters(model)
    values = parameters.values()
    buffers = [buffer for buffer in buffers_of(model) if buffer.persistent]
    for buffer in buffers:
        if buffer.start is None:
            buffer.keep(whole=True)
    extra = extra_states(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with preserved_random(gradients[0][0].device if gradients else torch.device("cpu")):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer in buffers:
            buffer.put_back()
        for module, state in extra:
            module.set_extra_state(state)
    if (name := parameters.changed(values)) is not None:
        raise TaskError(
            f"{what} changed the parameter {name!r}",
            hint="measure a copy of the model, or put the parameters back before it returns",
        )


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _has_bits(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are there, with the same shape, type and bits; or neither is."""
    if one is None or other is None:
        return one is other
    return (one.shape, one.dtype) == (other.shape, other.dtype) and _same(one, other)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bit by bit, so that NaN is NaN."""
    exotic = not (_has_bits(one) and _has_bits(other))
    return exotic or torch.equal(_octets(one), _octets(other))


def fingerprints(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One of 48 bits for each tensor: a function of its bytes alone, at the memory's speed.

    The bytes are 64-bit words, summed in 8191 columns, and those by random weights, modulo 2**64.
    """
    found: dict[int, int] = {}
    made = [_fingerprint(tensor) for tensor in tensors]
    # An optimizer keeps counts on the CPU, the rest on a GPU: one transfer for each device.
    for device in {one.device for one in made}:
        places = [k for k, one in enumerate(made) if one.device == device]
        values = torch.stack([made[k] for k in places]).tolist()
        found |= {k: value >> 16 & _MASK for k, value in zip(places, values, strict=True)}
    return [found[k] for k in range(len(made))]


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    octets = _octets(tensor)
    if octets.data_ptr() % _WORD or octets.storage_offset() % _WORD:
        octets = octets.clone()
    whole = octets.numel() // _WORD
    words, rest = octets[: _WORD * whole].view(torch.int64), octets[_WORD * whole :]
    weights = _weights(tensor.device)
    rows = whole // _COLUMNS
    left = words[rows * _COLUMNS :]
    found = (left * weights[: left.numel()]).sum() * 3 + tensor.numel()
    if rows:
        columns = words[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
        found = found * 5 + (columns * weights).sum()
    if rest.numel():
        found = found * 7 + (rest * weights[: rest.numel()]).sum()
    return found


@cache
def _weights(device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**62), 2**62, (_COLUMNS,), generator=draw, dtype=torch.int64)
    return (2 * drawn + 1).to(device)
