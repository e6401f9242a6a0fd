"""What the nodes that were there could compute: at first, and while they change. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Change:
    """From `t_s` on a node has a part of the speed that was measured.

    Attributes:
        t_s: Since when.
        node: Which.
        part: Of its speed: 1 as measured, 0 while it is gone or frozen.
    """

    t_s: float
    node: str
    part: float


def first_rate(speeds: Mapping[str, float], changes: Sequence[Change], start_s: float) -> float:
    """Samples per second that the nodes there at `start_s` could compute without exchange.

    >>> there = [Change(t_s=0, node="n1", part=1), Change(t_s=5, node="n2", part=1)]
    >>> first_rate({"n1": 10.0, "n2": 20.0}, there, 0)
    10.0

    Args:
        speeds: Samples per second of each node alone with its quota on.
        changes: What happened to the nodes.
        start_s: At that second.

    Raises:
        ValueError: A node has no measured speed.
    """
    before = sorted((c for c in changes if c.t_s <= start_s), key=lambda change: change.t_s)
    parts = {change.node: change.part for change in before}
    return sum(_speed(speeds, node) * part for node, part in sorted(parts.items()))


def mean_rate(
    speeds: Mapping[str, float], changes: Sequence[Change], start_s: float, end_s: float
) -> float:
    """Mean samples per second that the nodes could compute without exchange over [start_s, end_s].

    A node counts from its first change on; between two changes its part is constant. Its speed is
    linear in its quota. One whose link is cut computes on, so it counts.

    >>> speeds = {"n1": 10.0, "n2": 10.0}
    >>> there = [Change(t_s=0, node="n1", part=1), Change(t_s=0, node="n2", part=1)]
    >>> mean_rate(speeds, [*there, Change(t_s=5, node="n2", part=0)], 0, 10)
    15.0

    Args:
        speeds: Samples per second of each node alone with its quota on.
        changes: What happened to the nodes.
        start_s: First second.
        end_s: Last one.

    Raises:
        ValueError: A node has no measured speed, or the time is empty.
    """
    if end_s <= start_s:
        raise ValueError(f"no time between {start_s} and {end_s}")
    total = 0.0
    for node in sorted({change.node for change in changes}):
        speed = _speed(speeds, node)
        mine = sorted((c for c in changes if c.node == node), key=lambda change: change.t_s)
        for i, change in enumerate(mine):
            until_s = mine[i + 1].t_s if i + 1 < len(mine) else end_s
            inside_s = min(until_s, end_s) - max(change.t_s, start_s)
            total += speed * change.part * max(0.0, inside_s)
    return total / (end_s - start_s)


def _speed(speeds: Mapping[str, float], node: str) -> float:
    if node not in speeds:
        raise ValueError(f"node {node} was not measured alone; run the limit again")
    return speeds[node]
