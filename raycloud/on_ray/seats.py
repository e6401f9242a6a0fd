"""Seats of several runs: reserved and warm outside them all, granted to one after the other.

They are kept by an actor that belongs to whoever starts the runs, a sweep say, and ends with it. A
run's driver asks it for places as it would ask its own pool. Where a run gives one back, the
process stays: it has loaded torch, and is the next run's member within a moment. One that cannot
leave what it computes is ended, and another is started in its place. Where the process of a driver
ends without a word, all that it held is given back.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.clock import SystemClock
from raycloud.errors import PlacementError, RaycloudError
from raycloud.on_ray.attach import NAMESPACE, draining, hash_seeded, inventory, node_id_here
from raycloud.on_ray.failover import ANSWER_S, RemotePool, answer, asked
from raycloud.on_ray.ingest import pipeline_of
from raycloud.on_ray.pool import ActorPool, Seat, Shape
from raycloud.planner.inventory import capacity
from raycloud.tuning.deal import Want, deal

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.spec.sections import RoleResources

# A process has for leaving what it computes: until then another one would have loaded torch, which
# takes longer still where the cores are others', too.
_LEAVES_S = 3.0
_CLOSES_S = 2.0
_LOOK_S = 0.02  # between two looks whether it has
_WATCH_S = 0.3  # between two looks whether drivers are there
_ROOM_S = 2.0  # between two looks at the machines
_KEPT_S = 20.0  # seats are, where no run leases any
_STARTS = 3  # of who keeps them, one after the other, where each is about to end
_BEAT_S = 0.5
_THREADS = 16


@dataclass(slots=True)
class Leaving:
    """A seat whose process leaves what it computes."""

    seat: Seat
    left: Any
    until_s: float


@dataclass(slots=True)
class Lease:
    """What one run may have.

    Attributes:
        run: Its name.
        pool: What it has.
        want: Its fewest and most members.
        holder: The actor that its driver is in; None: this one ends with it.
        seen: What shows that the holder is there.
        turn: Who calls its pool holds this.
    """

    run: str
    pool: LeasedPool
    want: Want
    holder: Any = None
    seen: Any = None
    turn: Any = field(default_factory=threading.RLock)


class Seats:
    """All seats of one owner. Thread-safe.

    Args:
        name: Begins the names of its placement groups.
        clock: For what takes too long.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.name, self._clock, self.pipelines = name, clock, f"{name}-data"
        self._turn = threading.RLock()
        self._idle: list[Seat] = []
        self._leaving: list[Leaving] = []
        self._pipelines: list[Any] = []
        self._count = 0

    def take(self, shape: Shape) -> Seat:
        """An idle seat, or a new one; idle ones of other shapes stand in nobody's way."""
        with self._turn:
            if (seat := self.take_idle(shape)) is not None:
                return seat
            for other in self._idle:
                other.give_back()
            self._idle.clear()
            self._count += 1
            return shape.reserve(f"{self.name}-{self._count}")

    def take_idle(self, shape: Shape) -> Seat | None:
        """A seat that nobody has, if there is one; rather one with a process."""
        with self._turn:
            self._leave_drained()
            fitting = [seat for seat in self._idle if seat.shape == shape and seat.is_there]
            found = max(fitting, key=lambda seat: seat.actor is not None, default=None)
            if found is not None:
                self._idle.remove(found)
            return found

    def _leave_drained(self) -> None:
        """Keep no seat on a node that is going to be gone."""
        leaving = set(draining(self._clock)) if self._idle else set()
        for seat in [seat for seat in self._idle if leaving and not leaving.isdisjoint(seat.nodes)]:
            self._idle.remove(seat)
            seat.give_back()

    def spare(self, shape: Shape) -> int:
        """How many seats nobody has, or soon will not."""
        with self._turn:
            self._leave_drained()
            others = (*self._idle, *(one.seat for one in self._leaving))
            return sum(seat.shape == shape for seat in others)

    def put(self, seat: Seat, term: int, *, fresh: bool) -> None:
        """Take a seat back from the run of this term; `fresh`: the next one needs a new process."""
        with self._turn:
            if not seat.is_there:
                seat.give_back()
            elif seat.actor is None or fresh:
                seat.end()
                self._warm(seat)
            else:
                until_s = self._clock.monotonic_s() + _LEAVES_S
                left = seat.actor.end.remote(term, seat.begun)
                self._leaving.append(Leaving(seat, left, until_s))

    def tidy(self) -> bool:
        """See who has left; whether others are still to."""
        with self._turn:
            for one in [*self._leaving]:
                left, _ = ray.wait([one.left], timeout=0)
                if not left and self._clock.monotonic_s() < one.until_s:
                    continue
                self._leaving.remove(one)
                try:
                    ray.get(one.left, timeout=0)
                except RayError:
                    one.seat.end()
                    self._warm(one.seat)
                else:
                    self._idle.append(one.seat)
            return bool(self._leaving)

    def _warm(self, seat: Seat) -> None:
        """Start a process in a seat, that loads what it will need; then the seat is idle."""
        if seat.is_there:
            seat.start([], 0)
            self._idle.append(seat)
        else:
            seat.give_back()

    def pipeline(self, name: str, config: Sequence[Any], home: str) -> Any:
        """A pipeline of several runs, made if it is not there."""
        with self._turn:
            _, pipeline = pipeline_of(name, config[0], home)
            self._pipelines.append(pipeline)  # all handles: Ray ends it with the first one
            return pipeline

    def close(self) -> None:
        """Give all back that nobody has."""
        with self._turn:
            for pipeline in self._pipelines:
                ray.kill(pipeline)
            self._pipelines.clear()
            for seat in (*self._idle, *(one.seat for one in self._leaving)):
                seat.give_back()
            self._idle, self._leaving = [], []


