"""A driver's time with a keeper: no other drives the run meanwhile, and the keeper hears of it."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.errors import MachineError, RunDirectoryError
from raycloud.on_ray.cluster import hash_seeded
from raycloud.on_ray.keeper import ANSWER_S, LEASE_S, FollowedError, KeeperActor
from raycloud.on_ray.sources import here

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from raycloud.clock import Clock
    from raycloud.on_ray.keeper import Opaque
    from raycloud.on_ray.session import Session
    from raycloud.report.recorder import Recorder

_BEAT_S = 2.0
_SURE_S = LEASE_S - 2 * _BEAT_S  # so long after it was heard nobody can have followed a driver
_TURN_S = 0.2
_FIRST = 1  # the number of the first driver that a keeper obeys


def keeper_name(session: Session, recorder: Recorder) -> str:
    """The name of a run's keeper: that of no other run, and the same however often it goes on."""
    run = f"{recorder.first_t:.6f} {session.checkpoints}"
    return f"raycloud-run-{hashlib.sha256(run.encode()).hexdigest()[:16]}"


class Tenure:
    """The keeper of a run, as the driver that it obeys asks it; it has the methods of `Keeper`.

    Args:
        actor: The keeper.
        number: That of this driver.
        clock: Where seconds come from.

    Attributes:
        number: The same.
    """

    def __init__(self, actor: Any, number: int, clock: Clock) -> None:
        """Begin to speak to the keeper now and then, from a thread."""
        self.number = number
        self._actor, self._clock = actor, clock
        self._heard_s = clock.monotonic_s()  # the keeper has heard it then, or later
        self._over, self._followed = threading.Event(), False
        self._beats = threading.Thread(target=self._beat, name="tenure", daemon=True)
        self._beats.start()

    @classmethod
    def begin(cls, session: Session, recorder: Recorder) -> Tenure:
        """Start a keeper on this node."""
        options = KeeperActor.options(  # type: ignore[attr-defined]
            name=keeper_name(session, recorder),
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(here(), soft=False),
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
            pause.wait(_TURN_S)
        actor.claim.remote(recorder.lock)
        return cls(actor, _FIRST, session.clock)

    @classmethod
    def follow(cls, session: Session, recorder: Recorder) -> Tenure | None:
        """Follow a driver that is gone; None where there is no keeper any more.

        Raises:
            RunDirectoryError: Another driver drives the run.
            MachineError: The keeper does not answer.
        """
        try:
            actor = ray.get_actor(keeper_name(session, recorder))
            number = _claimed(actor, recorder.lock, session.clock)
        except GetTimeoutError as error:
            raise MachineError(
                f"the process that holds the run's workers did not answer within {ANSWER_S:g} s",
                hint="look at the node that the run was started on, then try `--resume` again",
            ) from error
        except (ValueError, RayError):  # it ended meanwhile
            return None
        return cls(actor, number, session.clock)

    def check(self) -> None:
        """Whether this driver is still obeyed; asks where it has not been heard for long.

        Raises:
            FollowedError: Another has taken the run over.
            MachineError: The keeper is gone.
        """
        if not self._followed and self._clock.monotonic_s() - self._heard_s > _SURE_S:
            self._hear()
        if self._followed:
            raise FollowedError(
                "another process has taken this run over, since this one stood still for too long",
                hint="it goes on there; see `raycloud status`",
            )

    def reserve(
        self, member: int, bundle: Mapping[str, float], labels: Mapping[str, str]
    ) -> PlacementGroup:
        """See `Keeper.reserve`."""
        group: PlacementGroup = self._ask("reserve", member, dict(bundle), dict(labels))
        return group

    def start(self, member: int, config: Opaque, cpus: int, gpus: int) -> Any:
        """See `Keeper.start`."""
        return self._ask("start", member, config, cpus, gpus)

    def drop(self, members: Sequence[int]) -> None:
        """See `Keeper.drop`."""
        with contextlib.suppress(RayError):
            self._actor.call.remote(self.number, "drop", tuple(members))

    def hand_on(self, before: int, member: int) -> PlacementGroup | None:
        """See `Keeper.hand_on`."""
        group: PlacementGroup | None = self._ask("hand_on", before, member)
        return group

    def rename(self, before: int, member: int) -> None:
        """See `Keeper.rename`."""
        self._ask("rename", before, member)

    def keep(self, members: Sequence[int]) -> None:
        """See `Keeper.keep`."""
        self._ask("keep", tuple(members))

    def crew(self, count: int, name: str, config: Opaque) -> tuple[str, ...]:
        """See `Keeper.crew`."""
        return tuple(self._ask("crew", count, name, config))

    def pipeline(self, name: str, config: Opaque, home: str) -> Any:
        """See `Keeper.pipeline`."""
        return self._ask("pipeline", name, config, home)

    def remember(self, known: Mapping[str, Any]) -> None:
        """See `Keeper.remember`."""
        self._ask("remember", dict(known))

    def found(self) -> tuple[dict[str, Any], dict[int, Any], tuple[str, ...]]:
        """See `Keeper.found`."""
        known, members, collators = self._ask("found")
        return known, members, collators

    def close(self) -> None:
        """End all that the keeper holds, and the keeper; nothing, if another driver is obeyed."""
        self._over.set()
        self._beats.join(ANSWER_S)
        with contextlib.suppress(RayError, GetTimeoutError):
            if ray.get(self._actor.hear.remote(self.number), timeout=ANSWER_S):
                ray.get(self._actor.call.remote(self.number, "close"), timeout=ANSWER_S)
                ray.kill(self._actor)

    def _ask(self, method: str, *args: Any) -> Any:
        now_s = self._clock.monotonic_s()
        obeyed, found = _asked(self._actor.call.remote(self.number, method, *args))
        self._know(now_s, obeyed=obeyed)
        self.check()
        return found

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_S) and not self._followed:
            with contextlib.suppress(MachineError):  # who asks it for something will know
                self._hear()

    def _hear(self) -> None:
        now_s = self._clock.monotonic_s()
        self._know(now_s, obeyed=_asked(self._actor.hear.remote(self.number)))

    def _know(self, asked_s: float, *, obeyed: bool) -> None:
        self._followed |= not obeyed
        self._heard_s = max(self._heard_s, asked_s)


def _asked(call: Any) -> Any:
    try:
        return ray.get(call, timeout=ANSWER_S)
    except (RayError, GetTimeoutError) as error:
        raise MachineError(
            f"the process that holds the run's workers is gone: {type(error).__name__}",
            hint="look for the kernel's word on memory (dmesg) on the node of the command, then go "
            "on with `raycloud train --resume`",
        ) from error


def _claimed(actor: Any, lock: str, clock: Clock) -> int:
    """The number by which a keeper knows this driver, once the one before it is known to be dead.

    Raises:
        RunDirectoryError: It is not.
    """
    pause, until_s = threading.Event(), clock.monotonic_s() + LEASE_S + 2 * _BEAT_S
    while True:
        number: int | None = ray.get(actor.claim.remote(lock), timeout=ANSWER_S)
        if number is not None:
            return number
        if clock.monotonic_s() >= until_s:
            raise RunDirectoryError(
                "another process drives this run, on a cluster that is the same",
                hint="wait until it ends, or end it, before going on with its run",
            )
        pause.wait(_TURN_S)
