"""Chaos: what a run under faults came to, held against the same run without them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.errors import RunDirectoryError
from raycloud.events import GenerationFormed, MemberLost, MemberSpawned, Recovered, RunStarted
from raycloud.faults.schedule import Action
from raycloud.redact import redact
from raycloud.report.audit import RunAudit, audit
from raycloud.report.figures import (
    finite,
)
from raycloud.report.log import read_events
from raycloud.report.summary import of_run
from raycloud.spec.rundir import RunDirectory

if TYPE_CHECKING:
    from raycloud.checkpoint.payload import Difference
    from raycloud.faults import Fault, Hit

FORMAT = 1

FLOAT64_BOUND = 1e-9
TIMES = 3.0  # of what another order of summing makes, in numbers less precise than float64
_SOON_S = 10.0  # a connection that was cut is noticed within this time
_EARLY_S = 0.02  # two clocks differ by so much, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """A recovery, in seconds from the run's start: known at `detected_s`, over at `resumed_s`."""

    generation: int
    lost: tuple[int, ...]
    cause: str
    detected_s: float
    resumed_s: float
    lost_steps: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.resumed_s - self.detected_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """A worker from when its process was asked for to its end, in seconds from the run's start."""

    member: int
    from_s: float
    to_s: float
    lost: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two runs.

    Attributes:
        directory: Where it is kept.
        audit: What its ledger proves; None where that cannot be read, and `unread` says why.
        status: As in its summary.
        wall_s: From its start to its last event.
        goodput: Where its workers' time went; see `report.goodput`.
        pauses: Its recoveries, in order.
        lives: Its workers.
        started_t: Its start, in unix seconds.
        error: Why it failed.
    """

    directory: Path
    audit: RunAudit | None
    status: str
    wall_s: float
    goodput: Mapping[str, float]
    pauses: tuple[Pause, ...]
    lives: tuple[Life, ...]
    started_t: float
    error: str | None = None
    unread: str = ""

    @property
    def exact(self) -> bool:
        """Each sample counted once, and the run came to its end."""
        return self.status == "finished" and self.audit is not None and self.audit.ledger.exact

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "directory": str(self.directory),
            "status": self.status,
            "error": self.error,
            "exact": self.exact,
            "unread": self.unread,
            "steps": 0 if self.audit is None else self.audit.ledger.steps,
            "samples": 0 if self.audit is None else self.audit.ledger.committed_samples,
            "wall_s": self.wall_s,
            "goodput": dict(self.goodput),
            "pauses": [
                {**asdict(pause), "lost": list(pause.lost), "seconds": pause.seconds}
                for pause in self.pauses
            ],
        }


def side_of(directory: Path, error: str | None = None) -> Side:
    """One of the two runs, read from what it has left.

    Raises:
        RunDirectoryError: Its log cannot be read.
    """
    summary, found, unread = of_run(directory), None, ""
    try:
        found = audit(directory)
    except RunDirectoryError as problem:
        unread = problem.message
    entries = list(read_events(RunDirectory(directory).events_jsonl))
    started_t = next((t for t, event in entries if isinstance(event, RunStarted)), 0.0)
    pauses = [  # by the log's clock, since the run's own seconds begin a little later
        Pause(
            generation=event.generation,
            lost=event.lost,
            cause=event.cause,
            detected_s=t - (event.resumed_s - event.detected_s) - started_t,
            resumed_s=t - started_t,
            lost_steps=event.lost_steps,
        )
        for t, event in entries
        if isinstance(event, Recovered)
    ]
    return Side(
        directory=directory,
        audit=found,
        status=summary.status,
        wall_s=summary.wall_s,
        goodput=summary.goodput,
        pauses=tuple(pauses),
        lives=tuple(_lives(entries, started_t)),
        started_t=started_t,
        error=error or summary.error,
        unread=unread,
    )


def _lives(entries: Sequence[tuple[float, Any]], started_t: float) -> Iterator[Life]:
    began: dict[int, float] = {}
    ended: dict[int, tuple[float, bool]] = {}
    computed: set[int] = set()
    for t, event in entries:
        match event:
            case MemberSpawned():
                began.setdefault(event.member, t - started_t)
            case MemberLost() if event.member not in ended:
                ended[event.member] = t - started_t, True
            case GenerationFormed():
                for gone in computed - set(event.members) - ended.keys():
                    ended[gone] = t - started_t, False
                computed |= set(event.members)
            case _:
                pass
    end = (entries[-1][0] - started_t if entries else 0.0), False
    for member, from_s in began.items():
        to_s, lost = ended.get(member, end)
        yield Life(member=member, from_s=from_s, to_s=to_s, lost=lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """How far the two may be apart.

    Attributes:
        value: At most so far.
        why: What it follows from.
    """

    value: float
    why: str


def bound_of(precision: str, other_order: float | None = None) -> Bound:
    """What two runs of a job are held to.

    Args:
        precision: The number type of the model's parameters.
        other_order: How far a run by one worker is from the undisturbed one; needed where that type
            is not `float64`.
    """
    if precision == "float64":
        return Bound(value=FLOAT64_BOUND, why="float64")
    return Bound(
        value=TIMES * (other_order or 0.0),
        why=f"{precision}: {TIMES:g} times what a run by one worker, which adds up in another "
        "order, differs by",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the faults came to.

    Attributes:
        job: The job's name.
        seed: What the faults were drawn from; None: they were read from a file.
        workers: Most workers.
        undisturbed: The run without faults.
        disturbed: The run with them.
        difference: Between their last checkpoints; None where they cannot be compared.
        bound: What that is held to.
        hits: What was done, in order.
        left: Faults that did not happen: the run ended before.
    """

    job: str
    seed: int | None
    workers: int
    undisturbed: Side
    disturbed: Side
    difference: Difference | None
    bound: Bound | None
    hits: tuple[Hit, ...] = ()
    left: tuple[Fault, ...] = ()

    @property
    def agrees(self) -> bool:
        """The parameters are those of the undisturbed run, within the bound."""
        if self.difference is None or self.bound is None:
            return False
        return self.difference.largest <= self.bound.value

    @property
    def proved(self) -> bool:
        """They agree, and both ledgers are exact."""
        return self.agrees and self.undisturbed.exact and self.disturbed.exact

    def at_s(self, hit: Hit) -> float:
        """When a fault was done, in seconds from the start of the run."""
        return hit.t - self.disturbed.started_t

    def pause_of(self, hit: Hit) -> Pause | None:
        """The recovery that a fault made necessary; None: it needed none."""
        if hit.why:
            return None
        at_s = self.at_s(hit)
        harmed = (self.at_s(one) for one in self.hits if one.member == hit.member and not one.why)
        again_s = min((t for t in harmed if t > at_s), default=math.inf)
        for pause in self.disturbed.pauses:
            if hit.member in pause.lost and pause.detected_s <= again_s:
                return pause
            cut = hit.fault.action is Action.CUT and pause.resumed_s >= at_s
            if cut and -_EARLY_S <= pause.detected_s - at_s <= _SOON_S:
                return pause
        return None

    def to_record(self) -> dict[str, Any]:
        """JSON-ready values with the format number, without what looks like a secret."""
        apart = self.difference
        names = ("largest", "tensor", "parameters", "tensors", "step", "precision")
        record = {
            "format": FORMAT,
            "job": self.job,
            "seed": self.seed,
            "workers": self.workers,
            "proved": self.proved,
            "agrees": self.agrees,
            "difference": apart and finite({name: getattr(apart, name) for name in names}),
            "bound": self.bound and asdict(self.bound),
            "faults": [self._record_of(hit) for hit in self.hits],
            "left": [fault.to_record() for fault in self.left],
            "undisturbed": self.undisturbed.to_record(),
            "disturbed": self.disturbed.to_record(),
        }
        redacted: dict[str, Any] = redact(record)
        return redacted

    def _record_of(self, hit: Hit) -> dict[str, Any]:
        pause, at_s = self.pause_of(hit), self.at_s(hit)
        return {
            **hit.fault.to_record(),
            "member": hit.member,
            "step": hit.step,
            "t_s": at_s,
            "why": hit.why,
            "noticed_s": None if pause is None else pause.detected_s - at_s,
            "resumed_s": None if pause is None else pause.resumed_s - at_s,
        }
