"""Tables of rows by id: what one is, where a row belongs, how it begins. Plain numpy.

The same on every processor: nothing here rounds otherwise on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[Any]  # float32 or float64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIT = 2.0**-53
_SHARDS = np.uint64(0x5851F42D4C957F2D)  # so that ids of one shard are spread within it


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """What a table is, the same for all who use it.

    Attributes:
        name: Of the module that has it.
        width: Values of a row.
        optimizer: `sgd`, `adagrad`, `rowwise_adagrad` or `adamw`.
        rate: Its learning rate.
        epsilon: Added to what an update is divided by.
        betas: Of `adamw`.
        weight_decay: Times the rate, what a row loses of itself with each of its updates.
        spread: New values are drawn evenly from -spread to spread.
        seed: Of what is drawn.
        dtype: `float32` or `float64`.
        admit_after: In so many steps an id is named before it has a row of its own.
        expire_steps: A row that no step of so many has named is forgotten; None: none is.
    """

    name: str
    width: int
    optimizer: str = "rowwise_adagrad"
    rate: float = 0.01
    epsilon: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    spread: float = 0.05
    seed: int = 0
    dtype: str = "float32"
    admit_after: int = 1
    expire_steps: int | None = None


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each of these as one that looks random (splitmix64, Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        z = values + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def shard_of(ids: Ids, shards: int) -> npt.NDArray[np.int64]:
    """Which of so many shards each id belongs to."""
    spread = mixed(ids.view(np.uint64) ^ _SHARDS)
    return (spread % np.uint64(shards)).astype(np.int64)


def initial(spec: TableSpec, ids: Ids) -> Values:
    """How the rows of these ids begin, shape (ids, width): by id alone, whoever asks first."""
    with np.errstate(over="ignore"):
        rows = mixed(ids.view(np.uint64) ^ mixed(np.array([spec.seed], np.uint64)))
        places = np.arange(spec.width, dtype=np.uint64) * _GOLDEN
        drawn = mixed(rows[:, None] + places[None, :])
    even = (drawn >> np.uint64(11)).astype(np.float64) * _UNIT
    return ((2.0 * even - 1.0) * spec.spread).astype(spec.dtype)


def summed(ids: Ids, gradients: Values) -> tuple[Ids, Values]:
    """Each id once, rising, with the sum of its gradients in their order."""
    if not len(ids):
        return ids, gradients
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    return ordered[starts], np.add.reduceat(gradients[order], starts, axis=0)
