"""Steps: which part of the canonical sequence each one takes, also where the data grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

Later = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EpochSizes:
    """Samples of every epoch.

    Data only grows, and never while an epoch is in progress: samples keep their ids, and new ones
    have ids after them.

    Attributes:
        samples: Samples of epoch 0, and of all others before the first growth.
        later: Growths `(epoch, samples)`: from this epoch on, this many. Both numbers rise.
    """

    samples: int
    later: Later = ()

    def __post_init__(self) -> None:
        """Refuse what does not grow."""
        if self.samples < 1:
            raise ValueError(f"an epoch needs at least one sample, got samples={self.samples}")
        epoch, samples = 0, self.samples
        for growth in self.later:
            if growth[0] <= epoch or growth[1] <= samples:
                raise ValueError(
                    f"data can only grow, and from an epoch after {epoch} on: got {growth[1]} "
                    f"samples from epoch {growth[0]} on, after {samples}"
                )
            epoch, samples = growth

    @property
    def most(self) -> int:
        """Samples of an epoch that has seen all growth."""
        return self.later[-1][1] if self.later else self.samples

    def at(self, epoch: int) -> int:
        """Samples of `epoch`.

        >>> sizes = EpochSizes(10, later=((2, 14),))
        >>> [sizes.at(epoch) for epoch in range(4)]
        [10, 10, 14, 14]
        """
        for first, samples in reversed(self.later):
            if first <= epoch:
                return samples
        return self.samples

    def grown(self, epoch: int, samples: int) -> Self:
        """From `epoch` on there are `samples`. A second growth from the same epoch replaces it.

        >>> EpochSizes(10).grown(2, 12).grown(2, 14).later
        ((2, 14),)

        Raises:
            ValueError: There would be fewer, or `epoch` lies before an earlier growth.
        """
        if samples == self.most:
            return self
        later = self.later
        if later and later[-1][0] == epoch and samples > self.most:
            later = later[:-1]
        return replace(self, later=(*later, (epoch, samples)))

    def next_growth(self, epoch: int) -> int | None:
        """The first epoch after `epoch` that has more samples; None if there is none."""
        return next((first for first, _ in self.later if first > epoch), None)

    def alike(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Epochs [first, last) in runs `(first, last, samples)` of the same size.

        >>> list(EpochSizes(10, later=((2, 14), (5, 15))).alike(1, 4))
        [(1, 2, 10), (2, 4, 14)]
        """
        while first < last:
            grows = self.next_growth(first)
            until = last if grows is None else min(grows, last)
            yield first, until, self.at(first)
            first = until

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Those of a `Ledger.state()`."""
        later = tuple((epoch, samples) for epoch, samples in state.get("later", ()))
        return cls(state["samples"], later)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """A place in the canonical sequence: the next sample to be taken.

    `offset` counts samples from the start of `epoch`: the global batch may change on the way.
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
    """Samples [start, stop) of `epoch` that step number `step` takes, cut into micro-batches.

    These are numbered from `first` on: not 0 in a step that is not the first of its round.
    """

    step: int
    epoch: int
    start: int
    stop: int
    micro_batch: int
    first: int = 0

    @property
    def samples(self) -> int:
        """Number of samples; fewer than the global batch in the last step of an epoch."""
        return self.stop - self.start

    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches in canonical order; the last may be short."""
        places = enumerate(range(self.start, self.stop, self.micro_batch), self.first)
        return tuple(
            MicroBatch(
                index=i, epoch=self.epoch, start=at, stop=min(at + self.micro_batch, self.stop)
            )
            for i, at in places
        )

    @property
    def spans(self) -> tuple[StepSpan, ...]:
        """The steps that it consists of: itself. See `Round`."""
        return (self,)


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
        return self._steps_of(self._left(Position(epoch=epoch)))

    def until_epoch(self, epoch: int, at: Position) -> int:
        """Steps from `at` to the beginning of `epoch`; 0 where that is past.

        >>> Steps(samples=10, global_batch=4, micro_batch=2).until_epoch(2, Position(offset=4))
        5
        """
        at = self._skip_tail(at)
        return self._sum(self._steps_of, at, epoch) if at.epoch < epoch else 0

    def position_after(self, steps: int, at: Position) -> Position:
        """Where the sequence stands `steps` steps after `at`, without walking there.

        >>> Steps(samples=10, global_batch=4, micro_batch=2).position_after(4, Position())
        Position(epoch=1, offset=4)
        """
        at = self._skip_tail(at)
        left = steps - self._steps_of(self._left(at))
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
        return self._sum(self._cut, at, end.epoch) + self._cut(end.offset)

    def _sum(self, count: Callable[[int], int], at: Position, epoch: int) -> int:
        """What `count` says of the samples of each epoch that steps take, from `at` to `epoch`."""
        total = count(self._left(at))
        for first, last, _ in self.sizes.alike(at.epoch + 1, epoch):
            total += (last - first) * count(self._left(Position(epoch=first)))
        return total

    def _steps_of(self, samples: int) -> int:
        return -(-samples // self.global_batch)

    def _cut(self, samples: int) -> int:
        """Micro-batches of so many samples in a row, cut into steps."""
        whole, rest = divmod(samples, self.global_batch)
        return whole * -(-self.global_batch // self.micro_batch) - (-rest // self.micro_batch)

    def _left(self, at: Position) -> int:
        """Samples from `at` to the end of its epoch that steps take."""
        left = self.samples_in(at.epoch) - at.offset
        return left - left % self.global_batch if self.drop_last else left

    def _skip_tail(self, at: Position) -> Position:
        least = self.global_batch if self.drop_last else 1
        while self.samples_in(at.epoch) - at.offset < least:
            at = Position(epoch=at.epoch + 1, offset=0)
        return at
