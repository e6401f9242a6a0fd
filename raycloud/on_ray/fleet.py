"""The members' processes: placed all or none, asked for events, ended."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from raycloud.control.heartbeats import Behind, Heard
from raycloud.errors import PlacementError
from raycloud.events import Event, MemberLost, MemberReturned, MemberSpawned
from raycloud.net.heartbeat import Heartbeats
from raycloud.on_ray.attach import NODE_LABEL, first_line
from raycloud.on_ray.pool import ActorPool, Vacancies
from raycloud.run.driver import ENDED
from raycloud.step.straggler import Stalled, Straggling
from raycloud.worker.outbox import LogLines, OutboxEntry

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.commands import Change, Vacancy
    from raycloud.net.stream import Place
    from raycloud.recovery.rendezvous import Meeting
    from raycloud.spec.sections import RoleResources
    from raycloud.worker.context import MemberConfig, ServerNames

POLL_S = 1.0  # a member that has nothing to say says so
_LOOK_S = 0.5  # between two looks whether there is a place
PLACE_S = 60.0  # for the fewest that a run needs
ASKED_PLACE_S = 900.0  # the same, where machines for them are asked for: they have to start first
_THERE_S = 1.0  # for all on the nodes that are meant
_SECURE_S = 0.05  # between two looks for the places that a run begins with
_OTHERS_S = 1.0  # and then for all others together: what runs before this one gives back
_OF_SERVERS_BYTES = 4096  # of a node's memory
_DOUBT_S = 0.05  # between two looks whether a machine is gone that has not answered as usual


@dataclass
class MemberProcess:
    """A member's process as the driver knows it, and what is awaited of it.

    Attributes:
        actor: Its handle.
        poll: The answer that is awaited.
        due_s: When that is due.
        again_s: When it is asked again, where it could not be reached.
        asked_anew: What is awaited was asked after it had been left out.
    """

    actor: Any
    poll: Any = None
    due_s: float = 0.0
    again_s: float = 0.0
    asked_anew: bool = False

    def ask(
        self, term: int, probes: Place | None, *, written: int = 0, wait_s: float = POLL_S
    ) -> None:
        """Ask it for its words: see `MemberActor.poll`."""
        self.poll = self.actor.poll.remote(wait_s, written, term, probes)

    def ask_anew(self, term: int, probes: Place | None, *, wait_s: float = POLL_S) -> None:
        """The same, once it has been left out."""
        self.ask(term, probes, wait_s=wait_s)
        self.asked_anew = True

    def is_back(self, term: int, probes: Place | None) -> bool:
        """Whether an answer of one that was left out shows that it is back; else it is asked anew.

        What was asked for before it was left out shows nothing: it may have been on its way.
        """
        if self.asked_anew:
            return True
        self.ask_anew(term, probes, wait_s=0.0)
        return False


class Fleet:
    """Members of one run.

    Args:
        resources: What each reserves.
        clock: The time.
        pool: Where places come from.
        place_s: So long the fewest members may wait for a place when a run begins.
    """

    def __init__(
        self,
        resources: RoleResources,
        clock: Clock,
        pool: ActorPool | None = None,
        *,
        place_s: float = PLACE_S,
    ) -> None:
        self._place_s = place_s
        self._pool = ActorPool(clock) if pool is None else pool
        self._term = self._pool.term
        self._vacancies = Vacancies(self._pool, clock)
        self._resources = resources
        self._clock = clock
        self._polled_s = float("-inf")
        self._pause = threading.Event()
        self._probes = Heartbeats(ray.util.get_node_ip_address(), clock)
        self._late_s: dict[int, float] = {}
        self._still_s: dict[int, float] = {}
        self._behind: dict[int, Behind] = {}
        self._waiting: dict[int, MemberConfig] = {}
        self._looked_s = 0.0
        self._collators: tuple[str, ...] = ()
        self._processes: dict[int, MemberProcess] = {}
        self._lines: list[LogLines] = []
        self._away: dict[int, MemberProcess] = {}  # left out, and not heard since
        self._returned: dict[int, MemberProcess] = {}
        self._untold: list[Event] = []
        self._secured: list[int] = []

    @property
    def places(self) -> int:
        """How many members have a place or wait for one, and how many more have one at hand."""
        held = (self._processes, self._away, self._returned, self._waiting)
        mine = len({member for members in held for member in members})
        return mine + self._pool.spare(self._bundle(), self._resources.labels)

    def secure(
        self, members: Sequence[int], least: int, *, on: Sequence[str] = (), strictly: bool = False
    ) -> int:
        """Reserve places for the members that a run begins with, as many as there is room for.

        Waits up to `place_s` for the first `least`; who has none soon after that has to join later.

        Args:
            members: Their numbers.
            least: So many there have to be.
            on: The ids of nodes where the first of them are to be; where somebody else has taken a
                place there for a second, anywhere. Ray finds those of the rest.
            strictly: There or nowhere.

        Returns:
            How many of the first of `members` have a place.
        """
        for member, node in zip_longest(members, on):
            self._reserve(member, node)
        began_s, placed = self._clock.monotonic_s(), self._pool.placed(members)
        over_s, enough = began_s + self._place_s, False
        while len(placed) < len(members) and self._clock.monotonic_s() < over_s:
            if on and not strictly and self._clock.monotonic_s() >= began_s + _THERE_S:
                on = ()  # somebody else was quicker
                for member in set(members) - set(placed):
                    self._pool.drop([member])
                    self._reserve(member)
            if not enough and len(placed) >= least:
                enough, over_s = True, self._clock.monotonic_s() + _OTHERS_S
            self._pause.wait(_SECURE_S)
            placed = self._pool.placed(members)
        self._pool.drop([member for member in members if member not in placed])
        for member, before in zip(members, placed, strict=False):  # they are in the same order
            if member != before:
                self._pool.rename(before, member)
            self._secured.append(member)
        return len(placed)

    def spawn(self, configs: Sequence[MemberConfig], collators: Sequence[str] = ()) -> int:
        """Start members in the places that are secured for them, and collators beside them.

        Args:
            configs: What members are told.
            collators: For each the id of its node; empty: any.

        Returns:
            How many collators there are: fewer than asked for where CPUs are short.

        Raises:
            PlacementError: There are fewer places; nothing is left reserved.
        """
        secured, self._secured = self._secured, []
        if lacking := {config.member for config in configs}.difference(secured):
            self._pool.drop(secured)
            raise PlacementError(
                f"only {len(configs) - len(lacking)} of {len(configs)} workers found a place within"
                f" {self._place_s:g} s: each asks for {self._bundle()}",
                hint="lower elastic.min_workers or resources.worker, or free the cluster",
            )
        first = configs[0]
        if collators:
            told = [ray.put(first)]
            self._collators = self._pool.start_collators(collators, first.pipeline, told)
        for config in configs:
            self._start(config)
        return len(self._collators)

    def adopt(self, actors: Mapping[int, Any], collators: tuple[str, ...]) -> None:
        """Go on with members that compute already, by their handles, and with their collators."""
        self._collators = collators
        for member, actor in actors.items():
            self._ask(self._processes.setdefault(member, MemberProcess(actor=actor)))

    def await_place(self, config: MemberConfig, vacancy: Vacancy | None = None) -> None:
        """Start a member as soon as there is a place for it; `MemberSpawned` then says so.

        It starts at once where `vacancy` is the place of one that has just died.
        """
        if vacancy is not None and self._vacancies.take(vacancy.member, config.member):
            self._start(replace(config, speed=(vacancy.fixed_s, vacancy.micro_batch_s)))
            self._untold.append(MemberSpawned(member=config.member, role=config.role))
        else:
            self._reserve(config.member)
            self._waiting[config.member] = config

    def _start(self, config: MemberConfig) -> None:
        told = [ray.put(replace(config, collators=self._collators))]
        actor = self._pool.start(config.member, told)
        self._ask(self._processes.setdefault(config.member, MemberProcess(actor=actor)))

    def _start_placed(self) -> list[Event]:
        """Start whoever has found a place meanwhile."""
        now_s = self._clock.monotonic_s()
        soon = self._processes and now_s - self._looked_s < _LOOK_S  # others go on meanwhile
        if not self._waiting or soon:
            return []
        self._looked_s = now_s
        placed = [self._waiting.pop(member) for member in self._pool.placed([*self._waiting])]
        for config in placed:
            self._start(config)
        return [MemberSpawned(member=config.member, role=config.role) for config in placed]

    def poll(self, timeout_s: float, written: Mapping[int, int]) -> list[Event | OutboxEntry]:
        """Words of all members that came within `timeout_s`, in order for each member.

        Members keep their words until they are told that those are `written`, by member up to
        which. With the next call the place of one that has died is given back, if nobody has it.
        """
        self._vacancies.give_back()
        if self._untold:
            untold, self._untold = self._untold, []
            return [*untold]
        events: list[Event | OutboxEntry] = [*self._start_placed(), *self._look_for_returned()]
        before_s = self._polled_s
        by_poll = {process.poll: member for member, process in self._processes.items()}
        most_s = _DOUBT_S if self._probes.reach.doubtful else timeout_s
        wait_s = 0.0 if events else min(most_s, timeout_s)
        if not by_poll:  # nobody is there, and it may be long until somebody is
            self._pause.wait(wait_s)
            self._polled_s = self._clock.monotonic_s()
            return events
        ready, _ = ray.wait(list(by_poll), num_returns=1, timeout=wait_s)
        if ready:  # whoever else is ready by now
            ready, _ = ray.wait(list(by_poll), num_returns=len(by_poll), timeout=0)
        self._polled_s = self._clock.monotonic_s()
        for poll in ready:
            member = by_poll[poll]
            try:
                events += self._sorted(member, ray.get(poll))
            except ActorUnavailableError as error:  # cut off: it may be alive
                events.append(MemberLost(member=member, reason=first_line(error), silent=True))
                self.leave_out(member)
                continue
            except RayError as error:  # died, was evicted, or its node or reservation is gone
                events.append(MemberLost(member=member, reason=first_line(error)))
                self._forget(member)
                self._vacancies.add(member)
                continue
            process = self._processes[member]
            self._late_s[member] = max(0.0, before_s - process.due_s)  # then it was not there yet
            self._ask(process, written=written.get(member, 0))
        return events

    def _look_for_returned(self) -> list[Event]:
        """Who was left out, and answers again or has died.

        What it says belongs to a generation that goes on without it.
        """
        events: list[Event] = []
        for member, process in [*self._away.items()]:
            now_s = self._clock.monotonic_s()
            if not ray.wait([process.poll], timeout=0)[0] or now_s < process.again_s:
                continue
            try:
                self._lines += [one for one in ray.get(process.poll) if isinstance(one, LogLines)]
            except ActorUnavailableError:
                process.again_s = now_s + POLL_S
                process.ask_anew(self._term, self._probes.place)
            except RayError as error:
                events.append(MemberLost(member=member, reason=first_line(error)))
                self.release([member])
            else:
                if process.is_back(self._term, self._probes.place):
                    self._returned[member] = self._away.pop(member)
                    late_s = max(0.0, now_s - process.due_s)
                    events.append(MemberReturned(member=member, late_s=late_s))
        return events

    def leave_out(self, member: int) -> None:
        """Listen to a member no more, and look whether its process answers again."""
        if process := self._processes.pop(member, None):
            self._away[member] = process
            self._probes.forget(member)
            self._late_s.pop(member, None)
            self._still_s.pop(member, None)

    def readmit(self, member: int, process: int) -> None:
        """Go on with a process that has returned, as another member."""
        found = self._returned.pop(process, None)
        if found is None:  # it has died since
            self._untold.append(MemberLost(member=member, reason=ENDED))
            return
        self._pool.rename(process, member)
        poll, due_s = found.actor.rejoin.remote(member, self._term), self._clock.monotonic_s()
        self._processes[member] = MemberProcess(actor=found.actor, poll=poll, due_s=due_s + POLL_S)
        self._untold.append(MemberSpawned(member=member))

    def _sorted(
        self, member: int, told: Iterable[OutboxEntry | LogLines | Stalled | Straggling]
    ) -> list[OutboxEntry]:
        """The words of an answer; the rest is kept for who asks for it."""
        self._still_s[member] = 0.0
        words: list[OutboxEntry] = []
        for one in told:
            match one:
                case Stalled():
                    self._still_s[member] = one.seconds
                case Straggling():
                    self._behind[member] = Behind(**asdict(one))
                case LogLines():
                    self._lines.append(one)
                case OutboxEntry():
                    words.append(one)
        return words

    def _ask(self, process: MemberProcess, written: int = 0) -> None:
        process.ask(self._term, self._probes.place, written=written)
        process.due_s = self._clock.monotonic_s() + POLL_S

    def actor(self, member: int) -> Any:
        """The handle of a member's process."""
        return self._processes[member].actor

    def holds(self, member: int) -> bool:
        """Whether there is a process of this member that is listened to."""
        return member in self._processes

    def heard(self) -> Heard:
        """Which members have answered since the last call, and until when the next answers are due.

        As of the end of the last `poll`: what takes its time after that makes nobody late.
        """
        late_s, self._late_s = self._late_s, {}
        behind, self._behind = self._behind, {}
        reach = self._probes.reach
        return Heard(
            looked_s=self._polled_s,
            late_s=late_s,
            due_s={member: process.due_s for member, process in self._processes.items()},
            still_s={member: seconds for member, seconds in self._still_s.items() if seconds > 0.0},
            behind=behind,
            cut_s={member: s for member, s in reach.cut_s.items() if member in self._processes},
            reached=reach.reached,
        )

    def lines(self) -> list[LogLines]:
        """What members' logs have said since the last call; it came with their events."""
        found, self._lines = self._lines, []
        return found

    def form(self, member: int, meeting: Meeting) -> None:
        """Tell a member where to meet the others."""
        if process := self._processes.get(member):
            process.actor.form.remote(meeting, self._term)

    def prepare(self, member: int, number: int, change: Change) -> None:
        """Send a change ahead to a member."""
        if process := self._processes.get(member):
            process.actor.prepare.remote(number, change, self._term)

    def serve(self, layouts: Sequence[ServerNames]) -> None:
        """Tell all members which layouts of servers there are."""
        for process in self._processes.values():
            process.actor.serve.remote(layouts, self._term)

    def release(self, members: Sequence[int]) -> None:
        """End processes and give back what they reserved."""
        for member in members:
            self._forget(member)
        self._pool.drop([member for member in members if member not in self._vacancies])

    def _forget(self, member: int) -> None:
        for held in (self._processes, self._away, self._returned, self._still_s, self._waiting):
            held.pop(member, None)
        self._probes.forget(member)

    def close(self) -> None:
        """End all that is left."""
        self._probes.close()
        self._pool.drop(self._secured)
        self.release([*self._processes, *self._away, *self._returned, *self._waiting])
        self._pool.close()

    def _reserve(self, member: int, node: str | None = None) -> None:
        labels = self._resources.labels
        if node is not None:
            labels = {**labels, NODE_LABEL: node}
        self._pool.reserve(member, self._bundle(), labels)

    def _bundle(self) -> dict[str, float]:
        bundle: dict[str, float] = {"CPU": self._resources.cpus}
        if self._resources.gpus:
            bundle["GPU"] = self._resources.gpus
        if self._resources.memory_bytes:
            # A byte of a node is each server's, and a node may have no more than was asked for.
            bundle["memory"] = max(1, self._resources.memory_bytes - _OF_SERVERS_BYTES)
        return bundle
