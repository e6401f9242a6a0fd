"""Heartbeats: who answers calls, and who does not: a process that is frozen or cut off.

A phi accrual failure detector: how late a member answers, and how unlikely it is that it still
will. Source: Hayashibara, Defago, Yared, Katayama, "The phi accrual failure detector", SRDS 2004,
with a mean and a variance that forget (West 1979) in place of a window.

Where the driver also asks the members' machines (see `net.heartbeat`), one that is gone is known to
be so long before an answer of its process is missing.

Seconds are those of one clock, the driver's. Nothing that the driver has not looked at counts as
missing, and after a while in which it heard nobody, all have their time again: it was rather the
driver that was cut off, or stood still.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_FORGETS = 1 / 32  # the weight of the newest answer
_FIRST_STD_S = 0.3  # before much is known
_LEAST_STD_S = 0.1
_NEVER = float("-inf")
_UNREAD_S = 0.25  # an answer that came so soon after the last packet was on its way before
_JUST_S = 0.1  # ... but for so long after any answer nobody is cut off
_SURE = 8.0  # phi: one such answer in a hundred million would still have come


class Behind(NamedTuple):
    """What a member says of a share that takes far longer than usual.

    Attributes:
        micro_batches: Of the share.
        seconds: That it is likely to take.
        rest_s: Of a round: that all shares are likely to take that follow it; 0.0: none do.
        usual_s: That those would take at the usual pace.
    """

    micro_batches: int
    seconds: float
    rest_s: float = 0.0
    usual_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What the driver has heard since it last looked.

    Attributes:
        looked_s: When it looked.
        late_s: By member that has answered since: how much later than due, at least.
        due_s: By member: until when it is, or was, to answer the call that was made last.
        still_s: By member that stands still in the midst of computing: for how long, as it says.
        behind: By member that computes a share that takes far longer than usual: what it says.
        cut_s: By member whose machine acknowledges nothing any more: for how long.
        reached: Members whose machines do.
    """

    looked_s: float
    late_s: Mapping[int, float] = field(default_factory=dict)
    due_s: Mapping[int, float] = field(default_factory=dict)
    still_s: Mapping[int, float] = field(default_factory=dict)
    behind: Mapping[int, Behind] = field(default_factory=dict)
    cut_s: Mapping[int, float] = field(default_factory=dict)
    reached: frozenset[int] = frozenset()


