"""Figures that follow from a tally: how fast, and how good."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.report.tally import Tally

_RECENT_S = 15.0
_FINAL_STEPS = 10
_HOUR_S = 3600.0


def final_loss(tally: Tally) -> float | None:
    """Weighted mean loss over the last reports that hold at least ten steps between them.

    A member knows the loss of a step when the next one is under way, so its first report may have
    none (not a number): it is left out.
    """
    steps, total, weight = 0, 0.0, 0.0
    for point in reversed(tally.points):
        if math.isnan(point.loss):
            continue
        steps += point.steps
        total += point.loss * point.weight
        weight += point.weight
        if steps >= _FINAL_STEPS:
            break
    return total / weight if weight else None


def recent(tally: Tally) -> tuple[float, float] | None:
    """(steps, samples) per second over the last quarter of a minute of this session."""
    if tally.session is None or tally.session.first is None or not tally.points:
        return None
    last = tally.points[-1]
    since = max(last.t - _RECENT_S, tally.session.first[0])
    at = bisect_left(tally.points, since, key=lambda point: point.t)
    first = tally.points[min(at, len(tally.points) - 1)]
    seconds = last.t - first.t
    if seconds <= 0:
        return None
    return (last.step - first.step) / seconds, (last.samples - first.samples) / seconds


def train_s(tally: Tally) -> float:
    """Seconds from the first report of committed steps to the last, added up over sessions."""
    return sum(s.last[0] - s.first[0] for s in tally.sessions if s.first and s.last)


def step_s(tally: Tally) -> float | None:
    """Seconds per step within `train_s`."""
    gained = sum(s.last[1] - s.first[1] for s in tally.sessions if s.first and s.last)
    return train_s(tally) / gained if gained else None


def samples_per_s(tally: Tally) -> float | None:
    """Samples committed in `train_s`, so without those of each session's first report.

    Of a run so short that it made one report only: its samples over its steps' own seconds.
    """
    seconds = train_s(tally)
    if seconds > 0:
        gained = sum(s.last[2] - s.first[2] for s in tally.sessions if s.first and s.last)
        return gained / seconds
    samples, wall_s = tally.lead_steps
    return samples / wall_s if wall_s > 0 else None


def rate_curve(tally: Tally, places: int) -> list[list[float | None]]:
    """[step, samples per second up to it] at up to `places` places.

    A pause between two sessions is left out. A place that holds nothing but one, or whose reports
    came at one moment, has None.
    """
    starts = [session.started_t for session in tally.sessions]
    ends: list[int] = []
    gained: list[tuple[float, int]] = []  # seconds and samples from one report to the next
    for a, b in pairwise(tally.points):
        paused = bisect_left(starts, a.t) != bisect_left(starts, b.t)
        ends.append(b.step)
        gained.append((0.0, 0) if paused else (b.t - a.t, b.samples - a.samples))
    places = min(places, len(ends))
    curve: list[list[float | None]] = []
    for place in range(places):
        first, past = place * len(ends) // places, (place + 1) * len(ends) // places
        seconds = sum(s for s, _ in gained[first:past])
        samples = sum(n for _, n in gained[first:past])
        curve.append([ends[past - 1], samples / seconds if seconds > 0 else None])
    return curve


def cost(tally: Tally, now_t: float | None = None) -> float | None:
    """What the nodes of the run cost, in the currency of their labels; None: none has a price.

    Each node counts once in a session, from its first member's readiness to the session's end:
    what is lost or idle then is still paid for. Nodes without a price are left out.

    Args:
        tally: What has happened.
        now_t: The present, for a session that goes on; None: its last event.
    """
    total, priced = 0.0, False
    for session in tally.sessions:
        goes_on = session is tally.session and tally.status == "unfinished"
        last_t = session.ended_t or session.started_t
        end_t = now_t if goes_on and now_t is not None else last_t
        for since_t, price_per_hour in session.nodes.values():
            if price_per_hour is not None:
                total += price_per_hour * max(0.0, end_t - since_t) / _HOUR_S
                priced = True
    return total if priced else None


def nodes(tally: Tally) -> tuple[int, int]:
    """Of how many nodes the price is known, and how many there were, in all sessions."""
    known: dict[str, bool] = {}
    for session in tally.sessions:
        for node, (_, price_per_hour) in session.nodes.items():
            known[node] = known.get(node, False) or price_per_hour is not None
    return sum(known.values()), len(known)
