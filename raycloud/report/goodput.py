"""Goodput: where the time of a run's workers went, in parts that add up to the whole.

The whole is every worker's time from when its process was asked for until it was lost, had left or
the run ended. A report of committed steps says what its seconds were; what it leaves unexplained
was spent beside the steps, or in a recovery where the generation broke at its end or before its
first step. Steps that are taken back, to go on from a checkpoint, are counted as lost from then on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING

from raycloud.events import (
    CheckpointPublished,
    GenerationFormed,
    MemberLost,
    MemberSpawned,
    Recovered,
    RolledBack,
    RunStarted,
    StepsCommitted,
)

if TYPE_CHECKING:
    from raycloud.events import Event

_MOST_KEPT = 4096  # reports since the last checkpoint, which a resume may take back
_NEWEST = 3  # reports of a member that may have come before its `Recovered`
_ABOUT_S = 0.5  # a loss is known to the driver so much after the others have reported, at most
_OF_STEPS = ("computing_s", "data_s", "exchange_s", "lane_s")


@dataclass(slots=True)
class Parts:
    """Seconds of workers, by what they were spent for.

    Attributes:
        computing_s: Of steps that count.
        data_s: Waiting for data.
        exchange_s: Waiting for the exchange of gradients.
        lane_s: Waiting for the control lane, which every step begins with.
        recovering_s: Of those that went on: from the last step before a loss, or a broken
            connection, to the next one that was committed. What was computed of the step that broke
            is in it, also where it was kept.
        lost_s: Thrown away: what a lost worker did after its last report, or since its start, of
            which nothing is known, and steps that a start from a checkpoint has taken back.
        starting_s: Until a worker's first step: its process, model and data, and the first meeting.
        beside_s: Checkpoints, held-out samples, changes between steps, the end.
    """

    computing_s: float = 0.0
    data_s: float = 0.0
    exchange_s: float = 0.0
    lane_s: float = 0.0
    recovering_s: float = 0.0
    lost_s: float = 0.0
    starting_s: float = 0.0
    beside_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """All of them together."""
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def add(self, other: Parts, times: float = 1.0) -> None:
        """Add another's seconds to each, `times` over."""
        for part in fields(self):
            seconds = getattr(self, part.name) + times * getattr(other, part.name)
            setattr(self, part.name, seconds)

    def to_record(self) -> dict[str, float]:
        """Plain values, with the whole, and the fraction of it that computed steps that count."""
        whole_s = self.whole_s
        goodput = self.computing_s / whole_s if whole_s > 0 else 0.0
        return {**asdict(self), "whole_s": whole_s, "goodput": goodput}


@dataclass(slots=True)
class _Report:
    """One report of a member: its steps [first_step, last_step), and what its seconds were."""

    t: float
    generation: int
    first_step: int
    last_step: int
    parts: Parts


@dataclass(slots=True)
class _Life:
    """One worker from its spawning on, by the log's clock; `told` and `wall_s` are by its own."""

    spawned_t: float
    met: bool = False  # it has been in a generation
    from_t: float | None = None  # when its first step began; None before its first report
    told_t: float = 0.0  # when its newest report came
    wall_s: float = 0.0
    told: Parts = field(default_factory=Parts)
    newest: deque[_Report] = field(default_factory=deque)
    awaits: int | None = None  # its first report of this generation or a later ends a recovery
    ended_t: float | None = None
    lost: bool = False

    def __post_init__(self) -> None:
        """Bound the reports, also of a life that was read back."""
        self.newest = deque(self.newest, maxlen=_NEWEST)

    def parts(self, now_t: float) -> Parts:
        """Its seconds until it ended, or until now."""
        end_t = now_t if self.ended_t is None else self.ended_t
        found = Parts()
        if self.from_t is None:
            rest_s = max(0.0, end_t - self.spawned_t)
        else:
            found.starting_s = self.from_t - self.spawned_t
            # The log tells when reports came, its own clock how long they were.
            span_s = self.told_t - self.from_t
            found.add(self.told, min(1.0, span_s / self.wall_s) if self.wall_s else 0.0)
            found.beside_s += max(0.0, span_s - self.wall_s)
            rest_s = max(0.0, end_t - self.told_t)
        if self.lost:
            found.lost_s += rest_s
        elif self.from_t is None:
            found.starting_s += rest_s
        else:
            found.beside_s += rest_s
        return found

    def recovered(self, report: _Report) -> None:
        """Count what this report leaves unexplained as recovery."""
        seconds, report.parts.beside_s = report.parts.beside_s, 0.0
        report.parts.recovering_s += seconds
        self.told.recovering_s += seconds
        self.told.beside_s -= seconds


