"""Collating: the samples of micro-batches are read, and the task makes them into batches.

What may be gone at the next try, as a lost connection is, is read again a little later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from raycloud.data.retry import wait, with_retries
from raycloud.errors import InternalError, TaskError
from raycloud.net.lane import Places, places_of
from raycloud.order import MicroBatch, Order, StepSpan, stream_seed
from raycloud.step.contract import RaisedError, call
from raycloud.step.device import Copies, concatenate, pin

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.order import Layout, Round
    from raycloud.task import Samples, Task

Range = tuple[int, int, int]  # an epoch, and samples [start, stop) of it
Failures = tuple[tuple[MicroBatch, RaisedError], ...]  # those that could not be made, and why

ROWS = 1 << 32  # sums are modulo this, so that those of 2**21 members are exact as a float64
_SHIFT = np.uint64(32)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio (Knuth, TAOCP 3, 6.4)

_COLLATE_STREAM = 1
_COMPUTE_STREAM = 2
_ZEROS = np.zeros(4, np.uint64)
_KEPT = 64  # ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What a device computes at once: one micro-batch, or several fused.

    `seed` belongs to the first micro-batch; what is random in this pass depends on it alone. `rows`
    is the `row_sum` of what was read; `read_s` and `collate_s` went into that and `Task.batch`.
    """

    micro_batches: tuple[MicroBatch, ...]
    batch: Any
    weight: float
    seed: int
    rows: int = 0
    read_s: float = 0.0
    collate_s: float = 0.0

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(m.samples for m in self.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """This member's part of one step; of what `failed` there are no passes, but `failed_rows`.

    In `idle_s` of computing it, its member waited for another, or computed what does not count.
    """

    span: StepSpan | Round
    passes: tuple[Pass, ...]
    failed: Failures = ()
    failed_rows: int = 0
    idle_s: float = 0.0

    @classmethod
    def joined(cls, whole: Round, made: Iterable[StepWork]) -> StepWork:
        """That of a round, of those of its steps."""
        every = [*made]
        return cls(
            span=whole,
            passes=tuple(p for one in every for p in one.passes),
            failed=tuple(f for one in every for f in one.failed),
            failed_rows=sum(one.failed_rows for one in every),
        )

    def within(self, span: StepSpan) -> StepWork:
        """The same as a step of a round, whose micro-batches are numbered from `span.first` on."""
        if span.first == 0:
            return self

        def numbered(one: MicroBatch) -> MicroBatch:
            return replace(one, index=span.first + one.index)

        passes = [
            replace(p, micro_batches=tuple(map(numbered, p.micro_batches))) for p in self.passes
        ]
        failed = tuple((numbered(one), error) for one, error in self.failed)
        return replace(self, span=span, passes=tuple(passes), failed=failed)

    @property
    def weight(self) -> float:
        """Weight of this member's micro-batches."""
        return sum(p.weight for p in self.passes)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches this member computes."""
        return sum(len(p.micro_batches) for p in self.passes)

    @property
    def indices(self) -> tuple[int, ...]:
        """Of all that are this member's, also of those that failed."""
        made = [m.index for one in self.passes for m in one.micro_batches]
        return (*made, *(m.index for m, _ in self.failed))

    @property
    def rows(self) -> int:
        """Sum over the samples that were read for these; see `row_sum`."""
        return self.failed_rows + sum(p.rows for p in self.passes)

    def told(self, kept: PartialStep | None) -> tuple[float, Places, float]:
        """Weight, places and rows of this and what is kept of the step, as a member tells them.

        What cannot be computed counts as one: where there is any, the step goes by another weight.
        """
        before = kept or PartialStep(step=self.span.step)
        weight = before.weight + len(before.skipped) + self.weight + len(self.failed)
        places = places_of((*before.micro_batches, *self.indices))
        return weight, places, float((self.rows + before.rows) % ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialStep:
    """What a member has computed of a step, or a round, that is not committed yet.

    Its gradients are there, and stay when an exchange breaks.

    Attributes:
        step: Which step; of a round the first.
        micro_batches: Indices in the step of those that it has computed, rising.
        weight: Their weight.
        rows: Their `row_sum`.
        skipped: Those among them that cannot be computed, and are not to be tried again.
    """

    step: int
    micro_batches: tuple[int, ...] = ()
    weight: float = 0.0
    rows: int = 0
    skipped: tuple[int, ...] = ()

    def and_also(self, work: StepWork, *, within: StepSpan | Round | None = None) -> PartialStep:
        """What is kept once `work` is computed too; `InternalError`: another's, or computed.

        `within` is the round that it is a part of.
        """
        new, whole = work.indices, within or work.span
        both = sorted([*self.micro_batches, *new])
        if self.step != whole.step or len(set(both)) < len(both):
            raise InternalError(f"{new} of step {work.span.step} were to be computed beside {self}")
        weight, rows = self.weight + work.weight, self.rows + work.rows
        return replace(self, micro_batches=tuple(both), weight=weight, rows=rows)

    def without(self, index: int) -> PartialStep:
        """The same, where `index` is one that cannot be computed."""
        return replace(self, skipped=tuple(sorted({*self.skipped, index})))


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """How a feed has passes made.

    Attributes:
        threads: Threads of this process that make them.
        elsewhere: Other processes that make them in the threads' place.
        copies: Brings them to the device ahead of their step; None: it is the CPU.
        skips: A micro-batch that cannot be made does not keep its step from the others.
        apart: The last micro-batches of what is asked for at once that share no pass with others.
        batch: Samples of a whole step: a shorter one, the last of an epoch, has other parts, and
            gives no hints. 0: there are no shorter ones.
    """

    threads: int = 1
    elsewhere: Collators | None = None
    copies: Copies | None = None
    skips: bool = False
    apart: int = 0
    batch: int = 0


class View:
    """The samples, and their `order`, as they are known at one time. Thread-safe."""

    def __init__(self, samples: Samples, order: Order) -> None:
        self.order, self.samples = order, len(samples)
        self._known: dict[Range, npt.NDArray[np.int64]] = {}
        self.read = reader(samples)
        self.as_rows = hasattr(samples, "gather")
        self._want: Callable[[npt.NDArray[np.int64]], None] | None = getattr(
            samples, "prefetch", None
        )

    def ids(self, one: Range) -> npt.NDArray[np.int64]:
        """The samples of a range."""
        known = self._known.pop(one, None)
        return self.order.ids(*one) if known is None else known

    def hint(self, ranges: Iterable[Range], steps: int, samples: int) -> None:
        """Say that what stands where these do, some steps later, will be read, if that is of use.

        Args:
            ranges: Of a step.
            steps: As many later, the short last ones of epochs not counted.
            samples: Of a step.
        """
        if self._want is None:
            return
        for one in ranges:
            ahead = _moved(one, steps, samples, self.order)
            self._known[ahead] = ids = self.order.ids(*ahead)
            self._want(ids)
        while len(self._known) > _KEPT:  # others were asked for: the shares have changed
            with suppress(KeyError, RuntimeError):  # another thread is at it too
                del self._known[next(iter(self._known))]


def reader(samples: Samples) -> Callable[[npt.NDArray[np.int64]], Any]:
    """How to read many samples: as rows, by the data set's `__getitems__`, or one by one."""
    gather: Callable[[npt.NDArray[np.int64]], Any] | None = getattr(samples, "gather", None)
    if gather is not None:
        return gather  # of our own, which reads files
    many = getattr(samples, "__getitems__", None)
    if many is not None:
        return lambda ids: with_retries(lambda: many(ids.tolist()), wait)
    return lambda ids: [with_retries(partial(getitem, samples, i), wait) for i in ids.tolist()]


def _joined(parts: Iterable[MicroBatch | StepSpan]) -> list[Range]:
    """Where these lie, neighbours joined: an order is asked less often."""
    found: list[Range] = []
    for m in parts:
        if found and found[-1][0] == m.epoch and found[-1][2] == m.start:
            found[-1] = (m.epoch, found[-1][1], m.stop)
        else:
            found.append((m.epoch, m.start, m.stop))
    return found


def _moved(one: Range, steps: int, samples: int, order: Order) -> Range:
    """The same part of a step of so many samples, some steps later."""
    epoch, start, stop = one[0], one[1] + steps * samples, one[2] + steps * samples
    while start >= (length := _whole(order.samples_in(epoch), samples)):
        epoch, start, stop = epoch + 1, start - length, stop - length
    return epoch, start, min(stop, length)


def _whole(epoch: int, samples: int) -> int:
    """Samples of an epoch that are in whole steps; all, where there are none."""
    return epoch - epoch % samples or epoch


def row_sum(ids: npt.NDArray[np.int64]) -> int:
    """The sum of codes of samples, below `ROWS`: other samples have another sum, but by chance.

    >>> row_sum(np.array([3, 1, 2])) == row_sum(np.array([1, 2, 3])) != row_sum(np.array([2, 2, 2]))
    True
    """
    codes = (ids.astype(np.uint64) + np.uint64(1)) * _FACTOR >> _SHIFT
    return int(codes.sum()) % ROWS


@dataclass(frozen=True, slots=True)
class _Read:
    samples: Any
    ids: npt.NDArray[np.int64]
    seconds: float

    def cut(self, at: int, stop: int) -> _Read:
        share_s = self.seconds * (stop - at) / len(self.ids)
        return _Read(self.samples[at:stop], self.ids[at:stop], share_s)


Passes = tuple[Pass, ...]


class Made(Protocol):
    """Passes that are being made: `result` waits for them, or raises what making them raised."""

    def result(self) -> Passes:
        """Them."""

    def cancel(self) -> object:
        """They are no longer wanted: `result`, where a thread waits in it, raises."""


class Collators(Protocol):
    """Makes passes outside of the member's process."""

    def submit(self, micro_batches: tuple[MicroBatch, ...], fuse: int) -> Made:
        """Begin to make what `Collate.passes` would. Returns at once; asked in order of steps."""

    def help(self) -> bool:
        """Make a part of what was submitted here; False: what is left is being made elsewhere."""

    def extend(self, version: int, epoch: int, layout: Layout | None) -> None:
        """From `epoch` on the data is that of `version`: see `Collate.extend`."""

    def close(self) -> None:
        """Nothing more is asked for."""


class Collate:
    """Makes passes from micro-batches, for `Task.batch`. Several threads may ask at once.

    Seconds are told where there is a `clock`; batches are `pinned` into page-locked memory for a
    GPU.

    Attributes:
        making: How a feed has them made.
        draws: `Task.batch` was seen to draw, so that each micro-batch is collated alone.
        joins: Batches of single micro-batches may be joined: that was seen to change nothing.
    """

    def __init__(
        self,
        task: Task,
        samples: Samples,
        order: Order,
        *,
        pinned: bool,
        making: Making | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.making = making or Making()
        self._task, self._pinned, self._clock = task, pinned, clock
        self._view = View(samples, order)
        self._own = threading.local()
        self.draws = self.joins = False

    @property
    def order(self) -> Order:
        """Which sample stands where."""
        return self._view.order

    @property
    def samples(self) -> int:
        """How many there are."""
        return self._view.samples

    @property
    def reads_blocks(self) -> bool:
        """Whether they are rows that a pipeline has prepared, and not the task's own."""
        return self._view.as_rows

    def extend(self, samples: Samples, epoch: int, layout: Layout | None) -> None:
        """From `epoch` on the data is `samples`, which begin with those known so far.

        Passes that are being made meanwhile are of the samples before or after, never of both.
        """
        self._view = View(samples, self._view.order.extended(epoch, len(samples), layout))

    def passes(self, micro_batches: Iterable[MicroBatch], fuse: int) -> tuple[Pass, ...]:
        """Group micro-batches by `fuse` and collate each group, in order."""
        return self.grouped(self.groups(micro_batches, fuse))

    def groups(self, micro_batches: Iterable[MicroBatch], fuse: int) -> list[list[MicroBatch]]:
        """Which micro-batches are made into one pass, unless it turns out that they cannot be."""
        todo = list(micro_batches)
        cut = max(len(todo) - self.making.apart, 0)
        groups = [todo[at : min(at + fuse, cut)] for at in range(0, cut, fuse)]
        return groups + [todo[at : at + fuse] for at in range(cut, len(todo), fuse)]

    def grouped(self, groups: Sequence[list[MicroBatch]]) -> tuple[Pass, ...]:
        """Collate each of some `groups`, in order."""
        view, todo = self._view, [one for group in groups for one in group]
        # Rows are cheaper to read at once, and cut without a copy.
        whole = self._read(view, todo) if view.as_rows and len(groups) > 1 else None
        made: list[Pass] = []
        at = 0
        for group in groups:
            stop = at + sum(m.samples for m in group)
            read = self._read(view, group) if whole is None else whole.cut(at, stop)
            made += self._group(view, group, read)
            at = stop
        return self.pinned(made)

    def pinned(self, made: Iterable[Pass]) -> tuple[Pass, ...]:
        """The same passes, in page-locked memory where the device takes them from there."""
        return tuple(replace(p, batch=pin(p.batch)) if self._pinned else p for p in made)

    def one(self, micro_batch: MicroBatch) -> Pass:
        """A pass of a single micro-batch."""
        return self.passes([micro_batch], 1)[0]

    def apart(self, micro_batches: Iterable[MicroBatch]) -> tuple[tuple[Pass, ...], Failures]:
        """A pass of each alone, and those of which none can be made."""
        made: list[Pass] = []
        failed: list[tuple[MicroBatch, RaisedError]] = []
        for m in micro_batches:
            try:
                made.append(self.one(m))
            except RaisedError as error:
                failed.append((m, error))
        return tuple(made), tuple(failed)

    def ids(self, one: MicroBatch) -> tuple[int, ...]:
        """The samples of a micro-batch."""
        return tuple(self._view.order.ids(one.epoch, one.start, one.stop).tolist())

    def row_sum(self, parts: Iterable[MicroBatch | StepSpan]) -> int:
        """The sum of the codes of their samples, whoever reads them; see `row_sum`."""
        return sum(row_sum(self._view.order.ids(*one)) for one in _joined(parts))

    def want(self, micro_batches: Iterable[MicroBatch], steps: int, samples: int) -> None:
        """Hint that the same part of a step, of so many samples, is asked for some steps later."""
        self._view.hint(_joined(micro_batches), steps, samples)

    def _now_s(self) -> float:
        return 0.0 if self._clock is None else self._clock.monotonic_s()

    def _group(self, view: View, group: list[MicroBatch], read: _Read) -> list[Pass]:
        """The passes of a group whose samples are read; several only where they cannot be one."""
        if len(group) == 1 or not self.draws:
            made, drew = self._pass(group, read)
            if not drew:
                return [made]
            self.draws = True
            read = self._read(view, group)  # again: the task may have changed what it was given
        return self._apart(group, read)

    def _apart(self, group: list[MicroBatch], read: _Read) -> list[Pass]:
        """Augmentation: each micro-batch has its own random state. Joined where that may be."""
        singles, at = [], 0
        for m in group:
            singles.append(self._pass([m], read.cut(at, at + m.samples))[0])
            at += m.samples
        batch = None
        if self.joins:
            batch = concatenate([one.batch for one in singles], [m.samples for m in group])
        if batch is None:
            return singles
        whole = replace(
            singles[0],
            micro_batches=tuple(group),
            batch=batch,
            weight=self._weight(batch, at),
            rows=sum(one.rows for one in singles) % ROWS,
            read_s=read.seconds,
            collate_s=sum(one.collate_s for one in singles),
        )
        return [whole]

    def _read(self, view: View, group: list[MicroBatch]) -> _Read:
        began_s = self._now_s()
        ids = np.concatenate([view.ids(one) for one in _joined(group)])
        samples = call("reading the samples", lambda: view.read(ids), partial(_place, group))
        return _Read(samples, ids, self._now_s() - began_s)

    def _pass(self, group: list[MicroBatch], read: _Read) -> tuple[Pass, bool]:
        """The pass of `group`; and, of several micro-batches, whether making it drew."""
        seed, first = self._view.order.seed, group[0]
        rng = self._generator(stream_seed(seed, _COLLATE_STREAM, first.epoch, first.start))
        before = _drawn(rng) if len(group) > 1 else None
        began_s = self._now_s()
        made = partial(self._task.batch, read.samples, rng)
        batch = call("Task.batch", made, partial(_place, group))
        collate_s = self._now_s() - began_s
        one = Pass(
            micro_batches=tuple(group),
            batch=batch,
            weight=self._weight(batch, sum(m.samples for m in group)),
            seed=stream_seed(seed, _COMPUTE_STREAM, first.epoch, first.start),
            rows=row_sum(read.ids),
            read_s=read.seconds,
            collate_s=collate_s,
        )
        return one, before is not None and _drawn(rng) != before

    def _generator(self, key: int) -> np.random.Generator:
        # What `Generator(Philox(key=key))` is: this thread's, begun anew. Making one asks the
        # system for entropy that nobody needs, which takes seven times as long.
        rng: np.random.Generator | None = getattr(self._own, "rng", None)
        if rng is None:
            rng = self._own.rng = np.random.Generator(np.random.Philox(key=key))
            return rng
        rng.bit_generator.state = {
            "bit_generator": "Philox",
            "state": {"counter": _ZEROS, "key": np.array([key, 0], np.uint64)},
            "buffer": _ZEROS,
            "buffer_pos": 4,  # empty
            "has_uint32": 0,
            "uinteger": 0,
        }
        return rng

    def _weight(self, batch: Any, samples: int) -> float:
        weight: float = call("Task.weight", lambda: float(self._task.weight(batch, samples)))
        if not 0.0 <= weight < float("inf"):
            raise TaskError(
                f"Task.weight returned {weight}", hint="return a finite number that is not negative"
            )
        return weight


def _drawn(rng: np.random.Generator) -> tuple[list[int], int]:
    state: Any = rng.bit_generator.state
    return [*state["state"]["counter"].tolist(), state["buffer_pos"]], state["has_uint32"]


def _place(group: list[MicroBatch]) -> str:
    first, last = group[0], group[-1]
    return f" (epoch {first.epoch}, samples [{first.start}, {last.stop}) of the sequence)"
