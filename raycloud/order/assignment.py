"""Who computes which micro-batch of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """The explicit map micro-batch -> replica of one step.

    Attributes:
        owners: `owners[k]` is the replica (its index in the generation) that computes micro-batch
        k.
    """

    owners: tuple[int, ...]

    def of(self, replica: int) -> tuple[int, ...]:
        """Indices of the micro-batches of `replica`, rising."""
        return tuple(k for k, owner in enumerate(self.owners) if owner == replica)


def assign(shares: Sequence[int], micro_batches: int) -> Assignment:
    """Deal `micro_batches` to replicas in contiguous runs, in proportion to `shares`.

    A full step deals exactly `shares`; a short last step deals by largest remainder.

    >>> assign((2, 1), 3).owners
    (0, 0, 1)
    >>> assign((4, 2), 3).owners
    (0, 0, 1)

    Raises:
        ValueError: No share is positive, or one is negative.
    """
    counts = deal(shares, micro_batches)
    return Assignment(tuple(r for r, count in enumerate(counts) for _ in range(count)))


def deal(shares: Sequence[int], total: int) -> tuple[int, ...]:
    """Split `total` in proportion to `shares`, exactly, by largest remainder (ties: lower index).

    >>> deal((5, 2, 1), 8), deal((5, 2, 1), 3)
    ((5, 2, 1), (2, 1, 0))
    """
    whole = sum(shares)
    if whole < 1 or min(shares) < 0:
        raise ValueError(f"shares must be non-negative with a positive sum, got {tuple(shares)}")
    floors = [share * total // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda r: (-(shares[r] * total % whole), r))
    for r in by_remainder[: total - sum(floors)]:
        floors[r] += 1
    return tuple(floors)
