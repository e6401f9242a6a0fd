"""Figures that follow from a tally: how fast, and how good."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycloud.report.tally import Tally

_RECENT_S = 15.0
_FINAL_STEPS = 10


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
