"""Scenarios by chance: small ones with everything that may happen, and fleets over days."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from raycloud.order import stream_seed
from raycloud.simulate.scenario import Fault, Kind, Scenario

_DAY_S = 86400.0
_TOGETHER = 0.3  # the chance that another fault follows within seconds
_SOON_S = 8.0
_EVERY_STEPS: Final = (None, 1, 10, 33, "auto")
_STEP_S = 12.0  # of a large fleet, about; checkpoints come the more rarely the more write parts

# How often what happens, and how long it lasts at most. Shares are a guess in the order of what
# large clusters tell: most interruptions are one machine's.
OFTEN: Final[Mapping[Kind, tuple[float, float]]] = {
    Kind.DIE: (0.30, 0.0),
    Kind.LEAVE: (0.25, 7200.0),
    Kind.FREEZE: (0.10, 120.0),
    Kind.CUT: (0.08, 120.0),
    Kind.BREAK: (0.10, 0.0),
    Kind.SLOW: (0.06, 7200.0),
    Kind.NOTICE: (0.05, 7200.0),
    Kind.ZONE: (0.03, 3600.0),
    Kind.DEAF: (0.03, 300.0),
    Kind.JUMP: (0.02, 300.0),
    Kind.FAIL: (0.01, 0.0),
    Kind.FULL: (0.02, 1800.0),
}


class _Chance:
    """Numbers by chance."""

    def __init__(self, seed: int) -> None:
        self._chance = np.random.Generator(np.random.PCG64(stream_seed(seed, 2)))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * float(self._chance.random())

    def whole(self, low: int, high: int) -> int:
        return int(self._chance.integers(low, high + 1))

    def wait_s(self, mean_s: float) -> float:
        return float(self._chance.exponential(mean_s))

    def of(self, *values: float) -> float:
        return values[self.whole(0, len(values) - 1)]

    def kind(self) -> Kind:
        shares = np.array([share for share, _ in OFTEN.values()])
        return list(OFTEN)[int(self._chance.choice(len(shares), p=shares / shares.sum()))]


def faults_by_chance(
    seed: int, *, per_day: float, lasts_s: float, many: int = 1
) -> tuple[Fault, ...]:
    """Faults at random moments, now and then two at once.

    Args:
        seed: Of what is drawn.
        per_day: How many a day, in the mean.
        lasts_s: Until when.
        many: At most so many members or nodes each, but of a zone.
    """
    chance, found, at_s = _Chance(seed), list[Fault](), 0.0
    while per_day > 0:
        at_s += chance.wait_s(_DAY_S / per_day)
        if at_s >= lasts_s:
            break
        found.append(_fault(chance, at_s, many))
        if chance.between(0, 1) < _TOGETHER:
            found.append(_fault(chance, at_s + chance.between(0, _SOON_S), many))
    return tuple(found)


def _fault(chance: _Chance, at_s: float, many: int) -> Fault:
    kind = chance.kind()
    longest_s = OFTEN[kind][1]
    lasts_s = chance.between(0.02, 1.0) * longest_s
    return Fault(at_s=at_s, kind=kind, many=chance.whole(1, many), lasts_s=lasts_s)


def large(seed: int, *, members: int, days: float, per_day: float | None = None) -> Scenario:
    """Many members for days.

    Without `per_day` there are as many interruptions as in the training of Llama 3 (Dubey et al.,
    "The Llama 3 herd of models", 2024): 466 in 54 days on 16,384 GPUs.
    """
    rate = 466 / 54 / 16_384 * members if per_day is None else per_day
    lasts_s = days * _DAY_S
    chance = _Chance(stream_seed(seed, 3))
    speeds = tuple(chance.between(2.0, 3.0) for _ in range(101))
    batch = 4 * members
    return Scenario(
        seed=seed,
        members=members,
        least=max(1, members // 2),
        samples=batch * 5_000 + batch // 3,
        global_batch=batch,
        faults=faults_by_chance(seed, per_day=rate, lasts_s=lasts_s, many=max(1, members // 2500)),
        lasts_s=lasts_s,
        every_steps=int(min(_DAY_S, max(900.0, 17.0 * members)) / _STEP_S),
        speeds=speeds,
        exchange_s=1.0,
        zones=min(members, 20),
        delay_s=1.0,
        build_s=120.0,
        spread=0.05,
        stillborn=0.02,
        awake_s=max(10.0, members / 250),
    )


def small(seed: int) -> Scenario:
    """A few members for some minutes, to whom much happens."""
    chance = _Chance(stream_seed(seed, 4))
    members = chance.whole(1, 8)
    least = chance.whole(1, max(1, members // chance.whole(1, 2)))
    lasts_s = chance.of(20.0, 60.0, 150.0)
    batch = int(chance.of(1, 5, 8, 12, 24))
    drop_last = chance.whole(0, 2) == 0
    micro_s = chance.of(0.02, 0.05, 0.3)
    faults = tuple(_small_fault(chance, lasts_s, members) for _ in range(chance.whole(0, 7)))
    per_node = chance.whole(1, 2)
    nodes = max(1, -(-members // per_node) + chance.whole(-1, 1))
    nodes = max(nodes, -(-least // per_node))
    return Scenario(
        seed=seed,
        members=members,
        least=least,
        samples=chance.whole(batch if drop_last else 1, 90),
        global_batch=batch,
        micro_batch=int(chance.of(1, 1, 3)),
        drop_last=drop_last,
        shares="auto" if chance.whole(0, 3) else "equal",
        steps=None if chance.whole(0, 1) else int(chance.of(1, 7, 40, 150, 400)),
        lasts_s=lasts_s,
        every_steps=_EVERY_STEPS[chance.whole(0, len(_EVERY_STEPS) - 1)],
        faults=tuple(sorted([*faults, *_close_by(chance, faults, members)])),
        speeds=tuple(micro_s * chance.of(1.0, 1.2, 3.0) for _ in range(3)),
        exchange_s=chance.of(0.01, 0.1, 0.5),
        per_node=per_node,
        nodes=nodes,
        there=chance.whole(-(-least // per_node), nodes),
        zones=chance.whole(1, 3),
        delay_s=chance.of(0.0, 0.1, 0.5, 2.0),
        build_s=chance.of(0.5, 4.0, 15.0),
        stillborn=chance.of(0.0, 0.0, 0.3),
        report_s=chance.of(0.4, 1.0),
        awake_s=chance.of(math.inf, math.inf, 5.0),
        silence_s=chance.of(60.0, 600.0),
    )


def _small_fault(chance: _Chance, lasts_s: float, members: int) -> Fault:
    kinds = list(Kind)
    kind = kinds[chance.whole(0, len(kinds) - 1)]
    if kind in {Kind.FAIL, Kind.STOP, Kind.FULL, Kind.GROW} and chance.whole(0, 2):
        kind = Kind.DIE
    most = chance.of(3.0, 20.0, 90.0) if kind is not Kind.JUMP else 900.0
    at_s = chance.between(0.0, lasts_s)
    many = chance.whole(1, max(1, members // 2))
    return Fault(at_s=at_s, kind=kind, many=many, lasts_s=chance.between(0.1, most))


def _close_by(chance: _Chance, faults: tuple[Fault, ...], members: int) -> list[Fault]:
    """More that happens within moments of what happens anyway."""
    more = []
    for fault in faults:
        if chance.between(0, 1) < _TOGETHER:
            at_s = fault.at_s + chance.between(0.0, 3.0)
            kind = (Kind.DIE, Kind.BREAK, Kind.FREEZE, Kind.LEAVE)[chance.whole(0, 3)]
            lasts_s = chance.between(0.1, 20.0)
            more.append(Fault(at_s=at_s, kind=kind, lasts_s=lasts_s, many=1 + members // 4))
    return more