class Heartbeats:
    """Follows the answers of all members, in arrays: thousands answer each second.

    >>> heartbeats = Heartbeats(patience_s=1.0)
    >>> for second in range(99):
    ...     _ = heartbeats.hear(Heard(looked_s=float(second), late_s={3: 0.0, 7: 2.0}))
    >>> heartbeats.phi(7, 2.0) < 1 < 8 < heartbeats.phi(3, 2.0)
    True
    >>> _ = heartbeats.hear(Heard(looked_s=99.0, late_s={7: 2.0}))
    >>> heartbeats.heard_since(98.0, (3, 7))
    1

    Args:
        patience_s: An answer that is less late than this is never missing. As long a silence of
            all is the driver's own.

    Attributes:
        still_s: See `Heard`.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.still_s: Mapping[int, float] = {}
        self._due_s: Mapping[int, float] = {}
        self._cut_s: Mapping[int, float] = {}
        self._reached: frozenset[int] = frozenset()
        self._looked_s = self._last_s = _NEVER  # ... and when any answer came
        self._since_s = _NEVER  # from when on answers come in
        # By member: how late its answers are, a mean and a variance, and when the last one came.
        self._mean_s: npt.NDArray[np.float64] = np.zeros(0)
        self._variance: npt.NDArray[np.float64] = np.zeros(0)
        self._heard_s: npt.NDArray[np.float64] = np.zeros(0)

    def hear(self, heard: Heard) -> float:
        """Take in who has answered; returns the seconds that the driver itself stood still."""
        stood_still = heard.looked_s - self._looked_s > self.patience_s
        if stood_still or (heard.late_s and heard.looked_s - self._last_s > self.patience_s):
            self._since_s = heard.looked_s
        own_s = heard.looked_s - self._since_s  # the rest is the driver's
        at = self._at(heard.late_s)
        late = np.minimum(np.fromiter(heard.late_s.values(), np.float64, len(at)), own_s)
        mean_s = self._mean_s[at]
        off = late - mean_s
        self._heard_s[at] = heard.looked_s
        self._mean_s[at] = mean_s + _FORGETS * off
        self._variance[at] = (1 - _FORGETS) * (self._variance[at] + _FORGETS * off * off)
        self._last_s = heard.looked_s if heard.late_s else self._last_s
        still_s = heard.looked_s - self._looked_s if stood_still else 0.0
        self._looked_s, self._due_s = heard.looked_s, heard.due_s
        self.still_s = heard.still_s
        self._cut_s, self._reached = heard.cut_s, heard.reached
        return still_s if still_s < math.inf else 0.0

    def begin(self, members: Collection[int]) -> None:
        """They are ready, or compute from now on; how late they were before that tells nothing."""
        at = self._at(members)
        self._mean_s[at], self._variance[at] = 0.0, _FIRST_STD_S**2

    def phi(self, member: int, late_s: float) -> float:
        """-log10 of the chance that an answer which is this late by now is still on its way."""
        [at] = self._at((member,))
        std_s = max(_LEAST_STD_S, math.sqrt(self._variance[at]))
        chance = 0.5 * math.erfc((late_s - self._mean_s[at]) / (std_s * math.sqrt(2.0)))
        return -math.log10(chance) if chance > 0.0 else math.inf

    def late(self) -> frozenset[int]:
        """Members of which an answer is overdue for so long that it may be missing, or cut off."""
        cut = frozenset(filter(self.cut_off, self._cut_s))
        looked_s, since_s, patience_s = self._looked_s, self._since_s, self.patience_s
        first_s = min(self._due_s.values(), default=looked_s)
        if looked_s - max(first_s, since_s) < patience_s:
            return cut
        return cut.union(
            member
            for member, due_s in self._due_s.items()
            if looked_s - (due_s if due_s > since_s else since_s) >= patience_s
        )

    def cut_off(self, member: int) -> bool:
        """Whether nothing was heard of this machine, and nothing of its process meanwhile."""
        return self.cut_off_s(member) is not None

    def cut_off_s(self, member: int) -> float | None:
        """For how many seconds it is cut off; None: it is not."""
        cut_s = self._cut_s.get(member)
        if cut_s is None:
            return None
        unread_s = min(self._looked_s - cut_s + _UNREAD_S, self._looked_s - _JUST_S)
        return None if self._heard_at(member) >= unread_s else cut_s

    def missing_s(self, member: int, others: Collection[int]) -> float | None:
        """How many seconds an answer is overdue that will not come any more; None: it may.

        Args:
            member: Whose.
            others: Of whom at least one other is heard meanwhile.
        """
        due_s = max(self._due_s.get(member, self._looked_s), self._since_s)
        late_s = self._looked_s - due_s
        if not late_s >= self.patience_s or self.phi(member, late_s) < _SURE:
            return None
        heard = any(self._heard_at(m) >= due_s for m in others if m != member)
        return late_s if heard else None

    def heard_since(self, since_s: float, members: Collection[int]) -> int:
        """How many of `members` have answered after `since_s`."""
        at = self._at(members)  # there may be more from now on
        return int((self._heard_s[at] > since_s).sum())

    def reached(self, members: Collection[int]) -> int:
        """How many of `members` have machines that answer."""
        return sum(member in self._reached for member in members)

    def _heard_at(self, member: int) -> float:
        return float(self._heard_s[member]) if member < len(self._heard_s) else _NEVER

    def _at(self, members: Collection[int]) -> npt.NDArray[np.intp]:
        """Their places in the arrays; there are some for all."""
        at = np.fromiter(members, np.intp, len(members))
        known = len(self._mean_s)
        if (lacking := int(at.max(initial=-1)) + 1 - known) > 0:
            more = np.zeros(max(lacking, known))
            self._mean_s = np.append(self._mean_s, more)
            self._variance = np.append(self._variance, more + _FIRST_STD_S**2)
            self._heard_s = np.append(self._heard_s, more + _NEVER)
        return at
