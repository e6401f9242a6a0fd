"""Who gets how many seats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Want(NamedTuple):
    """What a run can do with: its fewest and its most members."""

    fewest: int
    most: int


def deal(seats: int, wants: Sequence[Want], expected: int = 0) -> list[int]:
    """The seats of each run: first the fewest of all, in their order, then in turns one more each.

    A run for whose fewest nothing is left gets none, and those after it their turn.

    Args:
        seats: How many there are.
        wants: Of the runs that are there, in the order in which they came.
        expected: How many runs there are soon to be: those that are not there yet have their part.

    >>> deal(8, [Want(1, 8), Want(2, 3)]), deal(8, [Want(1, 8)], expected=2)
    ([5, 3], [4])
    >>> deal(3, [Want(2, 4), Want(2, 2), Want(1, 1)])
    [2, 0, 1]
    """
    every = [*wants, *(Want(1, seats) for _ in range(expected - len(wants)))]
    dealt, left = [0] * len(every), seats
    for at, want in enumerate(every):
        if want.fewest <= left:
            dealt[at], left = want.fewest, left - want.fewest
    while left and (open_ := [at for at, w in enumerate(every) if 0 < dealt[at] < w.most]):
        at = min(open_, key=lambda at: (dealt[at], at))
        dealt[at], left = dealt[at] + 1, left - 1
    return dealt[: len(wants)]
