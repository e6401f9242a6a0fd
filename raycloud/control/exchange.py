"""What the exchange of gradients costs, by what members report; told once where it is much."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.events import Noticed
from raycloud.spec.sizes import coded_bytes
from raycloud.sync.period import HARDLY

if TYPE_CHECKING:
    from raycloud.events import StepsCommitted

_MUCH = 0.15  # of a step
_MANY = 64  # members, of whom it looks at all only once in as many reports
_STEPS = 20  # that each member has reported: the first ones measure the start
_SKIPPED = 5
_AUTO = "int4"  # what `sync: auto` takes


@dataclass(slots=True)
class _Waited:
    """One member's sums over some steps of a generation."""

    generation: int
    skipped: int = 0
    steps: int = 0
    wall_s: float = 0.0
    exchange_s: float = 0.0
    overlap_s: float = 0.0


class ExchangeCost:
    """Who waits least for an exchange is who comes last to it: that is what it costs, and no more.

    Args:
        exact: Nothing is encoded, so there is something to gain.
        auto_period: Steps of the longest round that could be chosen.
    """

    def __init__(self, *, exact: bool, auto_period: int = 1) -> None:
        self._told, self._period = not exact, auto_period
        self._waited: dict[int, _Waited] = {}
        self._residuals: dict[int, float] = {}
        self._left = 0  # reports until it looks at many members again

    def observe(self, report: StepsCommitted) -> None:
        """Take in a member's report."""
        self._residuals[report.member] = report.residual
        self._left -= 1
        known = self._waited.get(report.member)
        if self._told:
            return
        if known is None or known.generation != report.generation:
            known = self._waited[report.member] = _Waited(generation=report.generation)
        steps = report.last_step - report.first_step
        if known.skipped < _SKIPPED:
            known.skipped += steps
            return
        known.steps += steps
        known.wall_s += report.wall_s
        known.exchange_s += report.exchange_s
        known.overlap_s += report.overlap_s

    def lost(self, member: int) -> Noticed | None:
        """What is lost with a member of what encoding had lost of its gradients; None: nothing."""
        self._waited.pop(member, None)
        norm = self._residuals.pop(member, 0.0)
        if norm == 0.0:
            return None
        what = "what it had kept of its gradients for the next step is lost with it"
        return Noticed(what=what, member=member, detail={"norm": float(f"{norm:.3g}")})

    def notice(self, group: Collection[int]) -> Noticed | None:
        """What a person should know of it, once; None: nothing."""
        if self._told or len(group) == 1 or self._left > 0:
            return None
        self._left = len(group) if len(group) > _MANY else 0
        every = [self._waited.get(member) for member in group]
        known = [one for one in every if one is not None and one.steps >= _STEPS]
        if len(known) < len(group) or len({one.generation for one in known}) > 1:
            return None
        last = min(known, key=lambda one: one.exchange_s / one.steps)
        share = last.exchange_s / last.wall_s if last.wall_s > 0.0 else 0.0
        if share <= _MUCH:
            return None
        self._told = True
        step_s = last.wall_s / last.steps
        return Noticed(
            what=f"the exchange of gradients takes {share:.0%} of a step",
            detail={
                "step_s": round(step_s, 4),
                "with `--set sync=auto`": f"about {_predicted_s(last, self._period):.2g} s a step",
            },
        )


def _predicted_s(waited: _Waited, period: int) -> float:
    """Of a step by `sync: auto`: the same computing, and fewer bytes behind what hides them.

    Or, where that leaves more than it allows, in the longest rounds.
    """
    exposed_s, overlap_s = waited.exchange_s / waited.steps, waited.overlap_s / waited.steps
    coded = coded_bytes(10**6, _AUTO) / 10**6 * (exposed_s + overlap_s)
    computing_s = waited.wall_s / waited.steps - exposed_s
    left_s = max(0.0, coded - overlap_s)
    if left_s > HARDLY * (computing_s + left_s):
        left_s = min(left_s, coded / period)
    return computing_s + left_s
