"""Reports of committed steps, a few a second, not one a step; and an audit of their samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycloud.errors import DealingError
from raycloud.events import StepsCommitted
from raycloud.planner.seen import weighted_median
from raycloud.step.collate import ROWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from raycloud.clock import Clock
    from raycloud.order import Position, Round, Skip, StepSpan
    from raycloud.step.collate import Collate
    from raycloud.worker.energy import Meters
    from raycloud.worker.usage import Usage

_SUMS = (
    "weight",
    "samples",
    "micro_batches",
    "computed",
    "bytes_sent",
    "bytes_dense",
    "bytes_last",
    "noise",
    "signal",
)
_SECONDS = ("compute_s", "data_s", "exchange_s", "read_s", "collate_s", "lane_s", "overlap_s")
_IN_TURN = 64  # steps
_MOST = 4096  # samples that are looked up for one report; those of one step always are


@dataclass(kw_only=True, slots=True)
class StepCount:
    """What one committed step adds, or a round of so many, `period` at most.

    Seconds and bytes are this member's own.
    Of a step that broke here, while others committed it, the exchange is not known. `computed` and
    `rows` are of all members: see `StepsCommitted` and `SampleAudit`.
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
    steps: int = 1
    period: int = 1
    computed: int = 0
    rows: int = 0
    read_s: float = 0.0
    collate_s: float = 0.0
    norm: float = float("nan")
    exchange_s: float = 0.0
    lane_s: float = 0.0
    overlap_s: float = 0.0
    bytes_sent: int = 0
    bytes_dense: int = 0
    bytes_last: int = 0
    noise: float = 0.0
    signal: float = 0.0
    skips: tuple[Skip, ...] = ()


def noise_and_signal(
    own: float, mean: float, *, part: float, samples: int, members: int
) -> tuple[float, float]:
    """A member's part of what one step tells of the gradients' noise, and of their mean.

    Gradients of single samples have the covariance C and the mean G. Of a mean over b samples the
    squared norm is expected to be |G|^2 + tr C / b. Members that have w_i of B samples each, with
    gradients g_i, and the mean g of all, so tell

        tr C = B / (N - 1) * sum_i w_i (|g_i|^2 - |g|^2),   |G|^2 = |g|^2 - tr C / B

    (after McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, appendix A.1,
    whose batches of two sizes are here those of a member and of all). tr C / |G|^2 is the gradient
    noise scale: the batch at which twice as many samples a step save half of the steps no more.

    Args:
        own: The norm of w_i g_i.
        mean: That of g.
        part: w_i.
        samples: B.
        members: N, at least 2.

    >>> [noise_and_signal(0.5 * g, 2.0, part=0.5, samples=8, members=2) for g in (3.0, 1.0)]
    [(20.0, -0.5), (-12.0, 3.5)]
    """
    noise = samples / (members - 1) * part * ((own / part) ** 2 - mean**2)
    return noise, part * mean**2 - noise / samples


