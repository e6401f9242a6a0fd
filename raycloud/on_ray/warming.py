"""What is pinned in memory first: the blocks that the first epoch needs first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raycloud.order import Layout, Order, lanes_of

if TYPE_CHECKING:
    from raycloud.data.index import Index
    from raycloud.spec import Job


def keys_first_read(indexes: Sequence[Index], job: Job) -> list[str]:
    """The keys of all blocks, each once: those of the training samples as an epoch reads them.

    Args:
        indexes: That of the training samples, then others.
        job: Says how they are read.
    """
    first = _first_read(indexes[0], job)
    return list(dict.fromkeys([*first, *(b.key for index in indexes for b in index.blocks)]))


def _first_read(index: Index, job: Job) -> list[str]:
    lanes = lanes_of(job.global_batch, job.micro_batch)
    run = job.global_batch // lanes
    layout = Layout(partitions=index.partitions, lanes=lanes, run=run, window=job.data.window)
    order = Order(samples=index.rows, seed=job.seed, shuffle=job.data.shuffle, layout=layout)
    partitions = order.partitions_ahead(0, 0, index.rows).tolist()
    starts, keys = index.starts, list[str]()
    for partition in partitions:
        first, last = index.partitions[partition], index.partitions[partition + 1] - 1
        touched = range(bisect_right(starts, first) - 1, bisect_right(starts, last))
        keys += [index.blocks[number].key for number in touched]
    return keys