class LeasedPool(ActorPool):
    """One run's part of the seats, in their process."""

    def __init__(self, seats: Seats, term: int, clock: Clock, *, fresh: bool) -> None:
        super().__init__(clock)
        self._shared, self.term, self._fresh = seats, term, fresh
        self.pipelines, self.groups = seats.pipelines, seats.name

    def start_pipeline(self, name: str, config: Sequence[Any], home: str) -> Any:
        """See `ActorPool.start_pipeline`; it may be other runs', too."""
        if name.startswith(self.pipelines):
            return self._shared.pipeline(name, config, home)
        return super().start_pipeline(name, config, home)

    def spare(self, bundle: Mapping[str, float], labels: Mapping[str, str]) -> int:
        """See `ActorPool.spare`."""
        return self._shared.spare(Shape.of(bundle, labels))

    def _take(self, shape: Shape) -> Seat:
        return self._shared.take(shape)

    def _is_there(self, member: int) -> bool:
        seat = self._seats[member]
        if seat.is_there:
            return True
        idle = self._shared.take_idle(seat.shape)  # another run has given it back
        if idle is not None:
            seat.give_back()
            self._seats[member] = idle
        return idle is not None

    def _put(self, seat: Seat) -> None:
        self._shared.put(seat, self.term, fresh=self._fresh)


