"""Predictions of a run beside what came true: its steps, time, bytes, money and energy.

What a run is to take from its command to its last step is what it had taken when the prediction
was made, and so many more steps as predicted:

    total = so far + steps left * of each step

Its interval is that of a step. Saving, measuring held-out samples and changes of workers are in
what is measured, and in no prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raycloud.report.figures import byte_count, duration, figure

if TYPE_CHECKING:
    from raycloud.report.state import Expected, Session, Tally

_HOUR_S = 3600.0
_BYTES_OFF = (0.98, 1.05)  # flags, the control lane's part, state for newcomers


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One quantity of a run: as predicted, and as measured.

    Attributes:
        name: `step_s`, `job_s`, `bytes_sent`, `cost` or `energy_j`.
        predicted: As predicted last; None: it was not.
        low: It is likely from here.
        high: To here.
        first: As predicted before the first step of this start.
        measured: So far, or to the end: `job_s` in this start of the run, what adds up in all of
            them; None: it is not known yet.
        estimated: `measured` is the processors' utilization times the watts of the nodes' labels,
            at least in part: not all have meters that can be read.
        goes_on: `measured` adds up, and the run has not come to its end.
    """

    name: str
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    first: float | None = None
    measured: float | None = None
    estimated: bool = False
    goes_on: bool = False

    @property
    def off(self) -> float | None:
        """By which part of the prediction it was more; None: that is not known, or not yet."""
        if self.measured is None or not self.predicted or self.goes_on:
            return None
        return self.measured / self.predicted - 1.0

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        told = asdict(self)
        if not self.goes_on:
            del told["goes_on"]
        return told

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Compared:
        """The inverse of `to_record`; `TypeError`: it is none."""
        return cls(**record)

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Label, predicted, measured, and how sure that was, for people."""
        label, told = _TOLD[self.name]
        notes = [] if self.off is None else [f"{100 * self.off:+.0f}%"]
        if self.low is not None and self.high is not None:
            notes.append(f"likely {told(self.low)} to {told(self.high)}")
        if self.first is not None and self.first != self.predicted:
            notes.append(f"before the start {told(self.first)}")
        if self.estimated:
            notes.append("an estimate: utilization times the nodes' watts")
        known = [told(x) if x is not None else "-" for x in (self.predicted, self.measured)]
        return label, known[0], known[1], ", ".join(notes)


def _joules(joules: float) -> str:
    return f"{figure(joules)} J" if joules < 1e6 else f"{figure(joules / 3.6e6)} kWh"  # noqa: PLR2004 - where a figure changes its form


_TOLD: dict[str, tuple[str, Any]] = {
    "step_s": ("seconds per step", figure),
    "job_s": ("from command to last step", duration),
    "bytes_sent": ("bytes over links", byte_count),
    "cost": ("cost", figure),
    "energy_j": ("energy", _joules),
}


def compared(
    tally: Tally, step_s: float | None, cost: float | None, now_t: float | None = None
) -> list[Compared]:
    """Each quantity of a run that was predicted or measured.

    Args:
        tally: What has happened.
        step_s: Seconds of a step, as measured.
        cost: Of the nodes, as measured.
        now_t: The present, for a run that goes on; None: its last event.
    """
    session = tally.session
    if session is None:
        return []
    first, last = (_totals(one, tally, session) for one in _ends(tally.expected))
    ended_t = session.last[0] if session.last is not None else session.started_t
    until_t = now_t if now_t is not None and tally.status == "unfinished" else ended_t
    spent = tally.spent
    measured: dict[str, float | None] = {
        "step_s": step_s,
        "job_s": max(0.0, until_t - session.started_t) if tally.steps else None,
        "bytes_sent": float(spent.bytes_sent) if tally.steps else None,
        "cost": cost,
        "energy_j": spent.energy_j or None,
    }
    found = []
    for name, value in measured.items():
        predicted, low, high = last.get(name, (None, None, None))
        if predicted is None and value is None:
            continue
        found.append(
            Compared(
                name=name,
                predicted=predicted,
                low=low,
                high=high,
                first=first.get(name, (None,))[0],
                measured=value,
                estimated=name == "energy_j" and spent.metered_j < spent.energy_j,
                goes_on=name != "step_s" and tally.status == "unfinished",
            )
        )
    return found


def _ends(expected: list[Expected]) -> tuple[Expected | None, Expected | None]:
    return (expected[0], expected[-1]) if expected else (None, None)


Totals = dict[str, tuple[float, float, float]]


def _totals(expected: Expected | None, tally: Tally, session: Session) -> Totals:
    """What a whole start takes by a prediction: value, low, high."""
    if expected is None:
        return {}
    said, t = expected.said, expected.t
    steps_s = (said.step_s, said.low_s or said.step_s, said.high_s or said.step_s)

    def whole(so_far: float, each: tuple[float, ...]) -> tuple[float, float, float]:
        value, low, high = (so_far + said.left * one for one in each)
        return value, low, high

    sent = (1.0, *_BYTES_OFF)
    found: Totals = {
        "step_s": (steps_s[0], steps_s[1], steps_s[2]),
        "job_s": whole(max(0.0, t - session.started_t), steps_s),
        "bytes_sent": whole(expected.bytes_sent, tuple(said.sent_bytes * by for by in sent)),
    }
    if (price := said.price_per_hour) is not None:
        per_s = price / _HOUR_S
        found["cost"] = whole(_cost_at(tally, t), tuple(per_s * one for one in steps_s))
    if (watts := said.watts) is not None:
        found["energy_j"] = whole(expected.energy_j, tuple(watts * one for one in steps_s))
    return found


def _cost_at(tally: Tally, t: float) -> float:
    """What nodes with a price had cost at `t`, in all sessions."""
    return sum(
        price * max(0.0, min(t, one.ended_t or t) - since_t) / _HOUR_S
        for one in tally.sessions
        for since_t, price in one.nodes.values()
        if price is not None
    )
