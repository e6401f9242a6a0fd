"""Threads and what they wait for, as an argument: tests let threads take turns in virtual time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Threads:
    """Makes threads, and what they wait for. A mutex needs no other kind: nobody waits long."""

    def thread(self, target: Callable[..., object], *args: Any, name: str = "") -> threading.Thread:
        """A thread that is not started yet, and does not keep the process from ending."""
        return threading.Thread(target=target, args=args, name=name or None, daemon=True)

    def event(self) -> threading.Event:
        """A flag that threads wait for."""
        return threading.Event()

    def condition(self) -> threading.Condition:
        """A mutex whose holders wait until something holds."""
        return threading.Condition()

    def queue(self) -> queue.Queue[Any]:
        """What threads take from in order, and wait for."""
        return queue.Queue()


THREADS = Threads()
