"""How long each thing that was done to the nodes held the training up. Pure.

All times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.racing.capacity import Change
    from benchmarks.racing.commits import Commit

_HELD_UP_STEPS = 3  # normal steps without a commit after which the training is held up
_FEW = 3  # fewer steps than these say nothing of what is normal
_RELIEFS = frozenset({"thaw", "mend", "add"})

Gap = tuple[float, float]  # a commit, and the next one


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that was done to the nodes.

    Attributes:
        t_s: When it was done.
        what: In words, such as "kill-process n1"; ", " joins what was done at once.
    """

    t_s: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Pause:
    """How long a fault held the training up; None, and why, where it never went on."""

    pause_s: float | None
    reason: str = ""


def relieves(fault: Fault, changes: Sequence[Change]) -> bool:
    """Whether it only gives nodes back what was taken from them, or brings new ones.

    A `throttle` does where the node is faster after it. A `rate` counts as a fault.

    Args:
        fault: What was done.
        changes: From when on which node had how much of its speed.
    """
    return all(_gives(one, fault.t_s, changes) for one in fault.what.split(", "))


def _gives(what: str, t_s: float, changes: Sequence[Change]) -> bool:
    action, _, rest = what.partition(" ")
    if action != "throttle":
        return action in _RELIEFS
    node = rest.partition(" ")[0]
    mine = sorted((c for c in changes if c.node == node), key=lambda change: change.t_s)
    before = [change.part for change in mine if change.t_s < t_s]
    after = [change.part for change in mine if change.t_s <= t_s]
    return bool(before) and after[-1] > before[-1]


def pauses(
    noted: Sequence[Commit],
    faults_s: Sequence[float],
    end_s: float,
    reliefs: Sequence[bool] = (),
) -> tuple[Pause, ...]:
    """One pause per fault.

    It is the longest gap between two commits that is the fault's, minus the median step at the new
    capacity: the steps that lie between that gap and the next fault, or, where there is none, all
    steps after the gap, or else all steps. Never below 0.

    A gap is a fault's where the fault fell in it, or where it begins between that fault and the
    next one (the last one's: `end_s`) and either ends before the next one or has lasted more than 3
    normal steps by then: a gap that the next fault makes is not this one's. One in which two faults
    fell is both faults' pause, and one during which no node was there holds that time too. A gap
    that is already an earlier fault's is not a relief's as well: a relief in whose time there is
    nothing else has a pause of 0. Commits that were lost later count here: that is another measure.

    Where nothing is committed after some second before `end_s`, the time from there to `end_s` is a
    gap without an end. If it is a fault's, longer than any other of that fault and than 3 normal
    steps, then the fault has no pause but a reason.

    Args:
        noted: All commits, by time.
        faults_s: When the faults and the reliefs happened, by time.
        end_s: End of the window.
        reliefs: Which of them are reliefs; empty: none is.
    """
    if not noted:
        return tuple(Pause(pause_s=None, reason="nothing was committed") for _ in faults_s)
    gaps = [(a.t_s, b.t_s) for a, b in pairwise(noted)]
    endless = (noted[-1].t_s, end_s) if noted[-1].t_s < end_s else None
    every = [gap for gap in (*gaps, endless) if gap is not None and gap[0] < end_s]
    found: list[Pause] = []
    taken: set[Gap] = set()
    for i, fault_s in enumerate(faults_s):
        next_s = faults_s[i + 1] if i + 1 < len(faults_s) else math.inf
        step_s = _usual_step_s(gaps, fault_s, next_s)
        mine = [gap for gap in every if _is_of(gap, fault_s, next_s, step_s)]
        own = mine
        if reliefs and reliefs[i]:
            own = [gap for gap in mine if gap not in taken]
        else:
            taken.update(mine)
        if mine and not own:
            found.append(Pause(pause_s=0.0))
            continue
        closed = [gap for gap in own if gap is not endless]
        longest = max(closed, key=_length_s, default=None)
        open_s = _length_s(endless) if endless is not None and endless in own else 0.0
        if open_s > _HELD_UP_STEPS * step_s and (longest is None or open_s > _length_s(longest)):
            found.append(Pause(pause_s=None, reason=f"no update for {open_s:.0f} s until the end"))
        elif longest is None:
            found.append(Pause(pause_s=None, reason="no update was committed after it"))
        else:
            normal_s = _normal_step_s(gaps, longest, min(next_s, end_s))
            found.append(Pause(pause_s=max(0.0, _length_s(longest) - normal_s)))
    return tuple(found)


def _is_of(gap: Gap, fault_s: float, next_s: float, step_s: float) -> bool:
    """Whether a gap is that of a fault, wherever the next one falls."""
    begin_s, end_s = gap
    if end_s <= fault_s or begin_s >= next_s:
        return False
    held_up = next_s - begin_s > _HELD_UP_STEPS * step_s
    return begin_s <= fault_s or end_s <= next_s or held_up


def _usual_step_s(gaps: Sequence[Gap], from_s: float, until_s: float) -> float:
    """Median step of that time, of the whole run where it has too few; 0 where there is none."""
    inside = [gap for gap in gaps if from_s <= gap[0] and gap[1] <= until_s]
    steps = inside if len(inside) >= _FEW else gaps
    return median(map(_length_s, steps)) if steps else 0.0


def _normal_step_s(gaps: Sequence[Gap], longest: Gap, before_s: float) -> float:
    """Median step at the capacity after the longest gap."""
    after = [gap for gap in gaps if gap[0] >= longest[1]]
    settled = [gap for gap in after if gap[1] <= before_s]
    return median(map(_length_s, settled or after or gaps))


def _length_s(gap: Gap) -> float:
    return gap[1] - gap[0]
