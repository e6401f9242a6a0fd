"""Batches ahead of time: this member's part of the coming steps, collated in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycloud.errors import RaycloudError, TaskError
from raycloud.order import MicroBatch, Order, StepSpan, stream_seed
from raycloud.training.device import concatenate, pin

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.task import Samples, Task

_COLLATE_STREAM = 1
_COMPUTE_STREAM = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What a device computes at once: one micro-batch, or several fused.

    `seed` belongs to the first micro-batch; it is what anything random in this pass depends on.
    """

    micro_batches: tuple[MicroBatch, ...]
    batch: Any
    weight: float
    seed: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(m.samples for m in self.micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """This member's part of one step."""

    span: StepSpan
    passes: tuple[Pass, ...]

    @property
    def weight(self) -> float:
        """Weight of this member's micro-batches."""
        return sum(p.weight for p in self.passes)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches this member computes."""
        return sum(len(p.micro_batches) for p in self.passes)


class Collate:
    """Makes passes from micro-batches.

    Args:
        task: The user's task, for `batch` and `weight`.
        samples: The training samples.
        order: Which sample stands where.
        pinned: Put batches into page-locked memory, for a GPU.
    """

    def __init__(self, task: Task, samples: Samples, order: Order, *, pinned: bool) -> None:
        """Look up how samples are read."""
        self._task = task
        self._order = order
        self._pinned = pinned
        self._read = _reader(samples)

    def passes(self, micro_batches: Iterable[MicroBatch], fuse: int) -> tuple[Pass, ...]:
        """Group micro-batches by `fuse` and collate each group, in order."""
        todo = list(micro_batches)
        groups = [todo[at : at + fuse] for at in range(0, len(todo), fuse)]
        return tuple(made for group in groups for made in self._group(group))

    def one(self, micro_batch: MicroBatch) -> Pass:
        """A pass of a single micro-batch."""
        return self._pass([micro_batch], self._batch([micro_batch])[0])

    def _group(self, group: list[MicroBatch]) -> list[Pass]:
        batch, drew = self._batch(group)
        if drew and len(group) > 1:  # augmentation: each micro-batch has its own random state
            singles = [self._batch([m])[0] for m in group]
            batch = concatenate(singles)
            if batch is None:
                return [self._pass([m], b) for m, b in zip(group, singles, strict=True)]
        return [self._pass(group, batch)]

    def _batch(self, group: list[MicroBatch]) -> tuple[Any, bool]:
        first = group[0]
        rng = np.random.Generator(
            np.random.Philox(
                key=stream_seed(self._order.seed, _COLLATE_STREAM, first.epoch, first.start)
            )
        )
        before = rng.bit_generator.state["state"]["counter"].tolist()
        places = [self._order.ids(m.epoch, m.start, m.stop) for m in group]
        what = "reading the samples"
        try:
            samples = self._read(np.concatenate(places))
            what = "Task.batch"
            batch = self._task.batch(samples, rng)
        except RaycloudError:
            raise
        except Exception as error:
            raise TaskError(
                f"{what} raised {type(error).__name__}: {error} (epoch {first.epoch}, samples "
                f"[{first.start}, {group[-1].stop}) of the sequence)"
            ) from error
        state = rng.bit_generator.state
        drew = state["state"]["counter"].tolist() != before or state["has_uint32"] != 0
        return (pin(batch) if self._pinned else batch), drew

    def _pass(self, group: list[MicroBatch], batch: Any) -> Pass:
        samples = sum(m.samples for m in group)
        try:
            weight = float(self._task.weight(batch, samples))
        except RaycloudError:
            raise
        except Exception as error:
            raise TaskError(f"Task.weight raised {type(error).__name__}: {error}") from error
        if not 0.0 <= weight < float("inf"):
            raise TaskError(
                f"Task.weight returned {weight}", hint="return a finite number that is not negative"
            )
        seed = stream_seed(self._order.seed, _COMPUTE_STREAM, group[0].epoch, group[0].start)
        return Pass(micro_batches=tuple(group), batch=batch, weight=weight, seed=seed)


class Feed:
    """A thread that collates the steps to come, at most `depth` ahead.

    Args:
        collate: Makes the passes.
        choose: This member's micro-batches of a span; asked once a span, in order.
        spans: The spans to come; the feed ends with them.
        fuse: Micro-batches per pass; asked for each step, since a fused pass may turn out not
            exact.
        depth: Steps kept ready.
        clock: For the time waited.
    """

    def __init__(
        self,
        collate: Collate,
        choose: Callable[[StepSpan], tuple[MicroBatch, ...]],
        spans: Iterable[StepSpan],
        *,
        fuse: Callable[[], int],
        depth: int,
        clock: Clock,
    ) -> None:
        """Start collating."""
        self._collate = collate
        self._choose = choose
        self._spans = spans
        self._fuse = fuse
        self._clock = clock
        self._ready: queue.Queue[StepWork | BaseException] = queue.Queue(maxsize=depth)
        self._over = threading.Event()
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def take(self) -> StepWork:
        """The next step's work.

        Raises:
            TaskError: The task's code raised on it, or whatever reading the samples raised.
        """
        began_s = self._clock.monotonic_s()
        item = self._ready.get()
        self.waited_s += self._clock.monotonic_s() - began_s
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Stop collating; what is ready is dropped."""
        self._over.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            for span in self._spans:
                if self._over.is_set():
                    return
                passes = self._collate.passes(self._choose(span), self._fuse())
                self._ready.put(StepWork(span=span, passes=passes))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asks
            self._ready.put(error)


def _reader(samples: Samples) -> Callable[[Any], list[Any]]:
    """How to read many samples: the data set's own `__getitems__`, or one by one."""
    many = getattr(samples, "__getitems__", None)
    if many is not None:
        return lambda ids: many(ids.tolist())
    return lambda ids: [samples[i] for i in ids.tolist()]


def seed_compute(seed: int, device: torch.device) -> None:
    """Seed what a forward pass draws from, on the CPU and on `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def random_state(device: torch.device) -> bytes:
    """A fingerprint of what a forward pass draws from: equal where nothing was drawn between."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if device.type == "cuda":
        state += torch.cuda.default_generators[device.index or 0].get_state().numpy().tobytes()
    return state
