"""The state of a run: the one fold of its event log, which every view reads.

Every member reports its own `StepsCommitted`, and their reports end at different steps. Samples,
loss and weight are those of the global batch and the same on every member, so they are counted from
one stream; a step counts once the slowest member of the generation has reported it. Bytes and
processor seconds are each member's own and are added up, steps that a resume takes back included:
they were spent. Snapshots keep the state by the names of its fields (see `report.snapshot`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raycloud.errors import DealingError
from raycloud.events import (
    CheckpointPublished,
    CollatorsStarted,
    DataPrepared,
    DataPreparing,
    Evaluated,
    Event,
    GenerationFormed,
    MemberDone,
    MemberFailed,
    MemberLeaving,
    MemberLost,
    MemberReady,
    MemberSpawned,
    Noticed,
    PartWritten,
    Predicted,
    Recovered,
    RolledBack,
    RoundsRefused,
    RunFinished,
    RunStarted,
    StepsCommitted,
    StopRequested,
    SyncAsked,
    SyncChanged,
    SyncMeasured,
    SyncPoint,
)
from raycloud.report import recoveries
from raycloud.report.data import DataTally
from raycloud.report.goodput import Goodput
from raycloud.report.notes import bad_rows_text, ended_text, note
from raycloud.report.usage import Spent, Used, introduce

_MOST_POINTS = 4096
_FRESH_POINTS = 1024  # the newest ones, never merged
_MOST_NOTICES = 100
_MOST_NOTES = 200
_MOST_TOURED = 40
_STATES: dict[type[Event], str] = {  # of a member, after such an event of it
    DataPreparing: "waiting for data",
    MemberReady: "ready",
    MemberDone: "done",
    MemberLeaving: "leaving",
    MemberLost: "lost",
    MemberFailed: "failed",
}


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


@dataclass(frozen=True, slots=True)
class Expected:
    """A prediction, and what had been spent when it was made, at unix second `t`."""

    t: float
    bytes_sent: int
    energy_j: float
    said: Predicted


@dataclass(slots=True)
class Member:
    """One member as it was last heard of.

    Attributes:
        state: `starting`, `training` or one of `_STATES`.
        share: Its micro-batches per step in the newest generation; None outside of it.
        step: The step after the last one that it reported.
        compute_s: Seconds of computing per step in its newest report; `exchange_s`: of waiting.
        heard_t: Unix seconds of its newest event.
    """

    state: str = "starting"
    node: str = ""
    share: int | float | None = None
    step: int | None = None
    compute_s: float | None = None
    exchange_s: float | None = None
    heard_t: float = 0.0


@dataclass(eq=False)
class Tally:
    """Progress of a run: steps, losses, seconds, bytes, recoveries.

    Attributes:
        ended_at: Steps of the run, by its `RunFinished`.
        spawned: In all sessions, as members are never numbered again.
        awaited: Spawned in this session.
        generation: -1 before the first; they are numbered from 0.
        computed: By member its seconds of computing, and steps.
        lead_steps: Samples and wall seconds of the lead.
        watts: Of a busy core of each member's node, where that is labelled.
        used: By member, what it has used of its node.
        collators: Of each the watts of a busy core of its node; 0: that is not labelled.
        expected: The last prediction before the first step of this session, and the newest.
        sync: By which point updates travel, where that has been changed, or `sync_asked` for.
        toured: Points of the newest tour, with what was predicted and measured of each.
        no_rounds: Why steps cannot be made in rounds, as members of this start have found.
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
    shares: tuple[int | float, ...] = ()
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
    watts: dict[int, float] = field(default_factory=dict)
    used: dict[int, Used] = field(default_factory=dict)
    collators: list[float] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    sync: SyncChanged | None = None
    sync_asked: bool = False
    toured: list[dict[str, Any]] = field(default_factory=list)
    no_rounds: str = ""
    _met: set[int] = field(default_factory=set)
    _streams: dict[int, tuple[int, int]] = field(default_factory=dict)  # (steps, samples) reported
    _entered: tuple[int, int] = (0, -1)  # (session, generation) that was counted last
    _base: tuple[int, int] = (0, 0)  # (steps, samples) where this session went on
    _lead: int | None = None  # where it is known
    _behind: set[int] | None = None  # who has not reported more than counts; None: unknown
    _foreseen: dict[int, tuple[float, float, float]] = field(default_factory=dict)  # of a step
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

    def apply(self, t: float, event: Event) -> Point | None:
        """Take in what happened at `t`; the new point of the loss curve, if this made one."""
        if self.session is not None and not isinstance(event, RunStarted):
            self.session.ended_t = t
        self.goodput.apply(t, event)
        match event:
            case StepsCommitted():
                return self._commit(t, event)
            case RunStarted():
                self._start(t, event)
            case MemberSpawned():
                self.spawned.add(event.member)
                self.awaited.add(event.member)
            case MemberReady():
                self._introduce(t, event)
            case GenerationFormed():
                self._form(t, event)
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
                self._apply_trouble(t, event)
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
        self.misread, self.ended_at, self._back = None, None, False
        if event.taken_over:  # members go on and report on: nothing is taken back
            recoveries.add_taken_over(self.recoveries, t, self.steps, event.taken_over)
            nodes = self.session.nodes if self.session is not None else {}
            here = {node: (t, price) for node, (_, price) in nodes.items()}
            step = max(self.steps, *(point.step for point in self.points[-1:]), 0)
            self.sessions.append(Session(started_t=t, from_step=step, nodes=here))
            self._entered = (len(self.sessions), self.generation)
            return
        step = event.resumed_from_step or 0
        if event.resumed_from_step is not None:
            recoveries.add_resumed(self.recoveries, t, step, max(0, self.steps - step))
        self._take_back(step)
        self.no_rounds = ""
        self.data.start()
        self.expected.clear()
        self.collators.clear()
        self._foreseen.clear()
        self.awaited, self.ready, self._met = set(), set(), set()
        self.sessions.append(Session(started_t=t, from_step=step))

    def _tour(self, event: SyncMeasured) -> None:
        """A point was measured, maybe anew; shares may have changed since it came in force."""
        met = max((g for g in self._foreseen if g <= event.generation), default=-1)
        predicted_s, low_s, high_s = self._foreseen.get(met, (None, None, None))
        found = {"point": str(SyncPoint(**event.point)), "measured_s": event.step_s}
        found |= {"predicted_s": predicted_s, "low_s": low_s, "high_s": high_s}
        others = [one for one in self.toured if one["point"] != found["point"]]
        self.toured = [*others[-_MOST_TOURED:], found]

    def _introduce(self, t: float, event: MemberReady) -> None:
        self.ready.add(event.member)
        self.parameters = event.parameters
        self.state_bytes = event.state_bytes
        self.epoch_samples = event.samples
        introduce(self.used, event)
        self.no_rounds = self.no_rounds or event.no_rounds
        if event.core_watts is not None:
            self.watts[event.member] = event.core_watts
        if self.session is not None and event.node:
            self.session.nodes.setdefault(event.node, (t, event.price_per_hour))

    def _take_back(self, step: int) -> None:
        """Drop all members, and the steps from `step` on."""
        self.steps, self.samples = self._base = (step, self.samples_at(step) if step else 0)
        self.points = [point for point in self.points if point.step <= step]
        if self.metrics_step is not None and self.metrics_step > step:
            self.metrics, self.metrics_step, self.sample = {}, None, None
        self._streams.clear()
        self._lead = self._behind = None
        self.members, self.shares = (), ()

    def _form(self, t: float, event: GenerationFormed) -> None:
        self._enter(event.generation)
        self._met |= set(event.members)
        self.members, self.shares = event.members, event.shares
        self._streams = {m: at for m, at in self._streams.items() if m in event.members}
        self._lead = self._behind = None
        recoveries.add_formed(self.recoveries, t)

    def _enter(self, generation: int) -> None:
        """Count a generation once, whether a report or its `GenerationFormed` is seen first."""
        self.generation = max(self.generation, generation)
        entered = (len(self.sessions), generation)
        if entered > self._entered:
            self._entered, self.generations = entered, self.generations + 1

    def _commit(self, t: float, event: StepsCommitted) -> Point | None:
        collators = sum(self.collators) / max(1, len(self.collators))
        self.spent.add(event, self.watts.get(event.member), collators)
        self.used.setdefault(event.member, Used()).add(event)
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
        """Add a point to the loss curve; where there are many, older ones are merged in pairs."""
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
            none = (-1, 0)
            self._behind = {
                m for m in self._computing if self._streams.get(m, none)[0] <= self.steps
            }
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

    def _apply_trouble(self, t: float, event: Event) -> None:
        match event:
            case DataPrepared():
                if self.data.prepare(event) and event.bad_rows:
                    self._notice(t, bad_rows_text(event), {"bad": list(event.bad)}, None)
            case MemberLost() if self._counts(event.member):
                recoveries.add_lost(self.recoveries, t, self.steps, event)
            case RolledBack():
                self._take_back(event.step)
                self._over, self._back = self.generation, True
            case Recovered():
                recoveries.add_recovered(self.recoveries, t, self.steps, event, back=self._back)
                self._back = False
            case MemberFailed() if self._counts(event.member):
                self.error = f"member {event.member}: {event.error}: {event.message}"
                if event.error == DealingError.__name__:
                    self.misread = event.message
            case Noticed():
                self._notice(t, event.what, event.detail, event.member)
            case RunFinished():
                self.status, self.ended_at = event.status, event.steps
                self.error = event.error or (self.error if event.status == "failed" else None)
                recoveries.close(self.recoveries)
            case _:
                self._apply_plan(t, event)

    def _apply_plan(self, t: float, event: Event) -> None:
        match event:
            case CollatorsStarted():
                self.collators += [event.core_watts or 0.0] * event.count
                if self.session is not None:
                    self.session.nodes.setdefault(event.node, (t, event.price_per_hour))
            case Predicted():
                now = Expected(t, self.spent.bytes_sent, self.spent.energy_j, event)
                first = self.expected[:1]
                if first and not event.seen and first[0].said.step == event.step:
                    first = []  # no step was made by it
                self.expected = [*first, now]
                foreseen = event.step_s, event.low_s, event.high_s
                if not event.seen:  # the last before any step
                    self._foreseen[event.generation] = foreseen
                self._foreseen.setdefault(event.generation, foreseen)
            case SyncAsked():
                self.sync_asked = True
            case RoundsRefused():
                self.no_rounds = self.no_rounds or event.why
            case SyncChanged():
                self.sync = event
            case SyncMeasured():
                self._tour(event)
            case _:
                pass

    def _notice(self, t: float, what: str, detail: Mapping[str, Any], member: int | None) -> None:
        if len(self.notices) < _MOST_NOTICES:
            notice = {"t": t, "what": what, "detail": dict(detail), "member": member}
            self.notices.append(notice)
        else:
            self.notices_left_out += 1

    def _counts(self, member: int) -> bool:
        """Whether a member computes: others may come and go, and the run is none the worse."""
        return not self._met or member in self._met


