"""`Cluster` and `Records` of one start in virtual time; they hold control to its promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.commands import Meet, Reshare
from raycloud.control import Phase
from raycloud.events import (
    ChangeApplied,
    CheckpointPublished,
    GenerationFormed,
    MemberLeaving,
    MemberLost,
    Recovered,
    RolledBack,
    StepsCommitted,
)
from raycloud.order import ledger_line
from raycloud.run.driver import ENDED
from raycloud.simulate.story import Kept
from raycloud.simulate.telling import few, numbers, short

if TYPE_CHECKING:
    from raycloud.commands import Form, Prepare, Publish, Spawn
    from raycloud.control import Control
    from raycloud.control.heartbeats import Heard
    from raycloud.events import Event
    from raycloud.simulate.computing import Computing
    from raycloud.simulate.ending import Ending
    from raycloud.simulate.story import Story

_IDLE_S = 400.0  # who is ready and takes no part for so long is forgotten
_FEW = 64  # members, up to which that is looked at
_WAITS_S = 1_500.0  # so long a run may wait for members although machines hold enough
_PUBLISH_S = 0.2


class VirtualCluster:
    """The members of one start, and what it keeps.

    Args:
        control: Decides; what it asks for is checked against what it knows.
        ending: What befalls members.
        computing: What they do together.
        story: What is known of the run; this start is added.
    """

    busy = False

    def __init__(
        self, control: Control, ending: Ending, computing: Computing, story: Story
    ) -> None:
        """Nobody is asked for yet."""
        self._control, self._ending = control, ending
        self._computing, self._story = computing, story
        self._world, self._fleet = computing.world, computing.fleet
        self._words, self._log = computing.words, computing.world.log
        self._committed = self._published = computing.origin.step
        self._spawned: set[int] = set()
        self._group: tuple[int, ...] = ()
        self._newest = story.next_generation - 1
        self._idle_s: dict[int, float] = {}
        self._waits_s: float | None = None  # since when, although machines hold enough
        self._noticed = False  # some member is to leave, or was
        self._loud = computing.scenario.members <= _FEW

    def sees(self, event: Event) -> bool:
        """A word has come; whether the driver hears it: not of a member that it has ended."""
        match event:
            case MemberLost(member=member, reason=reason):
                known = member in self._fleet.seats or member in self._fleet.away
                if not known and reason != ENDED:
                    return False
                self._fleet.drop(member)
            case GenerationFormed():
                self._check_formed(event)
            case MemberLeaving():
                self._noticed = True
            case _:
                pass
        return True

    # ---- members

    def spawn(self, command: Spawn) -> None:
        """See `Cluster.spawn`."""
        members = command.members
        if self._spawned & set(members) or min(members) < self._story.spawned:
            self._wrong(f"members {few(members)} are asked for twice")
        self._spawned |= set(members)
        self._story.spawned = max(members) + 1
        self._fleet.spawn(members, joins=command.joins)

    def form(self, command: Form) -> None:
        """See `Cluster.form`."""
        self._count_generation(command.generation)
        self._check_group("Form", command.generation, command.members, command.shares)
        self._group = command.members
        self._computing.meetings.form(command)

    def prepare(self, command: Prepare) -> None:
        """See `Cluster.prepare`."""
        change = command.change
        if command.members != self._control.group:
            self._wrong(f"change {command.number} is sent to others than those that compute")
        if isinstance(change, Reshare | Meet):
            members = change.members if isinstance(change, Meet) else command.members
            self._count_generation(change.generation)
            self._check_group("Prepare", change.generation, members, change.shares)
        self._computing.changes.prepare(command)

    def release(self, members: Sequence[int]) -> None:
        """See `Cluster.release`."""
        self._spawned -= set(members)
        self._ending.release(members)

    def leave_out(self, member: int) -> None:
        """See `Cluster.leave_out`."""
        self._ending.leave_out(member)

    def readmit(self, member: int, process: int) -> None:
        """See `Cluster.readmit`."""
        if member < self._story.spawned:
            self._wrong(f"member {member} is there already")
        self._spawned.add(member)
        self._story.spawned, self._story.returned = member + 1, self._story.returned + 1
        self._fleet.readmit(member, process)

    def holds(self, member: int) -> bool:
        """See `Cluster.holds`."""
        return member in self._fleet.seats

    def hear(self, timeout_s: float) -> tuple[Event, ...]:  # noqa: ARG002 - nothing is waited for
        """Words come by themselves, each in its time."""
        return ()

    def poll(self) -> Heard:
        """See `Cluster.poll`."""
        if self._loud:
            self._check_idle()
            self._check_waiting()
        return self._fleet.heard()

    # ---- records

    def results(self) -> tuple[Event, ...]:
        """They come as words."""
        return ()

    def log(self, event: Event, word: tuple[int, int] | None) -> None:  # noqa: ARG002 - none has one
        """See `Records.log`."""
        self._story.recoveries += isinstance(event, Recovered)
        now_s = self._world.now_s
        if not self._loud and isinstance(event, StepsCommitted | ChangeApplied):
            self._log.count(now_s, *numbers(event))
        else:
            self._log.add(f"{now_s:.6f} < {short(event)}")

    def add_to_ledger(self, records: Sequence[Mapping[str, Any]]) -> None:
        """See `Records.add_to_ledger`."""
        self._story.lines += [ledger_line(record) for record in records]
        self._check_progress()

    def publish(self, command: Publish, *, samples: int, ledger: Mapping[str, Any]) -> None:  # noqa: ARG002 - the manifest's
        """See `Records.publish`; that takes a little while."""
        step = command.step
        values = {part["value"] for part in command.parts.values()}
        if len(values) != 1 or step <= self._published:
            self._wrong(f"the checkpoint of step {step} has {len(values)} different states")
        self._published = step
        kept = self._story.kept = Kept(
            step=step,
            position=self._control.position_at(step),
            ledger=dict(ledger),
            value=min(values),
            useful_s=self._computing.useful_s,
            generation=self._story.generation,
        )
        self._story.values[step] = kept.value
        self._tell(CheckpointPublished(step=step, path="", state_bytes=8, write_s=_PUBLISH_S))

    def find_back(self, published: int | None, newest: int | None) -> None:  # noqa: ARG002 - one is kept
        """See `Records.find_back`."""
        kept = self._story.kept
        self._computing.go_back(kept)
        self._committed = self._computing.origin.step
        self._tell(RolledBack(step=self._committed, ledger={} if kept is None else kept.ledger))

    def _tell(self, event: Event) -> None:
        self._words.tell(event, self._world.now_s)

    # ---- promises

    def _wrong(self, what: str) -> None:
        self._story.wrong.append(what)

    def _count_generation(self, generation: int) -> None:
        self._story.generations += 1
        self._story.generation = generation

    def _check_group(
        self, kind: str, generation: int, members: tuple[int, ...], shares: tuple[int, ...]
    ) -> None:
        if generation <= self._newest:
            self._wrong(f"{kind} of generation {generation} after {self._newest}")
        self._newest = generation
        if sum(shares) != self._computing.scenario.micro_batches or min(shares) < 0:
            self._wrong(f"{kind} of generation {generation}: no shares of a step: {few(shares)}")
        if len(shares) != len(members) or not set(members) <= self._spawned:
            self._wrong(f"{kind} of generation {generation} without its members: {few(members)}")
        # The first ones are those that are there: who is too many leaves at once. Who is to leave
        # stays until another has its state.
        most = self._control.workers[1] + self._noticed
        if self._group and len(members) > most:
            self._wrong(f"{kind} of generation {generation} has {len(members)} members")

    def _check_progress(self) -> None:
        now = self._control.committed_step
        if now < self._committed:
            self._wrong(f"step {self._committed} counted, and then only {now}")
        if now > self._computing.reached:
            self._wrong(f"step {now} counts, and members have {self._computing.reached}")
        self._committed = now

    def _check_formed(self, event: GenerationFormed) -> None:
        if event.generation >= self._newest and event.first_step < self._committed:
            what = f"generation {event.generation} begins at step {event.first_step}"
            self._wrong(f"{what}, though {self._committed} steps count")

    def _check_idle(self) -> None:
        """Whoever is there takes part before long, or is let go."""
        now_s, control = self._world.now_s, self._control
        group = set(control.group)
        for number, body in (*self._fleet.seats.items(), *self._fleet.away.items()):
            due = body.built and body.well and control.phase is Phase.TRAINING
            if not due or number in group:
                self._idle_s.pop(number, None)
            elif now_s - self._idle_s.setdefault(number, now_s) > _IDLE_S:
                self._idle_s[number] = float("inf")
                self._wrong(f"member {number} is ready and takes no part for {_IDLE_S:g} s")

    def _check_waiting(self) -> None:
        """Where machines hold enough members, the run does not wait for ever."""
        control, now_s = self._control, self._world.now_s
        enough = self._fleet.room >= control.workers[0]
        if control.phase not in {Phase.WAITING, Phase.RESTORING} or not enough:
            self._waits_s = None
        elif self._waits_s is None:
            self._waits_s = now_s
        elif now_s - self._waits_s > _WAITS_S:
            self._waits_s = float("inf")
            self._wrong(f"it waits for members for {_WAITS_S:g} s, and machines hold enough")
