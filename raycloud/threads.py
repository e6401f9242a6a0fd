"""Threads and what they wait for, as arguments: tests let threads take turns in virtual time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol


class Thread(Protocol):
    """What is asked of a thread."""

    @property
    def ident(self) -> int | None:
        """The system's name for it, once it is started."""
        ...

    def start(self) -> None:
        """Begin; once."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or for so many seconds."""
        ...

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        ...


class Threads(Protocol):
    """Makes threads, and what they wait for. A mutex needs no other kind: nobody waits long."""

    def thread(self, target: Callable[..., object], *args: Any, name: str = "") -> Thread:
        """A thread that is not started yet, and does not keep the process from ending."""
        ...

    def event(self) -> threading.Event:
        """A flag that threads wait for."""
        ...

    def condition(self) -> threading.Condition:
        """A mutex whose holders wait until something holds."""
        ...

    def queue(self) -> queue.Queue[Any]:
        """What threads take from in order, and wait for."""
        ...


class SystemThreads:
    """Those of this process."""

    def thread(self, target: Callable[..., object], *args: Any, name: str = "") -> Thread:
        """See `Threads.thread`."""
        return threading.Thread(target=target, args=args, name=name or None, daemon=True)

    def event(self) -> threading.Event:
        """See `Threads.event`."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """See `Threads.condition`."""
        return threading.Condition()

    def queue(self) -> queue.Queue[Any]:
        """See `Threads.queue`."""
        return queue.Queue()


THREADS = SystemThreads()
