"""Threads of which one runs at a time, until it ends or waits for the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from tests.sockets import together


class Turns:
    """Calls in threads that take turns: what they do is the same each time."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._left: list[int] = []  # threads that have not ended, in the order of their turns
        self._own = threading.local()
        self._failed = False

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make them, to their ends; raises what the first raised."""
        self._left, self._failed = list(range(len(calls))), False
        together(partial(self._take, number, call) for number, call in enumerate(calls))

    def pass_on(self) -> None:
        """Whose turn it is waits for another: go on when it is its turn again."""
        own = getattr(self._own, "number", None)
        if own is None or self._left == [own]:
            return
        with self._wake:
            self._left = [*self._left[1:], own]
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._left[0] == own)
        if self._failed:
            raise RuntimeError("another one has failed")

    def _take(self, number: int, call: Callable[[], None]) -> None:
        self._own.number = number
        with self._wake:
            self._wake.wait_for(lambda: self._left[0] == number)
        try:
            call()
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._wake:
                self._left.remove(number)
                self._wake.notify_all()
