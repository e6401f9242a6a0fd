"""Which part of the canonical sequence each step takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from raycloud.order.epochs import EpochSizes, Later


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """A place in the canonical sequence: the next sample to be taken.

    `offset` counts samples from the start of `epoch`. It is in samples and not in steps, so that
    the global batch may change on the way.
    """

    epoch: int = 0
    offset: int = 0

    @property
    def next_epoch(self) -> int:
        """The first epoch that begins here or later: the first that growth can reach from here.

        >>> Position(epoch=1, offset=4).next_epoch, Position(epoch=1).next_epoch
        (2, 1)
        """
        return self.epoch + 1 if self.offset else self.epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples [start, stop) of an epoch: a unit of meaning, with its own random state."""

    index: int
    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpan:
    """Samples [start, stop) of `epoch` that step number `step` takes, cut into micro-batches."""

    step: int
    epoch: int
    start: int
    stop: int
    micro_batch: int

    @property
    def samples(self) -> int:
        """Number of samples; fewer than the global batch in the last step of an epoch."""
        return self.stop - self.start

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches in canonical order; the last may be short."""
        return tuple(
            MicroBatch(
                index=i, epoch=self.epoch, start=at, stop=min(at + self.micro_batch, self.stop)
            )
            for i, at in enumerate(range(self.start, self.stop, self.micro_batch))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Cuts the canonical sequence into steps; knows no state.

    Args:
        samples: Samples per epoch.
        global_batch: Samples per step.
        micro_batch: Samples per micro-batch.
        drop_last: Leave out what does not fill a global batch at the end of an epoch.
        later: Growths `(epoch, samples)`: from this epoch on, this many (see `EpochSizes`).
    """

    samples: int
    global_batch: int
    micro_batch: int
    drop_last: bool = False
    later: Later = ()

    def __post_init__(self) -> None:
        """Refuse a cut that could never make a step."""
        if min(self.samples, self.global_batch, self.micro_batch) < 1:
            raise ValueError(f"samples, global_batch and micro_batch must be positive: {self}")
        if self.drop_last and self.sizes.most < self.global_batch:
            raise ValueError(
                f"drop_last leaves no step: {self.sizes.most} samples are fewer than the global "
                f"batch of {self.global_batch}"
            )

    @property
    def sizes(self) -> EpochSizes:
        """Samples of every epoch."""
        return EpochSizes(self.samples, self.later)

    def samples_in(self, epoch: int) -> int:
        """Samples of `epoch`."""
        return self.sizes.at(epoch) if self.later else self.samples

    def grown(self, epoch: int, samples: int) -> Self:
        """The same cut, where the data has `samples` samples from `epoch` on.

        Raises:
            ValueError: There would be fewer than before.
        """
        return replace(self, later=self.sizes.grown(epoch, samples).later)

    def span(self, step: int, at: Position) -> StepSpan:
        """The samples that `step` takes when the sequence stands at `at`."""
        at = self._skip_tail(at)
        stop = min(at.offset + self.global_batch, self.samples_in(at.epoch))
        return StepSpan(
            step=step, epoch=at.epoch, start=at.offset, stop=stop, micro_batch=self.micro_batch
        )

    def after(self, span: StepSpan) -> Position:
        """Where the sequence stands once `span` is taken."""
        return self._skip_tail(Position(epoch=span.epoch, offset=span.stop))

    def walk(self, step: int, at: Position) -> Iterator[StepSpan]:
        """All spans from `step` at `at` on, without end."""
        while True:
            span = self.span(step, at)
            yield span
            step, at = step + 1, self.after(span)

    def per_epoch(self, epoch: int = 0) -> int:
        """Steps in the whole of `epoch`.

        >>> Steps(samples=10, global_batch=4, micro_batch=2).per_epoch()
        3
        """
        return self._left_in_epoch(Position(epoch=epoch))

    def until_epoch(self, epoch: int, at: Position) -> int:
        """Steps from `at` to the beginning of `epoch`; 0 where that is past.

        >>> Steps(samples=10, global_batch=4, micro_batch=2).until_epoch(2, Position(offset=4))
        5
        """
        at = self._skip_tail(at)
        if at.epoch >= epoch:
            return 0
        steps = self._left_in_epoch(at)
        for first, last, _ in self.sizes.alike(at.epoch + 1, epoch):
            steps += (last - first) * self.per_epoch(first)
        return steps

    def position_after(self, steps: int, at: Position) -> Position:
        """Where the sequence stands `steps` steps after `at`, without walking there.

        >>> Steps(samples=10, global_batch=4, micro_batch=2).position_after(4, Position())
        Position(epoch=1, offset=4)
        """
        at = self._skip_tail(at)
        left = steps - self._left_in_epoch(at)
        if left < 0:
            return Position(epoch=at.epoch, offset=at.offset + steps * self.global_batch)
        epoch = at.epoch + 1
        while (grows := self.sizes.next_growth(epoch)) is not None:
            alike = (grows - epoch) * self.per_epoch(epoch)
            if left < alike:
                break
            epoch, left = grows, left - alike
        epochs, left = divmod(left, self.per_epoch(epoch))
        return Position(epoch=epoch + epochs, offset=left * self.global_batch)

    def micro_batches(self, steps: int, at: Position) -> int:
        """How many micro-batches the `steps` steps from `at` on have, without walking there.

        >>> Steps(samples=10, global_batch=4, micro_batch=2).micro_batches(4, Position(offset=4))
        7
        """
        at, end = self._skip_tail(at), self.position_after(steps, at)
        if at.epoch == end.epoch:
            return self._cut(end.offset - at.offset)
        many = self._cut(self._left_to_take(at)) + self._cut(end.offset)
        for first, last, _ in self.sizes.alike(at.epoch + 1, end.epoch):
            many += (last - first) * self._cut(self._left_to_take(Position(epoch=first)))
        return many

    def _cut(self, samples: int) -> int:
        """Micro-batches of so many samples in a row, cut into steps."""
        whole, rest = divmod(samples, self.global_batch)
        return whole * -(-self.global_batch // self.micro_batch) - (-rest // self.micro_batch)

    def _left_to_take(self, at: Position) -> int:
        """Samples from `at` to the end of its epoch that steps take."""
        left = self.samples_in(at.epoch) - at.offset
        return left - left % self.global_batch if self.drop_last else left

    def _left_in_epoch(self, at: Position) -> int:
        left = self.samples_in(at.epoch) - at.offset
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def _skip_tail(self, at: Position) -> Position:
        least = self.global_batch if self.drop_last else 1
        while self.samples_in(at.epoch) - at.offset < least:
            at = Position(epoch=at.epoch + 1, offset=0)
        return at