@dataclass(eq=False)
class Goodput:
    """The fold of a run's events into `Parts`, over all of its starts."""

    _over: Parts = field(default_factory=Parts)  # of earlier starts
    _lives: dict[int, _Life] = field(default_factory=dict)
    _now_t: float = 0.0
    _formed: int = -1
    _reports: deque[_Report] = field(default_factory=deque)  # since the last checkpoint

    def __post_init__(self) -> None:
        """Bound the reports, also of a state that was read back."""
        self._reports = deque(self._reports, maxlen=_MOST_KEPT)

    def apply(self, t: float, event: Event) -> None:
        """Take in what happened at `t`."""
        if isinstance(event, RunStarted) and not event.taken_over:
            self._start(event.resumed_from_step or 0)
        self._now_t = t
        match event:
            case StepsCommitted():
                self._commit(t, event)
            case MemberSpawned():
                self._lives[event.member] = _Life(spawned_t=t)
            case RunStarted():
                self._take_over(t, event)
            case MemberLost():
                life = self._lives.get(event.member)
                if life is not None and life.ended_t is None:
                    life.ended_t, life.lost = t, True
            case GenerationFormed() if event.generation > self._formed:
                self._formed = event.generation
                self._left(t, event)
            case RolledBack():
                self._take_back(event.step)
            case Recovered():
                self._recovered(t, event)
            case CheckpointPublished():
                kept = (r for r in self._reports if r.last_step > event.step)
                self._reports = deque(kept, maxlen=_MOST_KEPT)
            case _:
                pass

    def parts(self) -> Parts:
        """What all workers' seconds were spent for, until now."""
        found = Parts()
        found.add(self._over)
        for life in self._lives.values():
            found.add(life.parts(self._now_t))
        return found

    def _start(self, step: int) -> None:
        """Close all lives; steps from `step` on count no more."""
        for life in self._lives.values():
            self._over.add(life.parts(self._now_t))
        self._lives.clear()
        self._take_back(step)
        self._formed = -1

    def _take_over(self, t: float, event: RunStarted) -> None:
        """End the lives that had not met the others and did not outlive the driver."""
        for number, life in self._lives.items():
            if life.ended_t is None and not life.met and number not in event.taken_over:
                life.ended_t = t

    def _take_back(self, step: int) -> None:
        """Count steps from `step` on as lost."""
        for report in self._reports:
            steps = report.last_step - report.first_step
            again = report.last_step - max(report.first_step, step)
            for name in _OF_STEPS if again > 0 else ():
                seconds = getattr(report.parts, name) * again / steps
                setattr(self._over, name, getattr(self._over, name) - seconds)
                self._over.lost_s += seconds
        self._reports.clear()

    def _commit(self, t: float, event: StepsCommitted) -> None:
        life = self._lives.setdefault(event.member, _Life(spawned_t=t - event.wall_s))
        if life.from_t is None:
            life.from_t = max(life.spawned_t, t - event.wall_s)
        parts = Parts(
            computing_s=event.compute_s,
            data_s=event.data_s,
            exchange_s=max(0.0, event.exchange_s - event.lane_s),
            lane_s=event.lane_s,
        )
        known_s = parts.computing_s + parts.data_s + parts.exchange_s + parts.lane_s
        if known_s > event.wall_s:
            shrunk, parts = parts, Parts()
            parts.add(shrunk, event.wall_s / known_s)
        else:
            parts.beside_s = event.wall_s - known_s
        life.told_t, life.wall_s = t, life.wall_s + event.wall_s
        told = life.told  # all but what is added here is 0; this is called for every report
        told.computing_s += parts.computing_s
        told.data_s += parts.data_s
        told.exchange_s += parts.exchange_s
        told.lane_s += parts.lane_s
        told.beside_s += parts.beside_s
        if life.ended_t is not None:  # its last words come after those of who goes on
            life.ended_t = max(t, life.ended_t)
        report = _Report(t, event.generation, event.first_step, event.last_step, parts)
        life.newest.append(report)
        self._reports.append(report)
        if life.awaits is not None and event.generation >= life.awaits:
            life.recovered(report)
            life.awaits = None

    def _left(self, t: float, event: GenerationFormed) -> None:
        """End the lives of members that were in a generation and are not in this one."""
        for number, life in self._lives.items():
            if number in event.members:
                life.met = True
                life.ended_t = life.ended_t if life.lost else None
            elif life.ended_t is None and (life.met or life.from_t is not None):
                life.ended_t = t

    def _recovered(self, t: float, event: Recovered) -> None:
        """Mark the reports around the break: the last before it, the first after it."""
        detected_t = t - event.seconds
        for life in self._lives.values():
            if life.ended_t is not None:
                continue
            before = [r for r in life.newest if r.generation < event.generation]
            after = [r for r in life.newest if r.generation >= event.generation]
            if before and before[-1].t >= detected_t - _ABOUT_S:
                life.recovered(before[-1])
            if after:
                life.recovered(after[0])
            elif before:
                life.awaits = event.generation
