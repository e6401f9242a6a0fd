"""Failover of the driver: what a start makes outlives it, and a later start goes on with it.

On a cluster that was there before, a run's pool is a detached actor on the driver's node. It obeys
one driver at a time, the one of the newest term, and ends itself once no driver speaks to it. Where
a driver was killed, `train --resume` takes over the members that are left.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud import __version__
from raycloud.checkpoint import Manifest
from raycloud.clock import SystemClock
from raycloud.control.membership import Adoption
from raycloud.errors import MachineError, RaycloudError, RunDirectoryError
from raycloud.events import MemberLost, Noticed, RunStarted
from raycloud.on_ray.attach import hash_seeded, node_id_here
from raycloud.on_ray.pool import ActorPool, SupersededError
from raycloud.on_ray.session import Origin
from raycloud.order import read_ledger
from raycloud.spec.load import dump_job

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.events import Event
    from raycloud.on_ray.session import Session
    from raycloud.report.recorder import Recorder
    from raycloud.worker.outbox import Survivor

LEASE_S = 10.0  # a driver that is silent for so long may be followed by another
ANSWER_S = 30.0  # so long a driver waits for what it has asked for
_LOOK_S = 0.5
_BEAT_S = 2.0
_SURE_S = LEASE_S - 2 * _BEAT_S  # so long after it was heard nobody can have followed a driver
_RETRY_S = 0.2
_SURVIVOR_S = 4.0  # a member that says nothing for so long is frozen, or cut off

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Terms:
    """Which driver a pool obeys, and whether there is one. Any thread may ask.

    A pool that no driver speaks to for `orphan_s` is an orphan.
    """

    def __init__(self, clock: Clock, orphan_s: float) -> None:
        self._clock, self._orphan_s = clock, orphan_s
        self._lock = ""
        self._heard_s = clock.monotonic_s()
        self._called_s: float | None = None  # since when a call is carried out
        self._over = False
        self._turn = threading.Lock()
        self.term = 0

    def claim(self, lock: str) -> int | None:
        """A driver wants to be obeyed: its term; None while the one before it may be alive.

        `lock` names the lock on the run's log that it holds, so that whoever held it before is
        dead; it is empty where the file system has none.
        """
        with self._turn:
            dead = bool(lock) and lock == self._lock
            if self._over or (self.term and not dead and self._silent_s() < LEASE_S):
                return None
            self.term, self._lock = self.term + 1, lock
            self._heard_s = self._clock.monotonic_s()
            return self.term

    def heartbeat(self, term: int) -> bool:
        """A driver speaks; whether it is the one that is obeyed."""
        with self._turn:
            if term != self.term:
                return False
            self._heard_s = self._clock.monotonic_s()
            return True

    @contextlib.contextmanager
    def calling(self, term: int) -> Iterator[bool]:
        """While a driver's call is carried out it is heard, as long as it waits for it.

        Yields whether it is the one that is obeyed.
        """
        if not self.heartbeat(term):
            yield False
            return
        with self._turn:
            self._called_s = self._heard_s
        try:
            yield True
        finally:
            with self._turn:
                self._heard_s = self._clock.monotonic_s() - self._silent_s()
                self._called_s = None

    def end_if_orphan(self) -> bool:
        """Whether no driver has spoken for too long; then none can claim the pool any more."""
        with self._turn:
            self._over = self._over or self._silent_s() >= self._orphan_s
            return self._over

    def _silent_s(self) -> float:
        heard_s, now_s = self._heard_s, self._clock.monotonic_s()
        if self._called_s is not None:
            heard_s = max(heard_s, min(now_s, self._called_s + ANSWER_S))
        return now_s - heard_s


@ray.remote(num_cpus=0)
class PoolActor:
    """A pool in a process of its own. It ends itself once it is an orphan."""

    def __init__(self, orphan_s: float) -> None:
        self._pool = ActorPool(SystemClock())
        self._terms = Terms(SystemClock(), orphan_s)
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def claim(self, lock: str) -> int | None:
        """See `Terms.claim`."""
        return self._terms.claim(lock)

    def heartbeat(self, term: int) -> bool:
        """See `Terms.heartbeat`."""
        return self._terms.heartbeat(term)

    def call(self, term: int, method: str, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Whether this driver is obeyed, and then what a method of `ActorPool` returns."""
        with self._terms.calling(term) as obeyed:
            self._pool.term = term if obeyed else self._pool.term  # what it starts obeys that one
            return obeyed, getattr(self._pool, method)(*args, **kwargs) if obeyed else None

    def _watch(self) -> None:
        pause = threading.Event()
        while not self._terms.end_if_orphan():
            pause.wait(_LOOK_S)
        try:
            self._pool.close()
        finally:
            ray.kill(self._me)


