"""How many micro-batches of a step each worker takes, so that the step ends soonest.

The load of a worker is Load_i = Tasks_i / Capacity_i, and the plan levels it. With a fixed part per
step the load of worker i in seconds is T_i(b) = fixed_s + b * micro_batch_s (`Speed`), or what its
data takes (`Speeds`), and the shares solve

    minimise max_i T_i(b_i)   subject to   sum b_i = K,  0 <= b_i <= max_i,  b_i whole,

the min-max form of LB-BSP (Chen et al., "Semi-dynamic load balancing: efficient distributed
learning in non-dedicated environments", SoCC 2020). LB-BSP solves it over the reals and rounds;
here it is solved exactly over the integers: every T_i rises with b_i, so giving each micro-batch in
turn to the worker that would finish it first is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raycloud.errors import PlacementError
from raycloud.planner.speed import SAME, Counts, Speed, Speeds

_WORTH_LEAVING_OUT = 0.30  # a worker is left idle only if that makes the step this much faster
_TRIES = 96  # at a time until which nearly all are dealt
_SINGLY = 64  # micro-batches that are dealt one by one, or a quarter as many as there are workers
_SHOWN_LIMITS = 8  # in an error
_WIDEST_BAND = 0.1  # of a step: more is worth a change whatever is unsure


def fit_shares(
    speeds: Sequence[Speed] | Speeds, micro_batches: int, *, least: int = 1
) -> tuple[int, ...]:
    """Whole shares, one per worker, summing to `micro_batches`, with the shortest predicted step.

    >>> fit_shares([Speed(fixed_s=0, micro_batch_s=1), Speed(fixed_s=0, micro_batch_s=3)], 8)
    (6, 2)

    Among equals the micro-batch goes to the lower index, so the same input gives the same shares.

    Where there is at least one micro-batch per worker every worker gets one, even if the step takes
    a little longer: a worker with share 0 is no longer measured, so nobody would notice that it
    recovered. A worker is left idle only if its single micro-batch would hold up all others so long
    that the best step without it is at least 30% faster, that is if T* <= 0.7 * T_i(1) with T* the
    optimum; both with what there is besides computing.

    >>> fit_shares([Speed(fixed_s=0, micro_batch_s=1), Speed(fixed_s=5.7, micro_batch_s=0)], 4)
    (3, 1)
    >>> fit_shares([Speed(fixed_s=0, micro_batch_s=1), Speed(fixed_s=5.8, micro_batch_s=0)], 4)
    (4, 0)

    Where parts of micro-batches are dealt, of which there are `least` in one, that is a whole one.

    >>> fit_shares([Speed(fixed_s=0, micro_batch_s=s) for s in (1, 1, 5)], 40, least=4)
    (18, 18, 4)

    Raises:
        PlacementError: The workers' limits together are below `micro_batches`.
        ValueError: No worker, or `micro_batches` below 1.
    """
    best = _fit(_workers(speeds, micro_batches), micro_batches, least)
    return tuple(best.tolist())


def _fit(workers: Speeds, micro_batches: int, least: int) -> Counts:
    _check_room(workers, micro_batches)
    best = _fill(workers, micro_batches, np.zeros_like(workers.limit))
    if micro_batches < least * len(best) or best.min() >= least:
        return best
    alone_s = workers.seconds(np.full_like(workers.limit, least))
    beside_s = workers.beside_s
    worth = workers.step_s(best) + beside_s > (1 - _WORTH_LEAVING_OUT) * (alone_s + beside_s)
    at_least = least * (worth & (workers.limit >= least)).astype(np.int64)
    if least > 1:  # those who are left out have nothing, and no part of that
        workers = replace(workers, limit=np.where(at_least > 0, workers.limit, 0))
    return _fill(workers, micro_batches, at_least)


def step_seconds(speeds: Sequence[Speed], shares: Sequence[float]) -> float:
    """Predicted seconds of computing of a step: that of the worker which ends last.

    >>> step_seconds([Speed(fixed_s=2, micro_batch_s=1), Speed(fixed_s=9, micro_batch_s=1)], (2, 0))
    4

    Raises:
        ValueError: Not one share per speed.
    """
    return max(
        (speed.seconds(share) for speed, share in zip(speeds, shares, strict=True)), default=0.0
    )


def equal_shares(members: int, micro_batches: int) -> tuple[int, ...]:
    """Shares that differ by at most one; the lower index takes the remainder.

    >>> equal_shares(3, 8)
    (3, 3, 2)

    Raises:
        ValueError: `members` below 1, or `micro_batches` below 0.
    """
    if members < 1 or micro_batches < 0:
        raise ValueError(f"cannot split {micro_batches} micro-batches over {members} members")
    whole, rest = divmod(micro_batches, members)
    return (whole + 1,) * rest + (whole,) * (members - rest)


def first_shares(
    speeds: Sequence[Speed] | Speeds, micro_batches: int, *, gain: float = 0.05
) -> tuple[int, ...]:
    """The shares to begin with: equal ones, unless fitted ones are predicted to be worth it.

    The speeds then come from a probe of a few micro-batches, which is noisy.

    >>> first_shares([Speed(fixed_s=0, micro_batch_s=s) for s in (1.0, 1.02, 1.04)], 90)
    (30, 30, 30)

    Raises:
        PlacementError: The workers' limits together are below `micro_batches`.
        ValueError: As for `fit_shares`.
    """
    equal = equal_shares(len(speeds), micro_batches)
    return better_shares(equal, speeds, micro_batches, gain=gain) or equal


def better_shares(
    current: Sequence[int],
    speeds: Sequence[Speed] | Speeds,
    micro_batches: int,
    *,
    gain: float = 0.05,
    least: int = 1,
) -> tuple[int, ...] | None:
    """New shares if they shorten the step by at least the fraction `gain`; None: stay as you are.

    `gain` is the hysteresis that keeps noise in the measured speeds from moving work about. It is
    of all of a step: of computing, and of what `Speeds` say that there is besides. Shares that are
    not possible (another sum, a limit exceeded) are replaced whatever the gain. `least` is that of
    `fit_shares`.

    >>> even, uneven = Speed(fixed_s=0, micro_batch_s=1), Speed(fixed_s=0, micro_batch_s=2)
    >>> better_shares((4, 4), [even, even], 8), better_shares((4, 4), [even, uneven], 8)
    (None, (6, 2))

    Raises:
        PlacementError: The workers' limits together are below `micro_batches`.
        ValueError: Not one share per speed, or as for `fit_shares`.
    """
    if len(current) != len(speeds):
        raise ValueError(f"argument `current` has {len(current)} shares for {len(speeds)} workers")
    workers, now = _workers(speeds, micro_batches), np.array(current, dtype=np.int64)
    possible = now.sum() == micro_batches and ((now >= 0) & (now <= workers.limit)).all()
    now_s = workers.step_s(now)
    worth_s = now_s - gain * (now_s + workers.beside_s) if possible else np.inf
    if workers.least_s(micro_batches) > worth_s:
        return None  # whichever are the best
    best = _fit(workers, micro_batches, least)
    if np.array_equal(best, now) or workers.step_s(best) > worth_s:
        return None
    return tuple(best.tolist())


def dead_band(gain: float, error: float) -> float:
    """The gain that a change must promise where the slowest's expected seconds err by a part.

    What is promised is no more sure than they are: less than they err is not believed, but for a
    tenth of a step, which is.

    >>> dead_band(0.05, 0.02), dead_band(0.05, 0.08), dead_band(0.05, 0.3)
    (0.05, 0.08, 0.1)
    """
    return max(gain, min(error, _WIDEST_BAND))


def _workers(speeds: Sequence[Speed] | Speeds, micro_batches: int) -> Speeds:
    """In arrays, and none takes more than a whole step."""
    if len(speeds) < 1 or micro_batches < 1:
        raise ValueError(
            f"shares need a worker and a micro-batch, got {len(speeds)} and {micro_batches}"
        )
    known = speeds if isinstance(speeds, Speeds) else Speeds.of(speeds)
    return replace(known, limit=np.minimum(known.limit, micro_batches))


def _check_room(workers: Speeds, micro_batches: int) -> None:
    held, count = int(workers.limit.sum()), len(workers)
    if held >= micro_batches:
        return
    shown = " + ".join(map(str, workers.limit[:_SHOWN_LIMITS].tolist()))
    if count > _SHOWN_LIMITS:
        shown += " + ..."
    raise PlacementError(
        f"a step has {micro_batches} micro-batches, but the {count} workers hold at most "
        f"{held} together ({shown})",
        hint=f"lower global_batch to at most {held} micro-batches, add workers "
        "(elastic.max_workers), or use workers with more memory",
    )


def _fill(workers: Speeds, total: int, start: Counts) -> Counts:
    """Begin with `start`, then give each micro-batch to the worker that finishes it first.

    Most of it is done at once: the micro-batches that can be finished within some time are a prefix
    of that sequence. How many those are rises almost evenly with the time, so interpolation, and
    every other time bisection, finds one that leaves few to deal singly: at most one per worker,
    and of many workers only those that would finish theirs at the same moment.
    """
    limit = workers.limit
    counts, early_s, late_s = start, 0.0, workers.step_s(limit)
    dealt, most = int(start.sum()), int(limit.sum())
    few = min(len(counts), max(_SINGLY, len(counts) // 4))
    for number in range(_TRIES):
        alike = late_s - early_s <= SAME * late_s
        if total - dealt <= (len(counts) if alike else few):
            break
        part = 0.5 if number % 2 else (total - dealt) / (most - dealt)
        tried_s = early_s + part * (late_s - early_s)
        tried = np.maximum(workers.within(tried_s, total), start)
        if (sum_ := int(tried.sum())) <= total:
            counts, early_s, dealt = tried, tried_s, sum_
        else:
            late_s, most = tried_s, sum_
    return _deal(workers, counts, total - dealt)


def _deal(workers: Speeds, shares: Counts, left: int) -> Counts:
    """Deal `left` more micro-batches one by one, each to the worker that finishes it first.

    That is one of the first `left` to finish another one.
    """
    shares = shares.copy()
    if not left:
        return shares
    next_s = np.where(shares < workers.limit, workers.seconds(shares + 1), np.inf)
    first = np.argsort(next_s, kind="stable")[:left]
    again_s = workers.some(first).seconds(shares[first] + 2)
    if len(first) == left and next_s[first[-1]] < again_s.min():  # nobody is first twice
        shares[first] += 1
        return shares
    open_ = first[shares[first] < workers.limit[first]]
    queue = list(zip(next_s[open_].tolist(), open_.tolist(), strict=True))
    heapq.heapify(queue)
    for _ in range(left):
        _, i = queue[0]
        shares[i] += 1
        if shares[i] < workers.limit[i]:
            heapq.heapreplace(queue, (workers.next_s(i, int(shares[i]) + 1), i))
        else:
            heapq.heappop(queue)
    return shares
