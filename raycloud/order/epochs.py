"""How many samples each epoch has, where the data grows from one epoch to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        """From `epoch` on there are `samples`; where they are no more than before, nothing changes.

        A second growth from the same epoch on takes the place of the first.

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
