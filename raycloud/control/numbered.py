"""What is known of members in arrays, by their numbers, where thousands are asked for at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.intp]
Seconds = npt.NDArray[np.float64]


def room_for(member: int, seconds: Seconds, *, fill: float = 0.0) -> Seconds:
    """The same array, or a longer one that has a place for this member, too.

    >>> room_for(1, np.array([0.5, 0.25])).tolist(), room_for(2, np.array([0.5])).tolist()
    ([0.5, 0.25], [0.5, 0.0, 0.0])
    """
    if member < len(seconds):
        return seconds
    more = max(member + 1, 2 * len(seconds)) - len(seconds)
    return np.append(seconds, np.full(more, fill))
