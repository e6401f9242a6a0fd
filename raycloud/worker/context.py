"""What a worker is told and its loop works with: configuration, membership, changes to come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raycloud.commands import Extend, Meet, Reshare
from raycloud.events import GenerationFormed, WorkerKey, key_of
from raycloud.order import RoundEnds
from raycloud.worker.tally import Tally

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.clock import Clock
    from raycloud.commands import Change
    from raycloud.data.index import Input
    from raycloud.events import Event
    from raycloud.order import Position, Steps
    from raycloud.packing.code import TaskCode
    from raycloud.recovery.rendezvous import Host
    from raycloud.spec import Job
    from raycloud.step.collate import Collate
    from raycloud.step.feed import Held
    from raycloud.step.replica import Replica
    from raycloud.task import Task
    from raycloud.worker.energy import Meters
    from raycloud.worker.saver import Saver
    from raycloud.worker.usage import Usage


ServerNames = tuple[tuple[str, ...], ...]  # of a layout's actors, by shard


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberConfig:
    """What a member is told at its start.

    `address` is this node's address that peers can reach. `checkpoints` is where they are kept, and
    `mark` what shows that all members see that place (empty: they share a node);
    `resume_step` names the one to start from, None for the beginning. `pipeline` is the name that
    the run's members find their data's pipeline by, and `home` the node that it is on, the
    driver's; other runs may share it, and `own_pipeline` is the name of one for settings that make
    other rows (empty: nobody shares it). `known` are the inputs that the run has read before, in
    their order. `collators` are
    the names of the processes that make batches in the members' place, and `servers`, for each
    layout that there has been, of servers by shard. `only_steps` ends it after
    so many steps, whatever the job's length, which the task's schedule is made for all the same.
    One that `joins` takes its state from the others, who began with the checkpoint `origin`; where
    nobody is left who has it, all are going to load the checkpoint of step `back` together.
    `price_per_hour` is what this node is labelled to cost, `core_watts` what a core takes. `speed`
    are the
    seconds of T(b), as in `MemberReady`, of the member whose place it has taken; None: it has to
    find out its own. One that `plans` looks longer for the largest pass that memory holds.
    """

    task: type[Task] | TaskCode  # first: what follows may be of its modules
    member: int
    node: str
    address: str
    job: Job
    checkpoints: str
    mark: str = ""
    resume_step: int | None = None
    only_steps: int | None = None
    pipeline: str = ""
    own_pipeline: str = ""
    known: tuple[Input, ...] = ()
    home: str = ""
    price_per_hour: float | None = None
    core_watts: float | None = None
    collators: tuple[str, ...] = ()
    servers: tuple[ServerNames, ...] = ()
    joins: bool = False
    origin: Manifest | None = None
    back: int | None = None
    speed: tuple[float, float] | None = None
    role: str = "worker"
    plans: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """This member's place in a generation, and where the generation starts.

    `last_step` is one past the last step, as it is known then: data that grows may put it off.
    `held` says where data lies, see `Schedule`. Members of `following` compute and write nothing:
    they had no state when the generation met, and have no share yet. `keys` and `measured` are as
    in a `Form`; what a schedule goes by is measured again.
    """

    members: tuple[int, ...]
    rank: int
    generation: int
    shares: tuple[float, ...]
    step: int
    position: Position
    last_step: int
    held: Held = ()
    following: tuple[int, ...] = ()
    keys: tuple[WorkerKey, ...] = ()
    measured: int = 0

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def member(self) -> int:
        """This member's number."""
        return self.members[self.rank]

    def reshared(self, change: Reshare) -> Membership:
        """The same place under other shares; who has caught up is as all others."""
        left = tuple(m for m in self.following if m not in change.caught_up)
        return replace(self, generation=change.generation, shares=change.shares, following=left)

    @property
    def formed(self) -> GenerationFormed:
        """The word that all have met."""
        return GenerationFormed(
            generation=self.generation,
            members=self.members,
            shares=self.shares,
            first_step=self.step,
            keys=self.keys,
        )

    @property
    def key(self) -> WorkerKey:
        """This member's replica, and its position there."""
        return key_of(self.keys, self.rank)

    @property
    def holders(self) -> tuple[int, ...]:
        """Members that had the state: they divide among them what is written and measured."""
        return tuple(member for member in self.members if member not in self.following)

    @property
    def part(self) -> int | None:
        """Which part of that is this member's; None: none is."""
        return None if self.member in self.following else self.holders.index(self.member)


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Change `number` takes effect before `step` is computed."""

    number: int
    step: int
    change: Change


class Changes:
    """Changes that the driver sent ahead, and the step at which each takes effect.

    Written by the actor's thread that receives a change, read by the loop. A feed may have asked
    for `feed_depth` steps ahead of the one computed: grown data takes effect beyond them, since an
    epoch that is begun keeps its samples. `agreed` is the number of the newest change that all were
    found to hold; 0 before the first.
    """

    def __init__(self, *, feed_depth: int) -> None:
        self._feed_depth = feed_depth
        self._lock = threading.Lock()
        self._prepared: dict[int, Change] = {}
        self.agreed = 0
        self._generation = -1  # the newest that a change was to begin
        self._due: list[Due] = []

    def prepare(self, number: int, change: Change) -> None:
        """Hold change `number` at hand: they count from 1, without gaps."""
        with self._lock:
            if number > self.agreed:
                self._prepared[number] = change
            if isinstance(change, Reshare | Meet):
                self._generation = max(self._generation, change.generation)

    def settle(self, number: int) -> None:
        """Changes up to `number` are over: in force everywhere, or withdrawn by the driver.

        Data that has grown is never withdrawn.
        """
        with self._lock:
            self.agreed = max(self.agreed, number)
            self._prepared = {n: c for n, c in self._prepared.items() if n > self.agreed}
        self._due = [d for d in self._due if d.number > number or isinstance(d.change, Extend)]

    @property
    def newest(self) -> tuple[int, int]:
        """The highest number of a change that came here, and the newest generation in one; -1."""
        with self._lock:
            return max([self.agreed, *self._prepared]), self._generation

    def due_step(self) -> int:
        """The step at which the newest agreed change takes effect; -1 where it has."""
        return next((d.step for d in self._due if d.number == self.agreed), -1)

    @property
    def next_at_hand(self) -> bool:
        """Whether the change after the last agreed one is prepared here."""
        with self._lock:
            return self.agreed + 1 in self._prepared

    def agree(self, step: int) -> Due:
        """At `step` all members were found to hold the next change: fix when it takes effect."""
        with self._lock:
            grows = isinstance(self._prepared[self.agreed + 1], Extend)
        # Growth: the feed's queue, the step being collated, the one computed.
        return self.agree_on(step + (self._feed_depth + 2 if grows else 1))

    def agree_on(self, due_step: int) -> Due:
        """All members hold the next change: it takes effect before `due_step`."""
        with self._lock:
            self.agreed += 1
            change = self._prepared.pop(self.agreed)
        due = Due(number=self.agreed, step=due_step, change=change)
        self._due.append(due)
        return due

    def due(self, step: int) -> list[Due]:
        """What takes effect before `step`; asked once a step."""
        now = [d for d in self._due if d.step <= step]
        self._due = [d for d in self._due if d.step > step]
        return now


def round_ends(job: Job, period: int, stop: int = 0) -> RoundEnds:
    """Where rounds of a job end, of which this period is in force; one under way may `stop`."""
    return RoundEnds(
        period=period,
        reads=job.reads,
        warm_steps=job.warm_steps,
        grow=job.asynchronous,
        stop=stop,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopContext:
    """What a loop works with; made anew where a process goes on as another, or goes back.

    Attributes:
        steps: The cut of the sequence, as it is known at the start.
        evaluate: Called after a step with how many are done, and with the seat, whose `last_step`
            is then what it has become. Gives the states of this member's metrics.
        extend: Makes `collate` read grown data from an epoch on. Called in the loop's thread, once
            all members hold the change at hand and before any feed asks for a step of that epoch.
        first_step: The first step of this start of the run; nothing before it is to be saved.
    """

    job: Job
    steps: Steps
    replica: Replica
    collate: Collate
    saver: Saver
    changes: Changes
    clock: Clock
    report: Callable[[Event], None]
    evaluate: Callable[[int, Membership], Mapping[str, Any]]
    host: Host
    extend: Callable[[Extend, int], None]
    first_step: int = 0
    meter: Meters | None = None
    usage: Usage | None = None

    def tally(self, member: int) -> Tally:
        """Counts the steps that this member commits."""
        return Tally(member=member, clock=self.clock, meter=self.meter, usage=self.usage)

    def round_ends(self) -> RoundEnds:
        """Where rounds end, as it is known now."""
        return round_ends(self.job, self.replica.round_steps, self.replica.stop)