def asked(
    method: Callable[Concatenate[ActorPool, _P], _R],
) -> Callable[Concatenate[RemotePool, _P], _R]:
    """The same method, of the pool in the other process."""

    def ask(self: RemotePool, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        found: _R = self._ask(method.__name__, *args, **kwargs)
        return found

    return ask


class RemotePool(ActorPool):
    """A run's pool in another process, as the driver of one term asks it."""

    def __init__(self, actor: Any, term: int, clock: Clock, *, beat_s: float = _BEAT_S) -> None:
        self.term, self._beat_s = term, beat_s
        self._actor, self._clock = actor, clock
        self._heard_s = clock.monotonic_s()  # the pool has heard this driver then, or later
        self._over, self._superseded = threading.Event(), False
        self._beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beats.start()

    @classmethod
    def start_new(cls, session: Session, recorder: Recorder) -> RemotePool:
        """Start a pool on this node."""
        options = PoolActor.options(  # type: ignore[attr-defined]
            name=pool_name(session, recorder),
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id_here(), soft=False),
            **hash_seeded(always=True),  # what it makes inherits that
        )
        pause, until_s = threading.Event(), session.clock.monotonic_s() + ANSWER_S
        while True:
            try:
                actor = options.remote(session.job.elastic.orphan_s)
                break
            except ValueError:  # one that has ended has the name for a moment
                if session.clock.monotonic_s() >= until_s:
                    raise
            pause.wait(_RETRY_S)
        actor.claim.remote(recorder.lock)
        return cls(actor, 1, session.clock)

    @classmethod
    def claim_left(cls, session: Session, recorder: Recorder) -> RemotePool | None:
        """Follow a driver that is gone; None where there is no pool any more.

        Raises:
            RunDirectoryError: Another driver drives the run.
            MachineError: The pool does not answer.
        """
        try:
            actor = ray.get_actor(pool_name(session, recorder))
            term = _claimed(actor, recorder.lock, session.clock)
        except GetTimeoutError as error:
            raise MachineError(
                f"the process that holds the run's workers did not answer within {ANSWER_S:g} s",
                hint="look at the node that the run was started on, then try `--resume` again",
            ) from error
        except (ValueError, RayError):  # it ended meanwhile
            return None
        return cls(actor, term, session.clock)

    def check(self) -> None:
        """See that this driver is still obeyed; asks where it has not been heard for long.

        Raises:
            SupersededError: Another has taken the run over.
            MachineError: The pool is gone.
        """
        if not self._superseded and self._clock.monotonic_s() - self._heard_s > _SURE_S:
            self._send_heartbeat()
        if self._superseded:
            raise SupersededError(
                "another process has taken this run over, since this one stood still for too long",
                hint="it goes on there; see `raycloud status`",
            )

    reserve = asked(ActorPool.reserve)
    placed = asked(ActorPool.placed)
    start = asked(ActorPool.start)
    reassign = asked(ActorPool.reassign)
    rename = asked(ActorPool.rename)
    keep = asked(ActorPool.keep)
    start_collators = asked(ActorPool.start_collators)
    start_pipeline = asked(ActorPool.start_pipeline)
    remember = asked(ActorPool.remember)
    found = asked(ActorPool.found)

    def drop(self, members: Sequence[int]) -> None:
        """See `ActorPool.drop`."""
        with contextlib.suppress(RayError):
            self._actor.call.remote(self.term, "drop", tuple(members))

    def close(self) -> None:
        """End all that the pool holds, and the pool; nothing, if another driver is obeyed."""
        self.stop_beats()
        with contextlib.suppress(RayError):
            if ray.get(self._actor.heartbeat.remote(self.term), timeout=ANSWER_S):
                ray.get(self._actor.call.remote(self.term, "close"), timeout=ANSWER_S)
                ray.kill(self._actor)

    def stop_beats(self) -> None:
        """Speak to the pool no more by itself."""
        self._over.set()
        self._beats.join(ANSWER_S)

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        now_s = self._clock.monotonic_s()
        obeyed, found = answer(self._actor.call.remote(self.term, method, *args, **kwargs))
        self._know(now_s, obeyed=obeyed)
        self.check()
        return found

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s) and not self._superseded:
            with contextlib.suppress(MachineError):  # who asks it for something will know
                self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        now_s = self._clock.monotonic_s()
        self._know(now_s, obeyed=answer(self._actor.heartbeat.remote(self.term)))

    def _know(self, asked_s: float, *, obeyed: bool) -> None:
        self._superseded |= not obeyed
        self._heard_s = max(self._heard_s, asked_s)


