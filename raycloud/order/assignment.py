"""Who computes which micro-batch of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

PARTS = 16  # that a share may be in, of a micro-batch
_FAR = 1 << 61  # further than any path: worths are scaled to sum to less than 2 ** 60


@dataclass(frozen=True, slots=True)
class Assignment:
    """Of one step: `owners[k]`, an index in the generation, is the replica of micro-batch k."""

    owners: tuple[int, ...]

    def of(self, replica: int) -> tuple[int, ...]:
        """Indices of the micro-batches of `replica`, rising."""
        return tuple(k for k, owner in enumerate(self.owners) if owner == replica)


def assign(
    shares: Sequence[int], micro_batches: int, held: Sequence[Sequence[float]] | None = None
) -> Assignment:
    """Deal `micro_batches` to replicas in proportion to `shares`.

    A full step deals exactly `shares`; a short last step deals by largest remainder. Replicas take
    contiguous runs, unless `held` says where data lies: then see `prefer`.

    Args:
        shares: Micro-batches per step of each replica.
        micro_batches: Of the step.
        held: Bytes that each replica's node has of what is read: a row for each lane of a full
            step, whose micro-batches follow each other.

    >>> assign((2, 1), 3).owners
    (0, 0, 1)
    >>> assign((4, 2), 3).owners
    (0, 0, 1)
    >>> assign((2, 2), 4, held=[(0, 9), (9, 0)]).owners
    (1, 1, 0, 0)

    Raises:
        ValueError: No share is positive, or one is negative; or `held` does not fit the step.
    """
    counts = deal(shares, micro_batches)
    if held is None:
        return _contiguous(counts)
    whole = max(sum(shares), micro_batches)
    if not held or whole % len(held):
        raise ValueError(
            f"held must have a row for each of a number of lanes that divides {whole}, got "
            f"{len(held)} rows"
        )
    return prefer(counts, [held[k * len(held) // whole] for k in range(micro_batches)])


def prefer(counts: Sequence[int], held: Sequence[Sequence[float]]) -> Assignment:
    """Deal micro-batches so that their owners hold as many of the bytes they read as possible.

    The deal is exact: of all that give replica r `counts[r]` micro-batches, it has the most bytes
    local, and among those the most micro-batches where the contiguous deal puts them. Where all
    replicas hold the same it is the contiguous deal. Amounts are compared to ten digits or more
    (for up to 2 ** 14 micro-batches and 2 ** 10 replicas).

    It is a transportation problem, solved by successive shortest paths (Ahuja, Magnanti and Orlin,
    "Network Flows", 1993, chapter 9): each micro-batch comes to a replica with room along the
    chain of hand-overs that loses least. K micro-batches and N replicas take about K x N x N
    operations times the length of a chain, so ask once for a generation, not in every step.

    Args:
        counts: Micro-batches of each replica; they sum to the number of rows of `held`.
        held: Bytes of what micro-batch k reads that the node of replica r has, shape (K, N).

    >>> prefer((1, 2), [(5, 5), (5, 5), (5, 5)]).owners
    (0, 1, 1)
    >>> prefer((1, 2), [(0, 5), (5, 5), (9, 5)]).owners
    (1, 1, 0)

    Raises:
        ValueError: `held` has another shape, or a value that is negative or not finite.
    """
    worth = _worth(counts, held)
    replicas = len(counts)
    owned: list[list[int]] = [[] for _ in counts]
    loss = np.full((replicas, replicas), _FAR)  # least lost by handing one over from r to s
    handed = np.zeros((replicas, replicas), np.int64)  # and which
    for k, row in enumerate(worth):
        distance, via = _shortest(-row, loss)
        at = min(
            (r for r in range(replicas) if len(owned[r]) < counts[r]), key=lambda r: distance[r]
        )
        changed = [at]
        while (giver := int(via[at])) >= 0:
            one = int(handed[giver, at])
            owned[giver].remove(one)
            owned[at].append(one)
            at = giver
            changed.append(at)
        owned[at].append(k)
        for r in changed:
            mine = np.sort(np.array(owned[r]))
            losses = worth[mine, r][:, None] - worth[mine]
            least = losses.argmin(axis=0)
            loss[r], handed[r] = losses[least, np.arange(replicas)], mine[least]
    owner_of = {k: r for r, mine in enumerate(owned) for k in mine}
    return Assignment(tuple(owner_of[k] for k in range(len(worth))))


def whole_shares(shares: Sequence[float], step: int) -> tuple[int, ...]:
    """The micro-batches of a full step that each replica takes.

    Where shares have parts of micro-batches, in sixteenths, a replica takes one more in some steps
    than in others: the 16 steps from a multiple of 16 on deal exactly 16 times its share, and from
    there to any of them it has had its part to within one.

    >>> [whole_shares((2.5, 1.5), step) for step in range(3)]
    [(3, 1), (2, 2), (3, 1)]
    """
    if all(share == int(share) for share in shares):
        return tuple(map(int, shares))
    return _turns(tuple(shares))[step % PARTS]


@lru_cache(maxsize=8)
def _turns(shares: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
    """What each replica takes in each of 16 steps: whom most is owed gets the next micro-batch."""
    whole, replicas, given = round(sum(shares)), range(len(shares)), [0] * len(shares)
    turns = []
    for step in range(1, PARTS + 1):
        owed = [step * share - had for share, had in zip(shares, given, strict=True)]
        counts = [max(0, int(one)) for one in owed]
        left = whole - sum(counts)
        if left > 0:
            first = sorted(replicas, key=lambda r: (counts[r] - owed[r], r))[:left]
        else:  # some have had more than their part
            some = [r for r in replicas if counts[r]]
            first = sorted(some, key=lambda r: (owed[r] - counts[r], r))[:-left]
        for r in first:
            counts[r] += 1 if left > 0 else -1
        given = [had + count for had, count in zip(given, counts, strict=True)]
        turns.append(tuple(counts))
    return tuple(turns)


def deal(shares: Sequence[float], total: int) -> tuple[int, ...]:
    """Split `total` in proportion to `shares`, exactly, by largest remainder (ties: lower index).

    >>> deal((5, 2, 1), 8), deal((5, 2, 1), 3), deal((2.5, 1.5), 8)
    ((5, 2, 1), (2, 1, 0), (5, 3))
    """
    parts = [round(share * PARTS) for share in shares]
    whole = sum(parts)
    if whole < 1 or min(parts) < 0:
        raise ValueError(f"shares must be non-negative with a positive sum, got {tuple(shares)}")
    floors = [part * total // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda r: (-(parts[r] * total % whole), r))
    for r in by_remainder[: total - sum(floors)]:
        floors[r] += 1
    return tuple(floors)


def _contiguous(counts: Sequence[int]) -> Assignment:
    return Assignment(tuple(r for r, count in enumerate(counts) for _ in range(count)))


def _worth(counts: Sequence[int], held: Sequence[Sequence[float]]) -> npt.NDArray[np.int64]:
    """Integers (K, N) that rank deals by bytes first, then by likeness to the contiguous deal."""
    rows, replicas = sum(counts), len(counts)
    widths = sorted({len(row) for row in held})
    if min(counts, default=0) < 0 or len(held) != rows or widths not in ([replicas], []):
        raise ValueError(
            f"held must have {rows} rows of {replicas} values for counts {tuple(counts)}, got "
            f"{len(held)} rows of {widths}"
        )
    amounts = np.array(held, np.float64).reshape(rows, replicas)
    if not (np.isfinite(amounts) & (amounts >= 0)).all():
        raise ValueError("held must be bytes: finite numbers that are not negative")
    bits = 60 - (rows + 2).bit_length() - (replicas + 2).bit_length()
    exponent = int(np.frexp(amounts.max(initial=0))[1])
    units = np.rint(np.ldexp(amounts, min(bits, 52) - exponent)).astype(np.int64)
    worth: npt.NDArray[np.int64] = units * (rows + 1)
    worth[np.arange(rows), _contiguous(counts).owners] += 1
    return worth


def _shortest(
    distance: npt.NDArray[np.int64], loss: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bellman and Ford's distances to each replica, and whom its path comes from (-1: nobody).

    No cycle loses less than nothing, since what is dealt so far is dealt best.
    """
    via = np.full(len(distance), -1)
    while True:
        through = distance[:, None] + loss
        nearest = through.argmin(axis=0)
        shorter = through[nearest, np.arange(len(distance))]
        better = shorter < distance
        if not better.any():
            return distance, via
        distance = np.where(better, shorter, distance)
        via = np.where(better, nearest, via)
