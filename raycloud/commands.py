"""What shall be done next: frozen records that `control` returns and `on_ray` carries out.

A *change* is what members apply in lockstep: it is sent ahead, every member reports on the control
lane that it holds it, and it takes effect at the same step everywhere, without a pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raycloud.events import (
    Noticed,
    Recovered,
    SyncChanged,
    SyncMeasured,
    SyncPoint,
    WorkerKey,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reshare:
    """From the step at which it takes effect, compute these shares as this generation.

    Members of `caught_up` followed until now: from then on they are as all others.
    """

    generation: int
    shares: tuple[float, ...]
    caught_up: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """Write a checkpoint of the state before the step at which it takes effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Halt:
    """Write a checkpoint of the state before the step at which it takes effect, then end."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    """The data has grown: epochs that begin later have `samples` samples.

    The first of them is the first epoch that begins at the step at which this takes effect, or
    after it. Old samples keep their ids; new ones have ids after them. `version` names the grown
    data to whoever reads it. `partitions` are the first row of each of its partitions and one past
    the last row; empty where the data has none.
    """

    version: int
    samples: int
    partitions: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Meet:
    """From the step at which it takes effect, be another generation: these members, these shares.

    They meet ahead, while the present generation computes. Who leaves has nothing left to do then.
    Those `following` have no state yet: they follow the others, with a share of 0, and take it from
    them meanwhile. `keys` and `sync` as in a `Form`: where that is all that changes, connections of
    the new way are made ahead, and it is in force from the same step everywhere.
    """

    generation: int
    members: tuple[int, ...]
    shares: tuple[float, ...]
    following: tuple[int, ...] = ()
    keys: tuple[WorkerKey, ...] = ()
    sync: SyncPoint | None = None


Change = Reshare | Save | Halt | Extend | Meet


@dataclass(frozen=True, kw_only=True, slots=True)
class Vacancy:
    """The place of `member`, which was lost, and how fast it was there: seconds as in its ready."""

    member: int
    fixed_s: float
    micro_batch_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawn:
    """Place and start these members, all of one role, all or none; who joins, as there is room.

    Where there are no others, `back` is the step of the checkpoint that they are going to load. The
    first of them take these `vacancies`, in order, as far as the places are still there.
    """

    members: tuple[int, ...]
    joins: bool = False
    back: int | None = None
    vacancies: tuple[Vacancy, ...] = ()
    role: str = "worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """No sound state is left: find the newest sound checkpoint, and say `RolledBack`.

    Those of later steps than `newest` hold what is not to be gone on from, and are withdrawn.
    """

    newest: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Back:
    """Members load the checkpoint of `step` where they meet; 0: they are new, and begin.

    Each does so once, when it is first told to meet as `generation` or a later one. Steps `without`
    which they go on from there change nothing this time.
    """

    step: int
    generation: int
    without: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Members meet as `generation` and compute from `step` on; order of `members` is their rank.

    Members that have computed before know better than `step` where they go on. `settled` is the
    number of the last change that is over, in force or withdrawn; one after it is still to come.
    `following` as in a `Meet`. They go `back` first where no sound state was left. `keys` are those
    of the members, by rank, and `shares` those of replicas; see `events.key_of`. Updates travel by
    `sync`; None: as the job says, with what that lets members choose. What is to be measured up to
    step `measured` is measured.
    """

    generation: int
    members: tuple[int, ...]
    shares: tuple[float, ...]
    step: int
    settled: int = 0
    following: tuple[int, ...] = ()
    back: Back | None = None
    keys: tuple[WorkerKey, ...] = ()
    sync: SyncPoint | None = None
    measured: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare:
    """Send change number `number` ahead to all members of the generation.

    Of a `Meet` also those are told that join; they take no part in finding out that all hold it.
    """

    number: int
    members: tuple[int, ...]
    change: Change


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish:
    """All parts of the checkpoint of `step` are written: publish its manifest, drop the oldest."""

    step: int
    parts: Mapping[WorkerKey, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Append these records to the run's ledger file, in order, each as one line."""

    records: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """End these members' processes and give their resources back."""

    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOut:
    """Listen to this member no more, but keep its process and place: say when it answers again."""

    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Readmit:
    """The process of a member that was left out, and has returned, goes on as another, `member`.

    What it was is over; it keeps what it has built, and joins the others as any newcomer does.
    """

    member: int
    process: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """The run is over: `finished`, `stopped` or `failed`; `error` says why it failed.

    The caller gets that as the error that it `blames`, unless a member has told of its own.
    """

    status: str
    error: str | None = None
    blames: str = "JobError"


Command = (  # an event among them is to be said in the run's log
    Spawn
    | Restore
    | Form
    | Prepare
    | Publish
    | Record
    | Noticed
    | Recovered
    | SyncChanged
    | SyncMeasured
    | Release
    | LeaveOut
    | Readmit
    | Finish
)
