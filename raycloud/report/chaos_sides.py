"""One of two runs that are held against each other: what it has left, of faults above all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.errors import RunDirectoryError
from raycloud.events import GenerationFormed, MemberLost, MemberSpawned, Recovered, RunStarted
from raycloud.report.auditing import audit
from raycloud.report.log import read_events
from raycloud.report.summary import of_run
from raycloud.spec.rundir import RunDirectory

if TYPE_CHECKING:
    from raycloud.report.auditing import RunAudit


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
    end_s = (entries[-1][0] - started_t) if entries else 0.0
    return Side(
        directory=directory,
        audit=found,
        status=summary.status,
        wall_s=summary.wall_s,
        goodput=summary.goodput,
        pauses=tuple(_pauses(entries, started_t)),
        lives=tuple(_lives(entries, started_t, end_s)),
        started_t=started_t,
        error=error or summary.error,
        unread=unread,
    )


def _pauses(entries: Sequence[tuple[float, Any]], started_t: float) -> list[Pause]:
    """By the log's clock, since the run's own seconds begin a little later."""
    return [
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


def _lives(entries: Sequence[tuple[float, Any]], started_t: float, end_s: float) -> list[Life]:
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
    lives = []
    for member, from_s in began.items():
        to_s, lost = ended.get(member, (end_s, False))
        lives.append(Life(member=member, from_s=from_s, to_s=to_s, lost=lost))
    return lives


def side_record(side: Side) -> dict[str, Any]:
    """A side as JSON-ready values."""
    return {
        "directory": str(side.directory),
        "status": side.status,
        "error": side.error,
        "exact": side.exact,
        "unread": side.unread,
        "steps": 0 if side.audit is None else side.audit.ledger.steps,
        "samples": 0 if side.audit is None else side.audit.ledger.committed_samples,
        "wall_s": side.wall_s,
        "goodput": dict(side.goodput),
        "pauses": [
            {
                "generation": pause.generation,
                "lost": list(pause.lost),
                "cause": pause.cause,
                "detected_s": pause.detected_s,
                "resumed_s": pause.resumed_s,
                "seconds": pause.seconds,
                "lost_steps": pause.lost_steps,
            }
            for pause in side.pauses
        ],
    }
