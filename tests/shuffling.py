"""How well an epoch is shuffled, against a permutation drawn from all of them."""

from __future__ import annotations

import numpy as np

from raycloud.order import Order


def neighbours_together(order: Order, epoch: int, global_batch: int, near: int) -> float:
    """How often rows that are neighbours in the data set meet in a step, against a full shuffle.

    Of the pairs of rows in the same global batch of `epoch`, the fraction that stand within `near`
    rows of each other in the data set, over the fraction that a full shuffle has in the mean: of
    n rows, `near (2 n - near - 1) / (n (n - 1))`. 1 is a full shuffle. More means that steps see
    less of the data set at once, as they do when data are sorted; less means that rows are spread
    more evenly than by chance.

    With partitions in lanes it is about the number of windows in a lane: a step draws from each
    lane, but only from one window of it.

    Args:
        order: The sequence.
        epoch: Which epoch of it; all its steps are looked at.
        global_batch: Rows of a step.
        near: Rows apart that still count as neighbours, at least 1 and fewer than the samples.

    """
    samples = order.samples_in(epoch)
    pairs = together = 0
    for start in range(0, samples, global_batch):
        ids = np.sort(order.ids(epoch, start, min(start + global_batch, samples)))
        pairs += len(ids) * (len(ids) - 1) // 2
        within = np.searchsorted(ids, ids + near, side="right") - np.arange(1, len(ids) + 1)
        together += int(within.sum())
    by_chance = near * (2 * samples - near - 1) / (samples * (samples - 1))
    return together / pairs / by_chance


def displacement(order: Order, epoch: int) -> float:
    """How far rows stand from their own place, against a full shuffle.

    The mean distance between a row's place in `epoch` and its place in the data set, over that of
    a full shuffle: of n rows, `(n n - 1) / (3 n)`. 0: nothing moved. 1: a full shuffle.

    """
    samples = order.samples_in(epoch)
    moved = np.abs(order.ids(epoch, 0, samples) - np.arange(samples)).mean()
    return float(moved / ((samples * samples - 1) / (3 * samples)))
