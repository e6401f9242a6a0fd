"""Adds up committed steps into reports, a few a second instead of one a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raycloud.events import StepsCommitted

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.order import Position, Skip
    from raycloud.step.collate import StepWork
    from raycloud.sync.gradients import Exchanged


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one committed step adds. Seconds and bytes are this member's own.

    Of a step that broke here, while others committed it, the exchange is not known. `computed` and
    `rows` are of all members: see `StepsCommitted` and `dealing`.
    """

    step: int
    generation: int
    after: Position
    weight: float
    samples: int
    micro_batches: int
    learning_rate: float
    compute_s: float
    data_s: float
    computed: int = 0
    rows: int = 0
    read_s: float = 0.0
    collate_s: float = 0.0
    norm: float = float("nan")
    exchange_s: float = 0.0
    lane_s: float = 0.0
    bytes_sent: int = 0
    bytes_dense: int = 0
    bytes_last: int = 0
    skips: tuple[Skip, ...] = ()


def exchanged(counted: Counted, found: Exchanged, lane_s: float) -> Counted:
    """What its exchange adds to a step, with the seconds waited for the control lane."""
    return replace(
        counted,
        norm=found.norm,
        exchange_s=found.exchange_s + lane_s,
        lane_s=lane_s,
        bytes_sent=found.bytes_sent,
        bytes_last=found.bytes_last,
    )


def counted(work: StepWork, **told: Any) -> Counted:
    """What a step adds of which this member computed `work`; `told` is what that cannot say."""
    return Counted(
        step=work.span.step,
        samples=work.span.samples,
        micro_batches=work.micro_batches,
        read_s=work.read_s,
        collate_s=work.collate_s,
        **told,
    )


class Tally:
    """Committed steps since the last report.

    A step's loss is known one step later than its commit, so a report's loss is the mean over those
    steps whose losses became known since the last report.
    """

    def __init__(self, *, member: int, clock: Clock) -> None:
        """Nothing is counted yet; wall time starts now."""
        self._member = member
        self._clock = clock
        self._steps: list[Counted] = []
        self._losses: list[tuple[float, float]] = []
        self._loss = float("nan")
        self.begin()

    def begin(self) -> None:
        """Seconds count from now on."""
        self._since_s, self._cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()

    @property
    def age_s(self) -> float:
        """Seconds since the last report."""
        return self._clock.monotonic_s() - self._since_s

    def add(self, counted: Counted) -> None:
        """Count a committed step."""
        self._steps.append(counted)

    def add_loss(self, mean: float, weight: float) -> None:
        """The mean loss of a step that was counted before; NaN where nobody is left to know it."""
        if not math.isnan(mean):
            self._losses.append((mean, weight))

    def report(self) -> StepsCommitted | None:
        """The steps counted since the last report; None where there are none."""
        if not self._steps:
            return None
        if self._losses:
            whole = sum(weight for _, weight in self._losses)
            self._loss = sum(mean * weight for mean, weight in self._losses) / whole
        now_s, cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
        steps, last = self._steps, self._steps[-1]
        made = StepsCommitted(
            member=self._member,
            generation=last.generation,
            first_step=steps[0].step,
            last_step=last.step + 1,
            epoch=last.after.epoch,
            offset=last.after.offset,
            loss=self._loss,
            weight=sum(s.weight for s in steps),
            samples=sum(s.samples for s in steps),
            micro_batches=sum(s.micro_batches for s in steps),
            computed=sum(s.computed for s in steps),
            grad_norm=last.norm,
            learning_rate=last.learning_rate,
            wall_s=_short(now_s - self._since_s),
            compute_s=_short(sum(s.compute_s for s in steps)),
            data_s=_short(sum(s.data_s for s in steps)),
            exchange_s=_short(sum(s.exchange_s for s in steps)),
            cpu_s=_short(cpu_s - self._cpu_s),
            bytes_sent=sum(s.bytes_sent for s in steps),
            bytes_dense=sum(s.bytes_dense for s in steps),
            read_s=_short(sum(s.read_s for s in steps)),
            collate_s=_short(sum(s.collate_s for s in steps)),
            lane_s=_short(sum(s.lane_s for s in steps)),
            bytes_last=sum(s.bytes_last for s in steps),
            skips=tuple(skip.to_record() for s in steps for skip in s.skips),
        )
        self._steps, self._losses = [], []
        self._since_s, self._cpu_s = now_s, cpu_s
        return made


def _short(seconds: float) -> float:
    """To a hundred thousandth: the log holds millions of these."""
    return round(seconds, 5)