@dataclass(eq=False)
class RunState:
    """What the events of a run come to.

    Attributes:
        tally: Steps, losses, seconds, bytes, recoveries.
        members: Each as it was last heard of, since the last start.
        notes: The newest lines for people, with unix seconds.
        last_t: Unix seconds of the newest event.
        words: By member, the number of its newest message (see `log.Entry`).
        skips: By member, the samples it reported as skipped, since the last start.
    """

    tally: Tally = field(default_factory=Tally)
    members: dict[int, Member] = field(default_factory=dict)
    notes: deque[tuple[float, str]] = field(default_factory=deque)
    last_t: float | None = None
    words: dict[int, int] = field(default_factory=dict)
    skips: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    _prepared: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Bound the notes, also of a state that was read back."""
        self.notes = deque(self.notes, maxlen=_MOST_NOTES)

    def apply(
        self, t: float, event: Event, word: tuple[int, int] | None = None
    ) -> tuple[Point | None, str | None]:
        """Take in an entry of the log.

        Returns:
            The new point of the loss curve, and the note that the event deserves, if any.
        """
        self.last_t = t
        if word is not None:
            self.words[word[0]] = word[1]
        point = self.tally.apply(t, event)
        if isinstance(event, StepsCommitted):  # most are
            self._apply_report(t, event)
            return point, None
        self._apply_to_members(t, event)
        text = ended_text(event) if isinstance(event, RunFinished) else note(event)
        if isinstance(event, DataPrepared):  # every member reports it: one of them is enough
            split = (event.split, event.version)
            text = None if split in self._prepared else text
            self._prepared.add(split)
        if text is not None:
            self.notes.append((t, text))
        return point, text

    def _apply_report(self, t: float, event: StepsCommitted) -> None:
        member = self.members.get(event.member) or self.members.setdefault(event.member, Member())
        steps = max(1, event.last_step - event.first_step)
        member.heard_t, member.state, member.step = t, "training", event.last_step
        member.compute_s = event.compute_s / steps
        member.exchange_s = event.exchange_s / steps
        if event.skips:
            self.skips.setdefault(event.member, []).extend(event.skips)

    def _apply_to_members(self, t: float, event: Event) -> None:
        match event:
            case RunStarted() if not event.taken_over:
                self.members.clear()
                self.skips.clear()
                self._prepared.clear()
            case GenerationFormed():
                for member in self.members.values():
                    member.share = None
                for number, share in zip(event.members, event.shares, strict=False):
                    member = self.members.setdefault(number, Member())
                    member.state, member.share = "training", share
            case _:
                said_by = getattr(event, "member", None)
                if not isinstance(said_by, int):
                    return
                member = self.members.setdefault(said_by, Member())
                member.heard_t = t
                member.state = _STATES.get(type(event), member.state)
                if isinstance(event, MemberSpawned | MemberReady):
                    member.node = event.node or member.node
                elif isinstance(event, MemberDone):
                    member.step = event.step
                elif isinstance(event, MemberLost | MemberFailed):
                    member.share = None


def _merged(a: Point, b: Point) -> Point:
    weight = b.weight if math.isnan(a.loss) else a.weight + b.weight
    loss = (a.loss * a.weight + b.loss * b.weight) / weight if weight > b.weight else b.loss
    return Point(b.t, b.step, b.samples, a.steps + b.steps, loss, weight)
