"""Replanning: a better plan is adopted where it gains more than the change to it costs.

    gain of each step * steps left > cost of the change        (and the gain is no odd moment's)

Steps that are left are the whole of what a change can win back; a change costs what members stand
still for it, and what they measure it by. Where it is not known how many steps are left, a change
is taken to be worth it. The gain has to be a part of a step, too: medians of twenty steps differ by
some percent of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Plan = TypeVar("Plan")

LEAST_GAIN = 0.03  # of a step's seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(Generic[Plan]):
    """What to go on with, and why.

    Attributes:
        plan: That is.
        changes: It is another one than before.
        gain_s: Seconds that it saves, of all steps left and without the cost; infinite where
            nobody knows how many these are.
    """

    plan: Plan
    changes: bool
    gain_s: float
    why: str


def decide(
    now: Plan, step_s: Mapping[Plan, float], *, left: int | None, cost_s: float
) -> Decision[Plan]:
    """Stay with a plan, or change to the fastest.

    Args:
        now: What is in force.
        step_s: By plan, the seconds of a step. What is in force is among them.
        left: Steps to come; None: it is not known.
        cost_s: What a change costs.

    >>> decide("a", {"a": 1.0, "b": 0.8}, left=100, cost_s=2.0).why
    'b takes 0.8 s a step in place of 1: 20 s of the 100 steps left, for a change of 2 s'
    >>> decide("a", {"a": 1.0, "b": 0.8}, left=9, cost_s=2.0).plan
    'a'
    """
    best = min(step_s, key=lambda plan: (step_s[plan], plan != now))
    each_s = step_s[now] - step_s[best]
    if best == now:
        why = f"nothing is faster than {now}, of {step_s[now]:.3g} s a step"
        return Decision(plan=now, changes=False, gain_s=0.0, why=why)
    steps = "all" if left is None else f"the {left}"
    gain_s = float("inf") if left is None else each_s * left
    saved = f"{each_s:.2g} s of each step" if left is None else f"{gain_s:.2g} s"
    why = (
        f"{best} takes {step_s[best]:.3g} s a step in place of {step_s[now]:.3g}: {saved} of "
        f"{steps} steps left, for a change of {cost_s:.2g} s"
    )
    if each_s < LEAST_GAIN * step_s[now]:
        return Decision(plan=now, changes=False, gain_s=gain_s, why=f"{why}: too little to tell")
    if gain_s <= cost_s:
        return Decision(plan=now, changes=False, gain_s=gain_s, why=f"{why}: not worth it")
    return Decision(plan=best, changes=True, gain_s=gain_s, why=why)