@ray.remote(num_cpus=0)
class SeatsActor:
    """The seats of one owner, with what several drivers have leased of them.

    Args:
        name: Of this actor.
        resources: Of a seat.
        ends: Where nobody has leased any for a while, it ends itself.
    """

    def __init__(self, name: str, resources: RoleResources, *, ends: bool = False) -> None:
        give_back_all(name)  # what this process had reserved before it was started again
        self._me = ray.get_runtime_context().current_actor if ends else None
        self._over = False  # it ends: whoever needs seats starts another one
        self._clock, self._resources, self._expected = SystemClock(), resources, 0
        self._room = capacity(inventory(), resources)
        self._seats = Seats(name, self._clock)
        self._leases: dict[int, Lease] = {}
        self._terms = int(1000 * self._clock.unix_s())  # above all that there were before
        self._turn = threading.RLock()
        self._wake = threading.Event()
        threading.Thread(target=self._tidy, name="tidy", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def expect(self, runs: int) -> None:
        """So many runs are to share the seats: what is not there yet has its part, too."""
        self._expected = runs

    def open(
        self, run: str, want: Want, holder: Sequence[Any], *, fresh: bool
    ) -> tuple[int, str] | None:
        """Lease seats to a run. One that it had before, by another driver, is over.

        Args:
            run: Its name.
            want: Its fewest and most members.
            holder: The actor that its driver is in, or nothing.
            fresh: Its processes are of no use to other runs.

        Returns:
            Its term, and with what the names of shared pipelines begin; None: this is about to end.
        """
        with self._turn:
            if self._over:
                return None
            self.end(run)
            self._terms += 1
            pool = LeasedPool(self._seats, self._terms, self._clock, fresh=fresh)
            self._leases[self._terms] = Lease(run, pool, want, holder[0] if holder else None)
            return self._terms, self._seats.pipelines

    def end(self, run: str) -> None:
        """End the lease of a run: what it has is given back, and then its driver hears of it."""
        for term, lease in [*self._leases.items()]:
            if lease.run == run:
                self.call(term, "close")

    def allotted(self, term: int) -> int:
        """How many members a run may have now; 0: it has no lease."""
        leases = self._leases.copy()  # one may end meanwhile
        if term not in leases:
            return 0
        dealt = deal(self._room, [lease.want for lease in leases.values()], self._expected)
        return max(1, dealt[[*leases].index(term)])  # its driver asks for its fewest, and waits

    def call(self, term: int, method: str, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Whether this run has a lease, and then what a method of `ActorPool` returns."""
        lease = self._leases.get(term)
        if lease is None:
            return False, None
        with lease.turn:  # what is under way is over before it is closed
            if term not in self._leases:
                return False, None
            found = getattr(lease.pool, method)(*args, **kwargs)
            if method == "close":
                self._leases.pop(term)
        self._wake.set()
        return True, found

    def close(self) -> None:
        """Give everything back."""
        with self._turn:
            for term in [*self._leases]:
                self.call(term, "close")
            self._seats.close()

    def _tidy(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            pause = threading.Event()
            while self._seats.tidy():
                pause.wait(_LOOK_S)

    def _watch(self) -> None:
        """See whose driver has ended without a word, and give back what nobody leases."""
        pause = threading.Event()
        leased_s = looked_s = self._clock.monotonic_s()
        while True:
            pause.wait(_WATCH_S)
            now_s = self._clock.monotonic_s()
            leased_s = now_s if self._leases else leased_s
            with contextlib.suppress(RayError):  # the cluster is going away itself
                if now_s - looked_s >= _ROOM_S:
                    looked_s, self._room = now_s, capacity(inventory(), self._resources)
                if now_s - leased_s >= _KEPT_S:
                    self._give_back()
                for term, lease in [*self._leases.items()]:
                    if lease.holder is not None and self._is_gone(lease):
                        self.call(term, "close")

    def _give_back(self) -> None:
        """Nobody has leased any for a while."""
        with self._turn:
            if self._leases:
                return
            self._over = self._me is not None
        try:
            self._seats.close()
        finally:
            if self._me is not None:
                ray.kill(self._me)

    def _is_gone(self, lease: Lease) -> bool:
        if lease.seen is None:
            lease.seen = lease.holder.__ray_ready__.remote()
        try:
            ray.get(lease.seen, timeout=0)
        except GetTimeoutError:  # it is busy
            return False
        except RayError:
            return True
        lease.seen = None
        return False


def give_back_all(name: str) -> None:
    """Remove the placement groups of the seats of this owner, whoever has made them."""
    from ray.util.placement_group import get_placement_group

    for found in placement_group_table().values():
        if str(found.get("name", "")).startswith(f"{name}-") and found.get("state") != "REMOVED":
            with contextlib.suppress(ValueError, RayError):
                remove_placement_group(get_placement_group(found["name"]))


class LeaseEndedError(KeyboardInterrupt):
    """The owner of the seats wants them back: the run ends at once, as by a second Ctrl-C."""


class SeatsLease(RemotePool):
    """A run's part of the seats, as its driver asks for it."""

    def __init__(self, actor: Any, term: int, most: int, pipelines: str, clock: Clock) -> None:
        self.most, self.pipelines = most, pipelines
        super().__init__(actor, term, clock, beat_s=_BEAT_S)

    spare = asked(ActorPool.spare)

    def drop(self, members: Sequence[int]) -> None:
        """See `ActorPool.drop`; it is done before anything else is asked: calls have no order."""
        with contextlib.suppress(RaycloudError):
            answer(self._actor.call.remote(self.term, "drop", tuple(members)))

    def check(self) -> None:
        """See that the run has a lease, as far as the last heartbeat knows.

        Raises:
            LeaseEndedError: It has none any more.
        """
        if self._superseded:
            raise LeaseEndedError

    def close(self) -> None:
        """Give all back that the run has."""
        self.stop_beats()
        with contextlib.suppress(RaycloudError):
            answer(self._actor.call.remote(self.term, "close"))

    def _send_heartbeat(self) -> None:
        now_s = self._clock.monotonic_s()
        most = answer(self._actor.allotted.remote(self.term))
        self._know(now_s, obeyed=most > 0)
        self.most = most or self.most


@dataclass
class SeatsHandle:
    """Seats that runs are given places from; it travels to their drivers.

    The actor is there as long as the handle of who has started it, or starts where a run needs it
    and ends itself. A copy that has travelled finds it by its name, once it is asked: Ray Tune
    keeps what trials are told until its process ends, and where an actor was started a handle that
    is found there, and let go, would end it.

    Attributes:
        name: Of the actor that keeps them.
        started: That, where it was started.
        resources: Of a seat, where it is to be started by who needs it first.
    """

    name: str
    started: Any = None
    resources: RoleResources | None = None
    clock: Clock = field(default_factory=SystemClock)

    @classmethod
    def start(cls, resources: RoleResources) -> SeatsHandle:
        """Keep seats from now on, on this node, until the process that asks for it ends."""
        name = _name()
        return cls(name, _options(name).remote(name, resources))

    @classmethod
    def when_needed(cls, resources: RoleResources) -> SeatsHandle:
        """Keep seats from the first lease on, until there was none for 20 s; and again from then.

        Whatever process asks first starts it, and it does not end with that.
        """
        return cls(_name(), resources=resources)

    @property
    def actor(self) -> Any:
        """What keeps them; a `PlacementError` where whoever started it is gone."""
        if self.started is not None:
            return self.started
        try:
            return ray.get_actor(self.name)
        except ValueError as error:  # what Ray says of a name that nobody has
            raise PlacementError(
                f"the seats {self.name} of these trials are gone",
                hint="see whether the process that has started them is still there",
            ) from error

    def __reduce__(self) -> Any:
        """By its name."""
        return SeatsHandle, (self.name, None, self.resources)

    @contextlib.contextmanager
    def lease(self, run: str, fewest: int, most: int, *, fresh: bool) -> Iterator[SeatsLease]:
        """Lease seats to a run that this process drives."""
        here = ray.get_runtime_context()
        holder = [here.current_actor] if here.get_actor_id() else []
        actor, (term, pipelines) = self._opened(run, Want(fewest, most), holder, fresh=fresh)
        now = answer(actor.allotted.remote(term))
        pool = SeatsLease(actor, term, now, pipelines, self.clock)
        try:
            yield pool
        finally:
            pool.close()

    def _opened(
        self, run: str, want: Want, holder: Sequence[Any], *, fresh: bool
    ) -> tuple[Any, tuple[int, str]]:
        """The actor, and what its `open` returns; where they end by themselves, of the newest."""
        if self.resources is None:
            return self.actor, answer(self.actor.open.remote(run, want, holder, fresh=fresh))
        more = {"lifetime": "detached", "get_if_exists": True, "namespace": NAMESPACE}
        numbers = self._numbers()
        # One that has ended has its name for a moment yet: each has a name of its own.
        for number in range(max(numbers, default=0), max(numbers, default=0) + _STARTS):
            name = f"{self.name}-{number}"
            with contextlib.suppress(RayError, ValueError):
                actor = _options(name, **more).remote(name, self.resources, ends=True)
                opened = ray.get(
                    actor.open.remote(run, want, holder, fresh=fresh), timeout=ANSWER_S
                )
                if opened is not None:
                    return actor, opened
        raise PlacementError(
            f"the seats {self.name} of these trials end as soon as they are started",
            hint="look for the kernel's word on memory (dmesg) on the node of the trials",
        )

    def _numbers(self) -> list[int]:
        """Of the actors there are by this name that end by themselves."""
        named = ray.util.list_named_actors(all_namespaces=True)
        after = [one["name"].removeprefix(f"{self.name}-") for one in named]
        return [int(one) for one in after if one.isdecimal()]

    def expect(self, runs: int) -> None:
        """See `SeatsActor.expect`."""
        answer(self.actor.expect.remote(runs))

    def end(self, run: str) -> None:
        """See `SeatsActor.end`."""
        if self.resources is None:
            answer(self.actor.end.remote(run))
            return
        for number in self._numbers():
            with contextlib.suppress(RayError, ValueError):  # it has ended, and with it all leases
                actor = ray.get_actor(f"{self.name}-{number}", namespace=NAMESPACE)
                ray.get(actor.end.remote(run), timeout=ANSWER_S)

    def close(self) -> None:
        """End it."""
        actor = self.actor
        with contextlib.suppress(RayError):
            ray.get(actor.close.remote(), timeout=_CLOSES_S)
        ray.kill(actor)
        give_back_all(self.name)  # where it was not done by then


def _name() -> str:
    return f"raycloud-seats-{secrets.token_hex(8)}"


def _options(name: str, **more: Any) -> Any:
    """Of the actor, on this node."""
    return SeatsActor.options(  # type: ignore[attr-defined]
        name=name,
        max_restarts=-1,
        max_concurrency=_THREADS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id_here(), soft=False),
        **hash_seeded(),
        **more,
    )
