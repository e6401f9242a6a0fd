"""Reaches a run's workers wherever they are: an actor on each of their nodes does the harm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycloud.faults import NO_CONNECTION, Action, LocalHands, NoConnectionError

if TYPE_CHECKING:
    from raycloud.faults.injector import Ends

_ANSWER_S = 10.0


@ray.remote(num_cpus=0, max_restarts=0)
class HandsActor:
    """The hands on one node; what cannot be done is returned as words."""

    def __init__(self) -> None:
        """Hold nobody."""
        self._hands = LocalHands()

    def hold(self, member: int, node: str, pid: int) -> str:
        """See `Hands.hold`."""
        return _why(self._hands.hold, member, node, pid)

    def harm(self, member: int, action: str) -> str:
        """See `Hands.harm`; not for connections, which have another end."""
        return _why(self._hands.harm, member, Action(action))

    def ends(self, member: int) -> list[Ends]:
        """See `LocalHands.ends`."""
        return self._hands.ends(member)

    def cut(self, member: int, others: list[Ends]) -> str:
        """See `LocalHands.cut`."""
        return _why(self._hands.cut, member, set(others))

    def thaw(self, member: int) -> None:
        """See `Hands.thaw`."""
        self._hands.thaw(member)

    def close(self) -> None:
        """See `Hands.close`."""
        self._hands.close()


class RayHands:
    """Hands on every node that has a worker of the run."""

    def __init__(self) -> None:
        """Nobody is held, and no actor is there."""
        self._actors: dict[str, Any] = {}  # by node
        self._nodes: dict[int, str] = {}
        self._holds: dict[int, Any] = {}  # what `hold` is going to answer

    def hold(self, member: int, node: str, pid: int) -> None:
        """See `Hands.hold`; it is not waited for, so `harm` says what was wrong."""
        if node not in self._actors:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._actors[node] = HandsActor.options(scheduling_strategy=there).remote()  # type: ignore[attr-defined]
        self._nodes[member] = node
        self._holds[member] = self._actors[node].hold.remote(member, node, pid)

    def harm(self, member: int, action: Action) -> None:
        """See `Hands.harm`."""
        if member not in self._holds:
            raise ProcessLookupError("it has not said where it is")
        actor = self._actors[self._nodes[member]]
        why = self._answer(self._holds[member])
        if not why and action is Action.CUT:
            why = self._answer(actor.cut.remote(member, self._others(member)))
        elif not why:
            why = self._answer(actor.harm.remote(member, action.value))
        if why == NO_CONNECTION:
            raise NoConnectionError(why)
        if why:
            raise OSError(why)

    def thaw(self, member: int) -> None:
        """See `Hands.thaw`; it is not waited for."""
        if member in self._nodes:
            self._actors[self._nodes[member]].thaw.remote(member)

    def close(self) -> None:
        """See `Hands.close`; actors on nodes that are gone have nobody to let go."""
        closing = [actor.close.remote() for actor in self._actors.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=_ANSWER_S)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._nodes.clear()

    def _others(self, member: int) -> list[Ends]:
        """The ends of all others' connections; of those that are still there."""
        asked = [
            self._actors[node].ends.remote(other)
            for other, node in self._nodes.items()
            if other != member
        ]
        found: list[Ends] = []
        for answer in asked:
            try:
                found += [(here, there) for here, there in ray.get(answer, timeout=_ANSWER_S)]
            except (RayError, GetTimeoutError):  # its process was never held, or its node is gone
                continue
        return found

    @staticmethod
    def _answer(answer: Any) -> str:
        try:
            return str(ray.get(answer, timeout=_ANSWER_S))
        except (RayError, GetTimeoutError) as error:
            return f"its node does not answer: {type(error).__name__}"


def _why(act: Any, *arguments: Any) -> str:
    """Do it; why it could not be done, empty where it was."""
    try:
        act(*arguments)
    except OSError as error:
        return error.strerror or str(error)
    return ""
