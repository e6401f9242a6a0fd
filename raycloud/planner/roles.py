"""Roles: which nodes train, and which make batches for them, so that steps are fastest.

A worker whose batches are made elsewhere takes T(b) = fixed_s + b * micro_batch_s; making the batch
of a micro-batch takes one core collate_s. A worker on a CPU that makes its own has c cores for
both, and t threads make batches:

    micro_batch_s + collate_s / c,   or collate_s / min(t, c) where that is more;

on a GPU the greater of micro_batch_s and collate_s / min(t, c). With collators a step takes what
its slowest worker takes, or all collators together take for its K micro-batches, if that is more:

    step_s = max(s, f)    s = max_i T_i(b_i) + exchange,  f = K / sum_j 1 / collate_s_j

A worker that would wait for batches makes some itself, on one core, which all of them do in h =
K / sum_i 1 / collate_s_i. So where s < f a step takes the t in which both have made them all,

    t / f + (t - s) / h = 1.

Every division of up to `_EVERY` nodes is looked at. Of more nodes, those that are better at
training than at making batches, by comparative advantage, train: the division of two kinds of work
over unlike machines is optimal in that order, but for what is left over by whole machines (Ricardo
1817; Dornbusch, Fischer and Samuelson, "Comparative advantage, trade, and payments", AER 1977).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raycloud.errors import PlacementError
from raycloud.planner.shares import fit_shares, step_seconds
from raycloud.planner.speed import Speed

_EVERY = 8  # nodes, all divisions of which are looked at
_COUNTS = 32  # of nodes that train, which are looked at where there are more
_HEADROOM = 1.5  # times the collators that would just do
_SHOWN = 4  # nodes in a sentence

Besides = Callable[[Sequence[str], Sequence[Speed], Sequence[float]], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A node, and how fast each kind of work is there.

    Attributes:
        node: Its name.
        collate_s: Seconds of a core for the batch of a micro-batch.
        workers: How many fit.
        speed: Of each of them, whose batches are made elsewhere; None: none fits.
        processes: Collators that fit where no worker is.
        beside: Collators that fit beside its workers.
    """

    node: str
    collate_s: float
    workers: int = 0
    speed: Speed | None = None
    processes: int = 0
    beside: int = 0

    def __post_init__(self) -> None:
        """Refuse what nothing can be predicted from."""
        if not self.collate_s > 0 or min(self.workers, self.processes, self.beside) < 0:
            raise ValueError(f"a machine takes collate_s > 0 and counts >= 0, got {self}")
        if (self.speed is None) != (self.workers == 0):
            raise ValueError(f"a machine takes a speed where workers fit, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Which nodes train and which make batches, and what a step then takes.

    Attributes:
        trainers: The node of each worker, in rank order.
        collators: The node of each collator; none: workers make their own batches.
        step_s: Seconds of a step, as predicted.
        feed_s: Seconds that all collators take for a step's batches; 0: there are none.
        help_s: Seconds that workers would take for them, who make some while they would wait; 0:
            they make none.
        together_s: Of a step where each worker makes its own batches, on as many nodes as is best.
        bound: No division of this work over these nodes is more times as fast as that.
        machines: What was measured of the nodes.
    """

    trainers: tuple[str, ...]
    collators: tuple[str, ...]
    step_s: float
    feed_s: float
    together_s: float
    bound: float
    machines: tuple[Machine, ...] = ()
    help_s: float = 0.0

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Roles:
        """The inverse of `asdict`; `KeyError`, `TypeError`: it is none."""
        told = dict(record)
        machines = tuple(
            Machine(**{**one, "speed": None if one["speed"] is None else Speed(**one["speed"])})
            for one in told.pop("machines")
        )
        trainers, collators = tuple(told.pop("trainers")), tuple(told.pop("collators"))
        return cls(trainers=trainers, collators=collators, machines=machines, **told)

    @property
    def gain(self) -> float:
        """How many times as fast as where workers make their own batches."""
        return self.together_s / self.step_s

    @property
    def why(self) -> str:
        """The choice and its reason, as a sentence."""
        together = f"{self.together_s:.3g} s where each worker makes its own batches"
        at_most = f"no division of the work is more than {self.bound:.2f} times as fast as that"
        if not self.collators:
            return f"workers make their own batches: a step takes {together}, and {at_most}"
        nodes, made = len({*self.trainers}), len({*self.collators})
        slower = "making batches" if self.feed_s >= self.step_s else "training"
        slower += f" decides{', workers help' * (self.feed_s > self.step_s)}"
        return (
            f"{nodes} node{'s' * (nodes > 1)} train{'s' * (nodes == 1)}, and "
            f"{len(self.collators)} collators on {made} make their batches: a step takes "
            f"{self.step_s:.3g} s ({slower}) in place of {together}, {self.gain:.2f} times "
            f"as fast; {at_most}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is to be divided.

    Attributes:
        micro_batches: Of a step.
        least: Fewest workers.
        most: Most workers.
        cpus: Cores of a worker.
        threads: That make batches in a worker.
        on_gpu: Whether workers compute on GPUs.
        shares: Of workers, if they are fixed.
        besides_s: Seconds of a step besides computing, by workers' nodes, speeds and shares.
    """

    micro_batches: int
    least: int = 1
    most: int = 1_000_000
    cpus: int = 1
    threads: int = 1
    on_gpu: bool = False
    shares: tuple[float, ...] | None = None
    besides_s: Besides = lambda *_: 0.0

    def alone(self, machine: Machine) -> Speed:
        """The speed of a worker there that makes its own batches.

        >>> one = Machine(node="a", collate_s=2, workers=1, speed=Speed(fixed_s=0, micro_batch_s=3))
        >>> Work(micro_batches=1).alone(one).micro_batch_s
        5.0
        >>> Work(micro_batches=1, on_gpu=True).alone(one).micro_batch_s
        3.0
        """
        assert machine.speed is not None  # noqa: S101 - only such machines are asked about
        train_s, busy_s = machine.speed.micro_batch_s, machine.collate_s / self._making
        both_s = train_s if self.on_gpu else train_s + machine.collate_s / self.cpus
        return replace(machine.speed, micro_batch_s=float(max(both_s, busy_s)))

    @property
    def _making(self) -> int:
        return min(self.threads, self.cpus)

    def own_rate(self, machine: Machine) -> float:
        """Micro-batches a second whose batches workers make while a GPU computes."""
        return machine.workers * self._making / machine.collate_s if self.on_gpu else 0.0


def choose(machines: Sequence[Machine], work: Work, *, gain: float = 0.05) -> Roles:
    """Which machines train and which make batches.

    There are collators only where steps are faster by the fraction `gain` at least; the same
    arguments give the same roles.

    >>> fast, slow = Speed(fixed_s=0, micro_batch_s=1), Speed(fixed_s=0, micro_batch_s=9)
    >>> nodes = [Machine(node=n, collate_s=1, workers=1, speed=s, processes=1)
    ...          for n, s in (("a", fast), ("b", slow))]
    >>> found = choose(nodes, Work(micro_batches=12))
    >>> found.trainers, found.collators, found.step_s, found.together_s
    (('a',), ('b',), 12.0, 20.0)

    Raises:
        PlacementError: Fewer than `work.least` workers fit.
    """
    machines = sorted(machines, key=lambda one: one.node)
    together: Roles | None = None
    fed: Roles | None = None
    for some in _divisions(machines):
        for own in (True, False):
            found = _with(some, machines, work, own=own)
            if found is None:
                continue
            if own and (together is None or found.step_s < together.step_s):
                together = found
            if not own and (fed is None or _order(found) < _order(fed)):
                fed = found
    if together is None:
        room = sum(one.workers for one in machines)
        raise PlacementError(
            f"{work.least} workers do not fit: there is room for {room}",
            hint="lower elastic.min_workers or resources.worker, or free the cluster",
        )
    worth = fed is not None and fed.step_s <= (1 - gain) * together.step_s
    best = fed if worth and fed is not None else together
    limit = max(_bound(machines, work, together, best), together.step_s / best.step_s)
    return replace(best, together_s=together.step_s, bound=limit, machines=tuple(machines))


def _order(roles: Roles) -> tuple[float, int]:
    return roles.step_s, len(roles.collators)


def _divisions(machines: Sequence[Machine]) -> Iterator[tuple[Machine, ...]]:
    """Which of them may be the ones that train."""
    able = [one for one in machines if one.workers]
    if len(able) <= _EVERY:
        for count in range(1, len(able) + 1):
            yield from itertools.combinations(able, count)
        return
    for order in (_advantage, _train_rate):
        ranked = sorted(able, key=order, reverse=True)
        for count in _counts(ranked, machines):
            yield tuple(ranked[:count])


def _counts(ranked: Sequence[Machine], machines: Sequence[Machine]) -> list[int]:
    """How many of the first train: of many some counts, and those where both kinds level."""
    if len(ranked) <= _COUNTS:
        return [*range(1, len(ranked) + 1)]
    made = sum(one.processes / one.collate_s for one in machines)
    trained, level = 0.0, len(ranked)
    for count, one in enumerate(ranked, 1):
        trained += _train_rate(one)
        made -= (one.processes - one.beside) / one.collate_s
        if trained >= made:
            level = count
            break
    step = len(ranked) / _COUNTS
    spread = {math.ceil(step * (at + 1)) for at in range(_COUNTS)}
    near = {level + more for more in (-2, -1, 0, 1, 2)}
    return sorted(count for count in spread | near if 1 <= count <= len(ranked))


def _train_rate(machine: Machine) -> float:
    if machine.speed is None:
        return 0.0
    return machine.workers / max(machine.speed.micro_batch_s, 1e-12)


def _advantage(machine: Machine) -> float:
    given_up = (machine.processes - machine.beside) / machine.collate_s
    return _train_rate(machine) / given_up if given_up > 0 else math.inf


def _with(
    some: Sequence[Machine], machines: Sequence[Machine], work: Work, *, own: bool
) -> Roles | None:
    """The roles where these train; None: that is not possible."""
    ranked = sorted(some, key=lambda one: (-_train_rate(one), one.node))
    workers = [one for one in ranked for _ in range(one.workers)][: work.most]
    if len(workers) < work.least or (work.shares and len(work.shares) != len(workers)):
        return None
    speeds = [work.alone(one) if own else one.speed for one in workers if one.speed is not None]
    try:
        shares = work.shares or fit_shares(speeds, work.micro_batches)
    except PlacementError:  # memory holds no more
        return None
    nodes = tuple(one.node for one in workers)
    step_s = step_seconds(speeds, shares) + work.besides_s(nodes, speeds, shares)
    if own:
        return Roles(
            trainers=nodes, collators=(), step_s=step_s, feed_s=0.0, together_s=0.0, bound=1.0
        )
    used = set(nodes)
    places = [(one, one.beside if one.node in used else one.processes) for one in machines]
    rate = sum(count / one.collate_s for one, count in places)
    if rate == 0.0:
        return None
    collators = _picked(places, _HEADROOM * work.micro_batches / step_s)
    made = {one.node: 1 / one.collate_s for one in machines}
    feed_s = work.micro_batches / sum(made[node] for node in collators)
    help_s = work.micro_batches / sum(made[node] for node in nodes)
    return Roles(
        trainers=nodes,
        collators=collators,
        step_s=fed_seconds(step_s, feed_s=feed_s, help_s=help_s),
        feed_s=feed_s,
        together_s=0.0,
        bound=1.0,
        help_s=help_s,
    )


def fed_seconds(step_s: float, *, feed_s: float, help_s: float) -> float:
    """Seconds of a step that takes workers `step_s`, with the batches that are made for it.

    >>> fed_seconds(1.0, feed_s=2.0, help_s=2.0), fed_seconds(1.0, feed_s=2.0, help_s=0.0)
    (1.5, 2.0)
    >>> fed_seconds(1.0, feed_s=0.5, help_s=2.0)
    1.0
    """
    if feed_s <= step_s:
        return step_s
    if help_s == 0.0:
        return feed_s
    return (1 + step_s / help_s) / (1 / feed_s + 1 / help_s)


def _picked(places: Sequence[tuple[Machine, int]], rate: float) -> tuple[str, ...]:
    """Nodes of as many collators as make so many micro-batches a second, or of all there may be.

    One after the other on each node, the fastest first.
    """
    ranked = sorted(places, key=lambda one: (one[0].collate_s, one[0].node))
    picked: list[str] = []
    made = 0.0
    for turn in range(max((count for _, count in places), default=0)):
        for machine, count in ranked:
            if turn < count and made < rate:
                picked.append(machine.node)
                made += 1 / machine.collate_s
    return tuple(picked)


def _bound(machines: Sequence[Machine], work: Work, together: Roles, best: Roles) -> float:
    """How many times as fast the best division is, if each machine's time could be divided.

    Machine i trains a part u_i of its time: maximise r = sum u_i T_i, where batches are made as
    fast, r <= sum (1 - u_i) C_i + u_i B_i. It is optimal to let those train first that give up
    fewest batches for a micro-batch, (C_i - B_i) / T_i; one machine divides its time.
    """
    rates = []
    for one in machines:
        made, beside = one.processes / one.collate_s, one.beside / one.collate_s
        rates.append((_train_rate(one), made, min(made, beside + work.own_rate(one))))
    rates.sort(key=lambda rate: (rate[1] - rate[2]) / rate[0] if rate[0] else math.inf)
    trained, made = 0.0, sum(rate[1] for rate in rates)
    for train, all_made, beside in rates:
        given_up = all_made - beside
        if trained + train <= made - given_up:
            trained, made = trained + train, made - given_up
            continue
        part = max(0.0, (made - trained) / (train + given_up))
        trained += min(1.0, part) * train
        break
    if not trained:
        return 1.0
    speeds = {one.node: one.speed for one in machines}
    some = [speed for node in best.trainers if (speed := speeds[node]) is not None]
    besides_s = work.besides_s(best.trainers, some, fit_shares(some, work.micro_batches))
    return together.step_s / (work.micro_batches / trained + besides_s)