class Tally:
    """Committed steps since the last report.

    A step's loss is known one step later than its commit, so a report's loss is the mean over those
    steps whose losses became known since the last report.
    """

    def __init__(
        self,
        *,
        member: int,
        clock: Clock,
        meter: Meters | None = None,
        usage: Usage | None = None,
    ) -> None:
        self._member = member
        self._clock, self._meter, self._usage = clock, meter, usage
        self._steps: list[StepCount] = []
        self._losses: list[tuple[float, float]] = []
        self._loss = float("nan")
        self._more_bytes = 0
        self._took: list[tuple[float, int]] = []  # seconds of a step, and of how many
        self.begin()

    def begin(self) -> None:
        """Seconds count from now on."""
        self._since_s, self._cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
        self._added_s = self._since_s
        if self._meter is not None:
            self._meter.joules(0.0)

    @property
    def age_s(self) -> float:
        """Seconds since the last report."""
        return self._clock.monotonic_s() - self._since_s

    def add(self, count: StepCount) -> None:
        """Count a committed step."""
        now_s = self._clock.monotonic_s()
        self._took.append(((now_s - self._added_s) / count.steps, count.steps))
        self._added_s = now_s
        self._steps.append(count)

    def add_bytes(self, sent: int) -> None:
        """So many bytes were sent between steps: they count in the next report."""
        self._more_bytes += sent

    def add_loss(self, mean: float, weight: float) -> None:
        """The mean loss of a step that was counted before; NaN where nobody is left to know it."""
        if not math.isnan(mean):
            self._losses.append((mean, weight))

    def report(self, residual: Callable[[], float] = lambda: 0.0) -> StepsCommitted | None:
        """The steps counted since the last report; None where there are none.

        `residual` computes the norm of what is kept for the next one.
        """
        if not self._steps:
            return None
        if self._losses:
            whole = sum(weight for _, weight in self._losses)
            self._loss = sum(mean * weight for mean, weight in self._losses) / whole
        now_s, cpu_s = self._clock.monotonic_s(), self._clock.cpu_s()
        steps, last, used_s = self._steps, self._steps[-1], cpu_s - self._cpu_s
        sums: dict[str, Any] = {name: sum(getattr(s, name) for s in steps) for name in _SUMS}
        sums |= {name: _short(sum(getattr(s, name) for s in steps)) for name in _SECONDS}
        sums["bytes_sent"] += self._more_bytes
        made = StepsCommitted(
            member=self._member,
            generation=last.generation,
            first_step=steps[0].step,
            last_step=last.step + last.steps,
            epoch=last.after.epoch,
            offset=last.after.offset,
            loss=self._loss,
            grad_norm=last.norm,
            learning_rate=last.learning_rate,
            wall_s=_short(now_s - self._since_s),
            cpu_s=_short(used_s),
            residual=residual(),
            typical_s=_short(weighted_median(self._took)),
            period=min(count.period for count in steps),
            energy_j=0.0 if self._meter is None else round(self._meter.joules(used_s), 3),
            gpu_only=self._meter is not None and self._meter.gpu_only,
            memory_bytes=0 if self._usage is None else self._usage.memory_bytes(),
            gpu_bytes=0 if self._usage is None else self._usage.gpu_bytes(),
            gpu_busy=None if self._usage is None else self._usage.gpu_busy(),
            skips=tuple(skip.to_record() for s in steps for skip in s.skips),
            **sums,
        )
        self._steps, self._losses, self._more_bytes = [], [], 0
        self._since_s, self._cpu_s = now_s, cpu_s
        self._took.clear()
        return made


def _short(seconds: float) -> float:
    return round(seconds, 5)


class SampleAudit:
    """Checks that members read, between them, each sample of a step once.

    Each sample has a code, and members tell each other, on the control lane, the sum of the codes
    of what they have read for a step. Any of them can say what it must come to, since all know the
    order of the samples. That takes as long as looking up the samples of a member's own share, so
    members do it in turns, and of a few samples a second.
    """

    def __init__(self, collate: Collate) -> None:
        self._collate = collate
        self._rank, self._size = 0, 1
        self.forget()

    def enter(self, rank: int, size: int) -> None:
        """Be one of `size` members that take turns."""
        self._rank, self._size = rank, size

    def forget(self) -> None:
        """What was committed is not to be looked up."""
        self._spans: list[StepSpan] = []
        self._samples = self._sum = 0

    def add(self, span: StepSpan | Round, rows: int) -> None:
        """A step or round is committed, of which all members together have told `rows`."""
        own = span.step // _IN_TURN % self._size == self._rank
        if own and (not self._spans or self._samples + span.samples <= _MOST):
            self._spans += span.spans
            self._samples += span.samples
            self._sum += rows

    def check(self) -> None:
        """Look up what was committed since the last time.

        Raises:
            DealingError: Members have read other samples, or not each of them once.
        """
        spans, told = self._spans, self._sum % ROWS
        if not spans:
            return
        self.forget()
        if self._collate.row_sum(spans) % ROWS != told:
            raise DealingError(
                f"for steps {spans[0].step} to {spans[-1].step} members have read other samples "
                "than these steps take, or not each of them once"
            )
