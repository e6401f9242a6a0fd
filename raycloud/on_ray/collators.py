"""Collators: processes on any node's CPUs that make batches in the members' place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayError

from raycloud.clock import SystemClock
from raycloud.errors import RaycloudError
from raycloud.step.collate import Collate, Making
from raycloud.step.contract import construct
from raycloud.task import Splits

if TYPE_CHECKING:
    from collections.abc import Callable

    from raycloud.data.samples import BlockSamples
    from raycloud.events import Noticed
    from raycloud.order import Layout, MicroBatch, Order
    from raycloud.spec import Job
    from raycloud.step.collate import Passes
    from raycloud.task import Task
    from raycloud.worker.context import MemberConfig

_TURN_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """Passes on their way to a member, and what was noticed while they were made."""

    passes: Passes
    notices: tuple[Noticed, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unable:
    """Why a collator makes no passes: the member makes them itself."""

    why: str


def collate_of(task: Task, samples: BlockSamples, order: Order, job: Job) -> Collate:
    """What makes a collator's passes, and a member's where no collator is left."""
    making = Making(apart=job.elastic.backup_micro_batches)
    return Collate(task, samples, order, pinned=False, making=making, clock=SystemClock())


class Collator:
    """Makes passes, as a member would. Not thread-safe.

    What goes wrong in `begin` and `extend`, which nobody waits for, is told by `passes`.
    """

    def __init__(self, config: MemberConfig, provider: Any) -> None:
        """The order comes with the first member that has it."""
        self._config = config
        self._provider = provider
        self._collate: Collate | None = None
        self._versions: list[int] = []  # of the data, that it went through
        self._why = ""  # the newest thing that went wrong

    def begin(self, order: Order) -> None:
        """Make the task, and get at its data, unless another member has said so."""
        if self._collate is not None:
            return
        job = self._config.job
        try:
            torch.set_num_threads(1)
            task = construct(self._config.task, job)
            samples = self._provider.provide(task, Splits(train=())).train
            self._collate = collate_of(task, samples, order, job)
            self._versions = [0]
        except Exception as error:  # noqa: BLE001 - told to who asks for passes
            self._why = f"it could not begin: {type(error).__name__}: {error}"

    def passes(
        self, micro_batches: Sequence[MicroBatch], fuse: int, version: int, *, joins: bool
    ) -> Delivery | Unable:
        """See `Collate.passes`; tensors are packed, for the way."""
        if self._collate is None or version not in self._versions:
            return Unable(why=self._why or f"it was not told of version {version} of the data")
        self._collate.joins = joins
        made = self._collate.passes(micro_batches, fuse)
        packed = tuple(replace(one, batch=_map(one.batch, _packed)) for one in made)
        return Delivery(passes=packed, notices=tuple(self._provider.notices()))

    def extend(self, before: int, version: int, epoch: int, layout: Layout | None) -> None:
        """See `Collators.extend`; each member says so, and once is enough.

        Version `before` is the one that the member was at: a growth that was missed, no later one
        makes up for.
        """
        if self._collate is None or version in self._versions:
            return
        if before != self._versions[-1]:
            self._why = f"it missed version {before} of the data"
            return
        try:
            self._collate.extend(self._provider.grown(version), epoch, layout)
            self._versions.append(version)
        except Exception as error:  # noqa: BLE001 - told to who asks for passes
            self._why = (
                f"it could not read version {version} of the data: {type(error).__name__}: {error}"
            )


class RayCollators:
    """The collators of a run, as a member uses them: `step.feed.Collators`.

    Args:
        names: Of the actors.
        order: Which sample stands where.
        own: What the member makes passes with where no collator is left.
        grown: The samples of a version, which the member has at hand.
        notice: Told of collators that died.
        first: Which one is asked first, so that members spread.
    """

    def __init__(  # what stands in for a collator is given too
        self,
        names: Sequence[str],
        order: Order,
        own: Collate,
        grown: Callable[[int], BlockSamples],
        notice: Callable[..., None],
        *,
        first: int,
    ) -> None:
        self.own, self.notice = own, notice
        self._grown = grown
        self._lock = Lock()
        self._actors: dict[str, Any] = {}
        for name in names:
            try:
                self._actors[name] = ray.get_actor(name)
            except ValueError:  # this member came later, and that one is gone
                notice("a collator was lost", collator=name, left=len(self._actors), why="is gone")
        self._turn = first
        self._version = 0  # of the data, that steps to come are steps of
        self._waiting = dict.fromkeys(names, 0)
        for actor in self._actors.values():
            actor.begin.remote(order)

    def submit(self, micro_batches: tuple[MicroBatch, ...], fuse: int) -> Asked:
        """Give it to the collator with the least to do."""
        with self._lock:
            names = list(self._actors)
            if not names:
                return Asked(self, "", None, micro_batches, fuse)
            self._turn += 1
            turned = [names[(self._turn + i) % len(names)] for i in range(len(names))]
            name = min(turned, key=self._waiting.__getitem__)
            self._waiting[name] += 1
            call = self._actors[name].passes.remote(
                micro_batches, fuse, self._version, joins=self.own.joins
            )
        return Asked(self, name, call, micro_batches, fuse)

    def extend(self, version: int, epoch: int, layout: Layout | None) -> None:
        """See `step.feed.Collators`."""
        self.own.extend(self._grown(version), epoch, layout)
        with self._lock:
            for actor in self._actors.values():
                actor.extend.remote(self._version, version, epoch, layout)
            self._version = version

    def over(self, name: str) -> None:
        """Something that it was asked for is not waited for any more."""
        with self._lock:
            self._waiting[name] -= 1

    def drop(self, name: str, what: str, why: str) -> None:
        """Ask a collator for nothing more; told once."""
        with self._lock:
            known = self._actors.pop(name, None)
            left = len(self._actors)
        if known is not None:
            self.notice(what, collator=name, left=left, why=why)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Passes that were asked for: `step.feed.Made`."""

    collators: RayCollators
    name: str
    call: Any
    micro_batches: tuple[MicroBatch, ...]
    fuse: int
    dropped: Event = field(default_factory=Event)

    def result(self) -> Passes:
        """Them, as soon as they are there; what no collator makes, this process makes.

        Raises:
            CancelledError: Nobody wants them any more.
            RaycloudError: What making them raised.
        """
        found = None if self.call is None else self._found()
        if isinstance(found, RaycloudError):
            raise found
        if found is None:
            if self.dropped.is_set():
                raise CancelledError
            return self.collators.own.passes(self.micro_batches, self.fuse)
        for noticed in found.notices:
            self.collators.notice(noticed.what, collator=self.name, **noticed.detail)
        return tuple(replace(one, batch=_map(one.batch, _unpacked)) for one in found.passes)

    def _found(self) -> Delivery | RaycloudError | None:
        """What the collator answers; None where it is lost, or makes none."""
        try:
            while not ray.wait([self.call], timeout=_TURN_S)[0]:
                if self.dropped.is_set():
                    return None
            found: Delivery | Unable | RaycloudError = ray.get(self.call)
        except RayError as error:
            if not self.dropped.is_set():  # else it was cancelled
                self.collators.drop(self.name, "a collator was lost", type(error).__name__)
            return None
        finally:
            self.collators.over(self.name)
        if isinstance(found, Unable):
            self.collators.drop(self.name, "a collator is not used any more", found.why)
            return None
        return found

    def cancel(self) -> None:
        """They are no longer wanted."""
        self.dropped.set()
        if self.call is not None:
            ray.cancel(self.call)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor on its way: its values as an array, which travels without a copy."""

    array: Any
    dtype: torch.dtype


def _packed(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    dtype = value.dtype
    if dtype is torch.bfloat16:  # numpy has none
        value = value.view(torch.int16)
    return _Packed(value.detach().contiguous().numpy(), dtype)


def _unpacked(value: Any) -> Any:
    """The tensor again: copied, since what arrived is shared and cannot be written to."""
    if not isinstance(value, _Packed):
        return value
    tensor = torch.from_numpy(value.array.copy())
    return tensor if tensor.dtype is value.dtype else tensor.view(value.dtype)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """A batch with all that it holds changed."""
    if isinstance(value, Mapping):
        return {key: _map(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(part, change) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(part, change) for part in value)
    return change(value)
