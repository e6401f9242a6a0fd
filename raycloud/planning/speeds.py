"""The speeds of many workers in arrays: shares of thousands are fitted in a millisecond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from raycloud.planning.speed import Speed

Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

NO_LIMIT = int(np.iinfo(np.int64).max)  # of what a worker holds
SAME = 1e-9  # of a time: what is closer is the same moment


@dataclass(frozen=True, slots=True)
class Speeds:
    """T_i(b) = fixed_s[i] + b * micro_batch_s[i] of each worker i: see `Speed`, which is one.

    >>> speeds = Speeds(np.array([2.0, 9.0]), np.array([1.0, 1.0]), np.array([8, 8]))
    >>> speeds.step_s(np.array([2, 0]))
    4.0

    Attributes:
        fixed_s: Seconds of a step that do not depend on the share.
        micro_batch_s: Seconds per micro-batch.
        limit: Most micro-batches per step that each can hold.
    """

    fixed_s: Seconds
    micro_batch_s: Seconds
    limit: Counts

    @classmethod
    def of(cls, speeds: Sequence[Speed]) -> Speeds:
        """Those of the workers in this order."""
        most = (speed.max_micro_batches for speed in speeds)
        return cls(
            np.array([speed.fixed_s for speed in speeds], np.float64),
            np.array([speed.micro_batch_s for speed in speeds], np.float64),
            np.array([NO_LIMIT if limit is None else limit for limit in most], np.int64),
        )

    def __len__(self) -> int:
        """How many workers."""
        return len(self.fixed_s)

    def seconds(self, shares: Counts) -> Seconds:
        """T(b) of each."""
        with np.errstate(over="ignore"):
            return np.where(shares > 0, self.fixed_s + shares * self.micro_batch_s, 0.0)

    def least_s(self, micro_batches: int) -> float:
        """No shares take less, not even parts of micro-batches; 0 where that is not so simple."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            per_s = 1.0 / self.micro_batch_s
            least_s = float((micro_batches + (self.fixed_s * per_s).sum()) / per_s.sum())
        return (1 - SAME) * least_s if self.fixed_s.max() <= least_s < np.inf else 0.0

    def step_s(self, shares: Counts) -> float:
        """Seconds of the worker which ends last."""
        return float(self.seconds(shares).max())
