"""What a run has come to so far: events in, one after another; no clock, no files.

Every member reports its own `StepsCommitted`, and their reports end at different steps. Samples,
loss and weight are those of the global batch and the same on every member, so they are counted from
one stream; a step counts once the slowest member of the generation has reported it. Bytes and
processor seconds are each member's own and are added up, steps that a resume takes back included:
they were spent.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycloud.errors import DealingError
from raycloud.events import (
    CheckpointPublished,
    DataPrepared,
    Evaluated,
    Event,
    GenerationFormed,
    MemberFailed,
    MemberLost,
    MemberReady,
    MemberSpawned,
    Noticed,
    PartWritten,
    Recovered,
    RolledBack,
    RunFinished,
    RunStarted,
    StepsCommitted,
    StopRequested,
)
from raycloud.report.data import DataTally, bad_text
from raycloud.report.goodput import Goodput
from raycloud.report.recoveries import (
    add_formed,
    add_lost,
    add_recovered,
    add_resumed,
    add_taken_over,
    close,
)

_MOST_POINTS = 4096
_FRESH_POINTS = 1024  # the newest ones, never merged
_MOST_NOTICES = 100


@dataclass(frozen=True, slots=True)
class Point:
    """The model after `step` steps; `loss` and `weight` are of the `steps` steps up to it."""

    t: float
    step: int
    samples: int
    steps: int
    loss: float
    weight: float


@dataclass(slots=True)
class Spent:
    """Sums over all members and all steps they computed."""

    wall_s: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0
    exchange_s: float = 0.0
    cpu_s: float = 0.0
    bytes_sent: int = 0
    bytes_dense: int = 0
    blocked_s: float = 0.0

    def add(self, event: StepsCommitted) -> None:
        """What a report adds."""
        self.wall_s += event.wall_s
        self.compute_s += event.compute_s
        self.data_s += event.data_s
        self.exchange_s += event.exchange_s
        self.cpu_s += event.cpu_s
        self.bytes_sent += event.bytes_sent
        self.bytes_dense += event.bytes_dense


@dataclass(slots=True)
class Session:
    """One command's part of the run: from its start to its end or to the resume after it.

    The moments of the first and last commit carry the steps and samples committed by then; `nodes`
    are by id, with the moment of their first member's readiness and their price per hour.
    """

    started_t: float
    from_step: int
    first: tuple[float, int, int] | None = None
    last: tuple[float, int, int] | None = None
    ended_t: float | None = None
    nodes: dict[str, tuple[float, float | None]] = field(default_factory=dict)


@dataclass(eq=False)
class Tally:
    """The fold of a run's events; `summary.summarize` and the progress line read it.

    Attributes:
        ended_at: Steps of the run, by its last word.
        spawned: In all sessions, as members are never numbered again.
        awaited: Spawned in this session.
        generation: -1 before the first; they are numbered from 0.
        computed: By member its seconds of computing, and steps.
        lead_steps: Samples and wall seconds of the lead.
    """

    job: str = ""
    version: str = ""
    status: str = "unfinished"
    error: str | None = None
    misread: str | None = None
    stop_reason: str | None = None
    ended_at: int | None = None
    steps: int = 0
    samples: int = 0
    parameters: int = 0
    state_bytes: int = 0
    epoch_samples: int = 0
    spawned: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    members: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    generation: int = -1
    generations: int = 0
    epoch: int = 0
    offset: int = 0
    learning_rate: float | None = None
    spent: Spent = field(default_factory=Spent)
    data: DataTally = field(default_factory=DataTally)
    goodput: Goodput = field(default_factory=Goodput)
    sessions: list[Session] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    computed: dict[int, tuple[float, int]] = field(default_factory=dict)
    published: int = 0
    checkpoint: CheckpointPublished | None = None
    checkpoint_t: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metrics_step: int | None = None
    sample: str | None = None
    notices: list[dict[str, Any]] = field(default_factory=list)
    notices_left_out: int = 0
    lead_steps: tuple[int, float] = (0, 0.0)
    _met: set[int] = field(default_factory=set)
    _streams: dict[int, tuple[int, int]] = field(default_factory=dict)  # (steps, samples) reported
    _entered: tuple[int, int] = (0, -1)  # (session, generation) that was counted last
    _base: tuple[int, int] = (0, 0)  # (steps, samples) where this session went on
    _lead: int | None = None  # where it is known
    _behind: set[int] | None = None  # who has not reported more than counts; None: unknown
    _back: bool = False  # to a checkpoint, and has not gone on since
    _over: int = -1  # reports of this generation and older ones come too late

    @property
    def session(self) -> Session | None:
        """The latest session."""
        return self.sessions[-1] if self.sessions else None

    @property
    def lead(self) -> int | None:
        """The member whose reports make the loss curve: the lowest of the generation."""
        if self._lead is None:
            self._lead = min(self._computing, default=None)
        return self._lead

    @property
    def computing(self) -> int:
        """How many members report."""
        return len(self._computing)

    @property
    def _computing(self) -> list[int]:
        """The members of the generation, but for those that follow without a share and report."""
        there = zip(self.members, self.shares, strict=False)
        return [m for m, share in there if share or m in self._streams] or [*self._streams]

    @property
    def reported(self) -> dict[int, int]:
        """By member, one past the last step that it has reported since it began."""
        return {member: steps for member, (steps, _) in self._streams.items()}

    def add(self, t: float, event: Event) -> Point | None:
        """Take in what happened at `t`; the new point of the loss curve, if this made one."""
        if self.session is not None and not isinstance(event, RunStarted):
            self.session.ended_t = t
        self.goodput.add(t, event)
        match event:
            case RunStarted():
                self._start(t, event)
            case MemberSpawned():
                self.spawned.add(event.member)
                self.awaited.add(event.member)
            case MemberReady():
                self.ready.add(event.member)
                self.parameters = event.parameters
                self.state_bytes = event.state_bytes
                self.epoch_samples = event.samples
                if self.session is not None and event.node:
                    self.session.nodes.setdefault(event.node, (t, event.price_per_hour))
            case GenerationFormed():
                self._form(t, event)
            case StepsCommitted():
                return self._commit(t, event)
            case PartWritten():
                self.spent.blocked_s += event.blocked_s
            case CheckpointPublished():
                self.checkpoint, self.published = event, self.published + 1
                self.checkpoint_t = t
            case Evaluated():
                self.metrics, self.metrics_step = event.metrics, event.step
                self.sample = event.sample if event.sample is not None else self.sample
            case StopRequested():
                self.stop_reason = event.reason
            case _:
                self._trouble(t, event)
        return None

    def samples_at(self, step: int) -> int:
        """Samples committed by the first `step` steps.

        Exact where a report or a resume ended at `step`; between them, steps are taken as equal.
        """
        known = {0: 0, **{point.step: point.samples for point in self.points}}
        known[self._base[0]] = self._base[1]
        steps = sorted(known)
        if step in known or steps == [0]:
            return known.get(step, 0)
        after = min(bisect_right(steps, step), len(steps) - 1)
        a, b = steps[after - 1], steps[after]
        return known[a] + round((step - a) * (known[b] - known[a]) / (b - a))

    def _start(self, t: float, event: RunStarted) -> None:
        self.job, self.version = event.job, event.version
        self.status, self.error, self.stop_reason = "unfinished", None, None
        self.misread = None
        self.ended_at, self._back = None, False
        if event.taken_over:
            self._go_on(t, event)
            return
        step = event.resumed_from_step or 0
        if event.resumed_from_step is not None:
            add_resumed(self.recoveries, t, step, max(0, self.steps - step))
        self._take_back(step)
        self.data.start()
        self.awaited, self.ready, self._met = set(), set(), set()
        self.sessions.append(Session(started_t=t, from_step=step))

    def _take_back(self, step: int) -> None:
        """Nobody is there, and of all steps those before `step` count."""
        self.steps, self.samples = self._base = (step, self.samples_at(step) if step else 0)
        self.points = [point for point in self.points if point.step <= step]
        if self.metrics_step is not None and self.metrics_step > step:
            self.metrics, self.metrics_step, self.sample = {}, None, None
        self._streams.clear()
        self._lead = self._behind = None
        self.members, self.shares = (), ()

    def _go_on(self, t: float, event: RunStarted) -> None:
        """Members have outlived their driver: nothing is taken back, and they report on."""
        add_taken_over(self.recoveries, t, self.steps, event.taken_over)
        nodes = self.session.nodes if self.session is not None else {}
        here = {node: (t, price) for node, (_, price) in nodes.items()}
        step = max(self.steps, *(point.step for point in self.points[-1:]), 0)
        self.sessions.append(Session(started_t=t, from_step=step, nodes=here))
        self._entered = (len(self.sessions), self.generation)

    def _form(self, t: float, event: GenerationFormed) -> None:
        self._enter(event.generation)
        self._met |= set(event.members)
        self.members, self.shares = event.members, event.shares
        here = set(event.members)
        self._streams = {m: at for m, at in self._streams.items() if m in here}
        self._lead = self._behind = None
        add_formed(self.recoveries, t)

    def _enter(self, generation: int) -> None:
        """A reshare may be seen first in a report, then as formed: it is one generation."""
        self.generation = max(self.generation, generation)
        entered = (len(self.sessions), generation)
        if entered > self._entered:
            self._entered, self.generations = entered, self.generations + 1

    def _commit(self, t: float, event: StepsCommitted) -> Point | None:
        self.spent.add(event)
        self.data.commit(event, self.epoch_samples)
        compute_s, done = self.computed.get(event.member, (0.0, 0))
        done += event.last_step - event.first_step
        self.computed[event.member] = (compute_s + event.compute_s, done)
        if event.generation <= self._over:
            return None
        steps, samples = self._streams.get(event.member, (None, 0))
        if steps is None:
            self._lead = self._behind = None  # another one computes
        if steps != event.first_step:
            samples = self.samples_at(event.first_step)
        samples += event.samples
        self._streams[event.member] = (event.last_step, samples)
        self._enter(event.generation)
        point = None
        if event.member == self.lead:
            self.learning_rate = event.learning_rate
            self.epoch, self.offset = event.epoch, event.offset
            earlier, wall_s = self.lead_steps
            self.lead_steps = (earlier + event.samples, wall_s + event.wall_s)
            point = self._extend(t, event, samples)
        self._advance(t, event)
        return point

    def _extend(self, t: float, event: StepsCommitted, samples: int) -> Point | None:
        if self.points and event.last_step <= self.points[-1].step:
            return None
        steps = event.last_step - event.first_step
        point = Point(t, event.last_step, samples, steps, event.loss, event.weight)
        self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            old, fresh = self.points[:-_FRESH_POINTS], self.points[-_FRESH_POINTS:]
            pairs = zip(old[::2], old[1::2], strict=False)
            odd = old[-1:] if len(old) % 2 else []
            self.points = [_merged(a, b) for a, b in pairs] + odd + fresh
        return point

    def _advance(self, t: float, event: StepsCommitted) -> None:
        """Count the steps that every member of the generation has reported by now."""
        if self._behind is None:
            told, none = self._streams, (-1, 0)
            self._behind = {m for m in self._computing if told.get(m, none)[0] <= self.steps}
        elif event.last_step > self.steps:
            self._behind.discard(event.member)
        if self._behind:
            return
        steps, samples = min(self._streams[member] for member in self._computing)
        self._behind = None
        if steps <= self.steps:
            return
        self.steps, self.samples = steps, samples
        if self.session is not None:
            self.session.last, first = (t, steps, samples), self.session.first
            self.session.first = self.session.last if first is None or first[1] > steps else first

    def _trouble(self, t: float, event: Event) -> None:
        match event:
            case DataPrepared():
                if self.data.prepare(event) and event.bad_rows:
                    self._trouble(t, Noticed(what=bad_text(event), detail={"bad": list(event.bad)}))
            case MemberLost() if self._counts(event.member):
                add_lost(self.recoveries, t, self.steps, event)
            case RolledBack():
                self._take_back(event.step)
                self._over, self._back = self.generation, True
            case Recovered():
                add_recovered(self.recoveries, t, self.steps, event, back=self._back)
                self._back = False
            case MemberFailed() if self._counts(event.member):
                self.error = f"member {event.member}: {event.error}: {event.message}"
                if event.error == DealingError.__name__:
                    self.misread = event.message
            case Noticed() if len(self.notices) < _MOST_NOTICES:
                notice = {"t": t, "what": event.what, "detail": dict(event.detail)}
                self.notices.append({**notice, "member": event.member})
            case Noticed():
                self.notices_left_out += 1
            case RunFinished():
                self.status, self.ended_at = event.status, event.steps
                self.error = event.error or (self.error if event.status == "failed" else None)
                close(self.recoveries)
            case _:
                pass

    def _counts(self, member: int) -> bool:
        """Others than those that compute may come and go, and nobody is the worse for it."""
        return not self._met or member in self._met


def _merged(a: Point, b: Point) -> Point:
    weight = b.weight if math.isnan(a.loss) else a.weight + b.weight
    loss = (a.loss * a.weight + b.loss * b.weight) / weight if weight > b.weight else b.loss
    return Point(b.t, b.step, b.samples, a.steps + b.steps, loss, weight)
