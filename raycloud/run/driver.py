"""The driver of one start of a run: events up to control, commands down.

It knows neither Ray nor torch. What it needs of the world is a `Cluster`, and what it keeps is
kept by `Records`; both exist on Ray, in virtual time (`simulate`), and over threads (in tests).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from raycloud.commands import (
    Command,
    Finish,
    Form,
    LeaveOut,
    Meet,
    Prepare,
    Publish,
    Readmit,
    Record,
    Release,
    Restore,
    Spawn,
)
from raycloud.control.tables import Phase
from raycloud.errors import TaskError
from raycloud.events import (
    Evaluated,
    EvaluationPart,
    Event,
    MemberFailed,
    MemberLost,
    Noticed,
    Recovered,
    SyncChanged,
    SyncMeasured,
    WorkerKey,
)
from raycloud.metrics import Metric, merge_all
from raycloud.worker.outbox import OutboxEntry

if TYPE_CHECKING:
    from raycloud.control import Control
    from raycloud.control.heartbeats import Heard
    from raycloud.control.membership import Adoption

_TURN_S = 0.2
_SOON_S = 0.02  # where the last checkpoint is all that is waited for
ENDED = "its process has ended"


class Cluster(Protocol):
    """The members of one start, wherever they run. All calls come from one thread.

    Nothing here waits for a member but `hear`. What comes of a call is heard as an event.
    """

    def spawn(self, command: Spawn) -> None:
        """Start members: `MemberSpawned` follows for each, `MemberReady` once it can compute.

        Raises:
            PlacementError: There is no place for those that a run begins with.
        """
        ...

    def form(self, command: Form) -> None:
        """Tell members to leave what they do, and to meet as a generation."""
        ...

    def prepare(self, command: Prepare) -> None:
        """Tell members of the next change, which they make at the same step."""
        ...

    def release(self, members: Sequence[int]) -> None:
        """End members, and give their places back. Nothing more is heard of them."""
        ...

    def leave_out(self, member: int) -> None:
        """Listen to a member no more; `MemberReturned` follows if its process answers again."""
        ...

    def readmit(self, member: int, process: int) -> None:
        """Go on with the process of a member that has returned, as another member."""
        ...

    def holds(self, member: int) -> bool:
        """Whether there is a process of this member that is listened to."""
        ...

    def hear(self, timeout_s: float) -> Sequence[Event | OutboxEntry]:
        """What members have said and what has happened to them, in order for each of them.

        Waits up to `timeout_s` where there is nothing.
        """
        ...

    def poll(self) -> Heard:
        """Who has answered since the last call, as of the end of the last `hear`."""
        ...


class Records(Protocol):
    """What one start of a run keeps: its log, its ledger, its checkpoints."""

    @property
    def busy(self) -> bool:
        """Something that was asked for is still to be heard of by `results`."""
        ...

    def log(self, event: Event, word: tuple[int, int] | None) -> None:
        """Keep an event, before control hears of it; `word`: the member's and its number."""
        ...

    def add_to_ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Keep which samples have been committed."""
        ...

    def publish(self, command: Publish, *, samples: int, ledger: Mapping[str, Any]) -> None:
        """Make a checkpoint whole: `CheckpointPublished` or `CheckpointFailed` follows."""
        ...

    def find_back(self, published: int | None, newest: int | None) -> None:
        """Look for the newest sound checkpoint: `RolledBack` follows.

        `published` is the newest that control knows of; those of steps later than `newest` are not
        sound, and are withdrawn (None: all are sound).
        """
        ...

    def results(self) -> Sequence[Event]:
        """What has come of it since the last call. Returns at once."""
        ...


class Driver:
    """Joins control, the cluster and the records of one start.

    `run` carries it out. Where time is virtual, whoever moves it calls `start`, then `take` for
    what happens as it happens, and `turn` from time to time. `now_s` never goes back.

    Attributes:
        finish: Control's last word; None until then.
        failure: What ended the run, where a member's failure or loss did.
    """

    def __init__(
        self, control: Control, cluster: Cluster, records: Records, now_s: Callable[[], float]
    ) -> None:
        self.control = control
        self.finish: Finish | None = None
        self.failure: MemberFailed | MemberLost | None = None
        self._cluster, self._records, self._now_s = cluster, records, now_s
        self._evaluations = Evaluations()
        self._pending: deque[Event | OutboxEntry] = deque()

    def start(self, capacity: int | None = None) -> None:
        """Ask for members: see `Control.start`."""
        self._carry_out(self.control.start(self._now_s(), capacity))

    def take_over(self, adoption: Adoption) -> None:
        """Go on with members that are there, in place of `start`."""
        self._carry_out(self.control.take_over(adoption, self._now_s()))

    def run(self) -> Finish:
        """Take turns until control says that the run is over."""
        while self.finish is None:
            self.turn()
        return self.finish

    def turn(self) -> None:
        """Take in whatever has happened since the last turn; nothing after the end."""
        if self.finish is not None:
            return
        soon = self._records.busy and self.control.phase is Phase.CLOSING
        self._pending.extend(self._cluster.hear(_SOON_S if soon else _TURN_S))
        self._pending.extend(self._records.results())
        self._take_pending()
        self.control.hear(self._cluster.poll())
        now_s = self._now_s()
        while (lost := self._overdue(now_s)) is not None:
            self._take(lost)
        if self.finish is None:
            self._carry_out(self.control.tick(now_s))

    def _overdue(self, now_s: float) -> MemberLost | None:
        return None if self.finish is not None else self.control.overdue(now_s)

    def take(self, told: Event | OutboxEntry) -> None:
        """Take in something that has happened; nothing after the end."""
        self._pending.append(told)
        self._take_pending()

    def wind_up(self) -> None:
        """Log what came with the last turn, or while the cluster was let go."""
        self._pending.extend(self._records.results())
        while self._pending:
            self._take(self._pending.popleft())

    def _take_pending(self) -> None:
        while self._pending and self.finish is None:
            self._take(self._pending.popleft())

    def _take(self, told: Event | OutboxEntry) -> None:
        """Log an event, and let control decide what follows."""
        event = told.event if isinstance(told, OutboxEntry) else told
        self._records.log(
            event, (told.member, told.number) if isinstance(told, OutboxEntry) else None
        )
        if isinstance(event, EvaluationPart):
            keys = self.control.keys_of(event.generation)
            if event.replica < 0 and (key := keys.get(event.member)) is not None:
                event = replace(event, replica=key[0], position=key[1])  # it was not told
            whole = self._evaluations.add(event, tuple(keys.values()), self.control.sound_from)
            self._pending.extend([whole] if whole is not None else [])
        self._carry_out(self.control.on(event, self._now_s()))
        ends = self.finish is not None or self.control.phase is Phase.ENDING
        if isinstance(event, MemberFailed | MemberLost) and ends:
            self.failure = self.failure or event  # others were got over

    def _carry_out(self, commands: Iterable[Command]) -> None:
        cluster = self._cluster
        for command in commands:
            match command:
                case Spawn():
                    cluster.spawn(command)
                case Form(members=members):
                    self._miss_ended(members)
                    cluster.form(command)
                case Prepare(change=change):
                    if isinstance(change, Meet):
                        self._miss_ended(change.members)
                    cluster.prepare(command)
                case Release(members=members):
                    cluster.release(members)
                case LeaveOut(member=member):
                    cluster.leave_out(member)
                case Readmit(member=member, process=process):
                    cluster.readmit(member, process)
                case _:
                    self._keep(command)

    def _keep(
        self,
        command: Record
        | Publish
        | Restore
        | Noticed
        | Recovered
        | SyncChanged
        | SyncMeasured
        | Finish,
    ) -> None:
        control, records = self.control, self._records
        match command:
            case Record(records=lines):
                records.add_to_ledger(lines)
            case Publish(step=step):
                samples, ledger = control.samples_at(step), control.ledger_at(step)
                records.publish(command, samples=samples, ledger=ledger)
            case Restore(newest=newest):
                self._evaluations = Evaluations()  # some are made again
                records.find_back(control.last_published, newest)
            case Noticed() | Recovered() | SyncChanged() | SyncMeasured():
                self._pending.append(command)
            case Finish():
                self.finish = command
            case _:
                assert_never(command)

    def _miss_ended(self, members: Iterable[int]) -> None:
        """A member that had done its part may have ended since, which was no loss then."""
        lost = {told.member for told in self._pending if isinstance(told, MemberLost)}
        self._pending.extend(
            MemberLost(member=member, reason=ENDED)
            for member in members
            if member not in lost and not self._cluster.holds(member)
        )


class Evaluations:
    """Parts of measurements that are not complete."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[WorkerKey, EvaluationPart]] = {}
        self._done = -1

    def add(
        self, part: EvaluationPart, keys: Sequence[WorkerKey], generation: int = 0
    ) -> Evaluated | None:
        """Take in a part; the whole once there is one of each of these workers.

        Parts are merged in the order of `keys`, so that the result does not depend on who was
        first. Members that were lost divided the samples otherwise: what was measured before those
        of `keys` met as `generation` is measured again, unless it was complete.
        """
        if part.generation < generation or part.step <= self._done:
            return None
        before = self._parts.get(part.step, {}).values()
        parts = {(p.replica, p.position): p for p in (*before, part) if p.generation >= generation}
        self._parts[part.step] = parts
        if set(parts) != set(keys):
            return None
        self._done = part.step
        self._parts = {step: some for step, some in self._parts.items() if step > part.step}
        texts = [p.sample for p in parts.values() if p.sample is not None]
        return Evaluated(
            step=part.step,
            metrics=_values([parts[key].states for key in keys]),
            sample=texts[0] if texts else None,
        )


def _values(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    try:
        merged = merge_all(
            {name: Metric.from_state(state) for name, state in states.items()} for states in parts
        )
        return {name: float(metric.value()) for name, metric in merged.items()}
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"merging the metrics raised {type(error).__name__}: {error}",
            hint="check merge, value, to_values and from_values of the task's own metrics",
        ) from error