def pool_name(session: Session, recorder: Recorder) -> str:
    """The name of a run's pool: that of no other run, and the same however often it goes on."""
    run = f"{recorder.first_t:.6f} {session.checkpoints}"
    return f"raycloud-run-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


def answer(call: Any) -> Any:
    """What the pool answers.

    Raises:
        MachineError: It is gone.
    """
    try:
        return ray.get(call, timeout=ANSWER_S)
    except RayError as error:
        raise MachineError(
            f"the process that holds the run's workers is gone: {type(error).__name__}",
            hint="look for the kernel's word on memory (dmesg) on the node of the command, then go "
            "on with `raycloud train --resume`",
        ) from error


def _claimed(actor: Any, lock: str, clock: Clock) -> int:
    """This driver's term with a pool, once the driver before it is known to be dead."""
    pause, until_s = threading.Event(), clock.monotonic_s() + LEASE_S + 2 * _BEAT_S
    while True:
        term: int | None = ray.get(actor.claim.remote(lock), timeout=ANSWER_S)
        if term is not None:
            return term
        if clock.monotonic_s() >= until_s:
            raise RunDirectoryError(
                "another process drives this run, on a cluster that is the same",
                hint="wait until it ends, or end it, before going on with its run",
            )
        pause.wait(_RETRY_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failover:
    """Members that have outlived their driver, by rank, with their handles and what they know.

    `origin` is where they are, `adoption` what control begins with, `roles` those that were chosen
    for nodes, as a record; None: there are none.
    """

    survivors: tuple[Survivor, ...]
    actors: Mapping[int, Any]
    origin: Origin
    pipeline: str
    collators: tuple[str, ...]
    adoption: Adoption
    roles: Mapping[str, Any] | None = None


@contextlib.contextmanager
def outliving(
    session: Session, recorder: Recorder
) -> Iterator[tuple[RemotePool, Failover | None, tuple[Event, ...]]]:
    """Let what a start makes outlive it if it is killed; and take over what the last one has left.

    Yields:
        The pool, the members to go on with, and what the log is told of those that were left and
        could not be taken over: they have ended.

    Raises:
        RunDirectoryError: Another driver drives the run.
    """
    pool = RemotePool.claim_left(session, recorder) if session.resume else None
    found: Failover | None = None
    told: tuple[Event, ...] = ()
    with contextlib.ExitStack() as held:
        if pool is not None:
            held.callback(pool.close)
            found, why = _failover(session, recorder, pool)
            if found is None:
                held.close()
                what = "workers were left, and could not be taken over"
                told = (Noticed(what=what, detail={"why": why}),)
        if pool is None or found is None:
            pool = RemotePool.start_new(session, recorder)
            held.callback(pool.close)
            pool.remember(_must_match(session))
        yield pool, found, told


def _failover(
    session: Session, recorder: Recorder, pool: RemotePool
) -> tuple[Failover | None, str]:
    """The members to go on with; or why there are none."""
    if session.job.servers.shards:
        return None, "the servers end with their driver"
    known, actors, collators = pool.found()
    if "pipeline" not in (known or {}):  # a pool of an older version says None
        return None, "they had not begun"
    for name, value in _must_match(session).items():
        if known[name] != value:
            return None, f"the {name} is another one"
    ready = {member: actor for member, actor in actors.items() if member in recorder.tally.ready}
    survivors = _survivors(ready, recorder.written, pool.term)
    if not survivors:
        return None, "none of them has the state of the training"
    if any(one.grown for one in survivors):
        return None, "the data has grown since they began"
    try:
        with session.directory.ledger.open(encoding="utf-8") as file:
            ledger = read_ledger(file)
    except RaycloudError as error:
        return None, error.message
    if ledger.sizes.most != survivors[0].ready.samples:
        return None, "the ledger is of other data"
    members = {one.member for one in survivors}
    lost = tuple(m for m in _newest(survivors).members if m not in members)
    pool.keep(tuple(members))
    published = recorder.tally.checkpoint
    adoption = Adoption(
        readies=tuple(one.ready for one in survivors),
        steps=recorder.tally.reported,
        skips={m: skips for m, skips in recorder.state.skips.items() if m in members},
        lost=lost,
        changes=max(one.changes for one in survivors),
        published=None if published is None else published.step,
        began_s=session.began_s,
    )
    taken_over = tuple(one.member for one in survivors)
    started = RunStarted(job=session.job.name, version=__version__, taken_over=taken_over)
    began, why = known["origin"], "it did not outlive its driver"
    origin = Origin(
        manifest=None if began is None else Manifest.from_bytes(began, "what the run began with"),
        step=ledger.next_step,
        position=ledger.newest,
        ledger=ledger.state(),
        generation=max(one.newest for one in survivors),
        opening=(started, *(MemberLost(member=member, reason=why) for member in lost)),
    )
    return Failover(
        survivors=survivors,
        actors={one.member: actors[one.member] for one in survivors},
        origin=origin,
        pipeline=known["pipeline"],
        collators=collators,
        adoption=adoption,
        roles=known.get("roles"),
    ), ""


def _must_match(session: Session) -> dict[str, Any]:
    """What has to be the same for members to go on as they are; else it is another run by now."""
    return {
        "version of raycloud": __version__,
        "job": dump_job(session.asked),
        "task's code": session.code.digest,
    }


def _survivors(
    actors: Mapping[int, Any], written: Mapping[int, int], term: int
) -> tuple[Survivor, ...]:
    """Those of the newest generation that answer and have the state, by rank."""
    calls = {actor.survivor.remote(written.get(m, 0), term): m for m, actor in actors.items()}
    if not calls:
        return ()
    answered, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_SURVIVOR_S)
    found: dict[int, Survivor] = {}
    for call in answered:
        with contextlib.suppress(RayError):  # it has died
            one = ray.get(call)
            if one is not None:
                found[one.member] = one
    members = _newest(tuple(found.values())).members if found else ()
    return tuple(found[member] for member in members if member in found)


def _newest(survivors: tuple[Survivor, ...]) -> Survivor:
    """One that has stood in the newest generation: others may be on their way into it."""
    return max(survivors, key=lambda one: one.generation)
