"""Threads that take turns, and the queues, events and conditions that they wait for."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from tests.scenario.stage import Strand, here

if TYPE_CHECKING:
    from tests.scenario.stage import Stage


class Bell:
    """Where threads wait until something holds; whoever makes it hold rings."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._waiting: list[Strand] = []

    def ring(self) -> None:
        """Let all look again."""
        waiting, self._waiting = self._waiting, []
        for strand in waiting:
            self._stage.wake(strand)

    def wait_for(
        self, holds: Callable[[], Any], timeout_s: float | None = None, point: str = ""
    ) -> bool:
        """Wait at most so long; whether it holds then."""
        world = self._stage.world
        until_s = None if timeout_s is None else world.now_s + timeout_s
        while not holds():
            left_s = None if until_s is None else until_s - world.now_s
            if left_s is not None and left_s <= 0.0:
                return False
            strand = here()
            assert strand is not None, "only a member's thread can wait for its turn"
            self._waiting.append(strand)
            self._stage.wait(left_s, point)
            if strand in self._waiting:
                self._waiting.remove(strand)
        return True


class Queue:
    """Takes the place of `queue.Queue` in what members run."""

    def __init__(self, stage: Stage) -> None:
        self._items: deque[Any] = deque()
        self._bell = Bell(stage)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._bell.ring()

    def get(self, timeout: float | None = None) -> Any:
        if not self._bell.wait_for(lambda: self._items, timeout):
            raise queue.Empty
        return self._items.popleft()


class Event:
    """Takes the place of `threading.Event`."""

    def __init__(self, stage: Stage) -> None:
        self._bell, self._set = Bell(stage), False

    def set(self) -> None:
        self._set = True
        self._bell.ring()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._bell.wait_for(self.is_set, timeout_s)


class Condition:
    """Takes the place of `threading.Condition`: only who waits lets others go on."""

    def __init__(self, stage: Stage) -> None:
        self._bell = Bell(stage)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *told: object) -> None:
        pass

    def notify_all(self) -> None:
        self._bell.ring()

    def wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> bool:
        return self._bell.wait_for(holds, timeout_s)


class Turns:
    """`raycloud.threads.Threads` that take turns.

    Args:
        stage: Whose turn it is.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def thread(self, target: Callable[..., object], *args: Any, name: str = "") -> Strand:
        return Strand(self._stage, target=target, args=args, name=name)

    def event(self) -> Event:
        return Event(self._stage)

    def condition(self) -> Condition:
        return Condition(self._stage)

    def queue(self) -> Queue:
        return Queue(self._stage)
