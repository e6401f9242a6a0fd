"""Where the rows of each lane lie, so that micro-batches go where their data is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from raycloud.net.transport import take_from

if TYPE_CHECKING:
    from raycloud.data.index import Index
    from raycloud.net.transport import Transport
    from raycloud.order import Order
    from raycloud.step.feed import Held


def held(index: Index, order: Order, nodes: Sequence[str]) -> Held:
    """For each lane, the bytes of its rows that each rank's node holds.

    Lanes are those of the newest layout; they keep what they have where data grows. The bytes of a
    block count evenly over its rows.

    Args:
        index: Of the samples, with the nodes that hold each block.
        order: Which sample stands where.
        nodes: The node of each rank; empty where unknown.

    Returns:
        A row for each lane, with a value for each rank. Nothing where no rank can be preferred:
        ranks are on one node, one's node is not known, or there are no lanes.
    """
    epoch = order.newest_from
    lanes = order.lanes_in(epoch)
    if not lanes or len(set(nodes)) < 2 or not all(nodes):  # noqa: PLR2004 (a choice)
        return ()
    blocks = [block for block in index.blocks if block.rows]
    starts = np.cumsum([0, *(block.rows for block in blocks)])
    row_of = {node: row for row, node in enumerate(dict.fromkeys(nodes))}
    there = np.zeros((len(row_of), len(blocks)))
    for at, block in enumerate(blocks):
        for node in row_of.keys() & block.nodes:
            there[row_of[node], at] = block.bytes
    before = np.cumsum(np.insert(there, 0, 0.0, axis=1), axis=1)  # bytes held of all rows before
    amounts = np.diff([np.interp(index.partitions, starts, sums) for sums in before], axis=1)
    columns = amounts[[row_of[node] for node in nodes]]
    sums = [columns[:, order.lane_partitions(epoch, lane)].sum(axis=1) for lane in range(lanes)]
    return tuple(tuple(row.tolist()) for row in sums)


def agreed(own: Held, lane: Transport, abandoned: Callable[[], bool]) -> Held:
    """What rank 0 says is held where: all ranks must deal alike, or samples are lost or doubled.

    Members may have got their index at different times, with blocks on other nodes.

    Args:
        own: What this member would say; of the same shape on all members.
        lane: Any transport of the generation for tensors on the CPU.
        abandoned: Says that the generation is over.
    """
    if not own:
        return ()
    values = torch.tensor(own, dtype=torch.float64)
    take_from(0, {"held": values}, lane, abandoned)
    return tuple(tuple(row) for row in values.tolist())
