"""Threads of members that take turns: one runs until it waits, then the world goes on.

Whose turn it is follows from virtual time and a seed alone, so what the real code of many members
does together, in threads of its own, can be repeated event for event.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from raycloud.simulate.world import World
    from tests.scenario.wires import Arrival

_HERE = threading.local()
_SWITCH_S = 0.001  # until a thread that may go on does


class EndedError(BaseException):
    """The process of this thread has ended; nothing catches it."""


class Process:
    """One member's process, as its threads and its peers see it.

    Attributes:
        alive: Its threads run.
        frozen: By how many faults they are kept from it.
        cut: By how many faults it is kept from its peers.
        unheard: By how many faults it is kept from the driver.
        ahead_s: How far its clock has jumped ahead.
        withheld: What comes to it, or goes on, once its peers can reach it.
        awaited: What it waits for, or has given up, of exchanges.
    """

    def __init__(self, stage: Stage, number: int, node: int) -> None:
        self.stage, self.number, self.node = stage, number, node
        self.alive = True
        self.frozen = self.cut = self.unheard = 0
        self.ahead_s = 0.0
        self.held: dict[Strand, int] = {}
        self.withheld: list[Callable[[], None]] = []
        self.awaited: list[Arrival] = []

    def __str__(self) -> str:
        return f"member {self.number}"

    def freeze(self) -> None:
        """Its threads stand still."""
        self.frozen += 1

    def thaw(self) -> None:
        """They go on where they stood still."""
        self.frozen -= 1
        if self.frozen == 0:
            held, self.held = self.held, {}
            for strand, ticket in held.items():
                self.stage.turn_after(_SWITCH_S, strand, ticket)

    def reach(self) -> None:
        """Its peers reach it again, if nothing else keeps them from it."""
        self.cut -= 1
        if self.cut == 0:
            withheld, self.withheld = self.withheld, []
            for act in withheld:
                act()


class Strand:
    """Takes the place of `threading.Thread` in what members run."""

    def __init__(
        self,
        stage: Stage,
        *,
        target: Callable[..., None],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self.stage, self.process, self.name = stage, stage.process, name
        self.over, self.ticket = False, 0
        self.go = _closed()
        self._work = partial(target, *args)
        self._joining: list[Strand] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def native_id(self) -> int | None:
        return self._thread.native_id

    def is_alive(self) -> bool:
        return not self.over

    def start(self) -> None:
        """Begin, in a turn of its own."""
        self.stage.strands.append(self)
        self._thread.start()
        self.stage.turn_after(_SWITCH_S, self, self.ticket)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, or so long."""
        until_s = float("inf") if timeout_s is None else self.stage.world.now_s + timeout_s
        while not self.over and self.stage.world.now_s < until_s:
            self._joining.append(_here())
            left_s = None if timeout_s is None else until_s - self.stage.world.now_s
            self.stage.wait(left_s)
            self._joining.remove(_here())

    def end(self) -> None:
        """Let it unwind; without effect where it has ended."""
        if not self.over:
            self.go.release()
        self._thread.join()

    def _run(self) -> None:
        _HERE.strand = self
        self.go.acquire()
        try:
            if not self.stage.closing:
                self._work()
        except EndedError:
            pass
        except BaseException as error:  # noqa: BLE001 - told by whoever judges the run
            self.stage.wrong.append(f"thread {self.name} of {self.process} ended with {error!r}")
        self.over = True
        if not self.stage.closing:
            for strand in self._joining:
                self.stage.wake(strand)
            self.stage.back.release()


class Stage:
    """Gives turns.

    Args:
        world: Whose time it is.

    Attributes:
        passing: Told that a process passes a point of its work; may end it, or freeze it.
        process: Whose turn it is, or on whose behalf something is done.
        wrong: What no thread may do.
        closing: All threads are to end.
        disk_full: There is no room for checkpoints.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.main = threading.get_ident()
        self.passing: Callable[[Process, str], None] = lambda process, point: None
        self.wrong: list[str] = []
        self.strands: list[Strand] = []
        self.process: Process | None = None
        self.closing = self.disk_full = False
        self.back = _closed()

    @contextlib.contextmanager
    def on_behalf_of(self, process: Process) -> Iterator[None]:
        """Threads that are made meanwhile are this process's."""
        before, self.process = self.process, process
        try:
            yield
        finally:
            self.process = before

    def turn_after(self, seconds: float, strand: Strand, ticket: int) -> None:
        """It goes on then, unless it waits for something else by then."""
        self.world.after(seconds, partial(self._turn, strand, ticket))

    def wake(self, strand: Strand, seconds: float = _SWITCH_S) -> None:
        """It need not wait any longer."""
        self.turn_after(seconds, strand, strand.ticket)

    def wait(self, seconds: float | None, point: str = "") -> None:
        """Called in a turn: let the others go on for so long, or until something wakes this."""
        strand = _here()
        if point:
            self.passing(strand.process, point)
        strand.ticket += 1
        if seconds is not None:
            self.turn_after(seconds, strand, strand.ticket)
        self._give_back(strand)

    def pass_by(self, point: str) -> None:
        """Called in a turn: something may befall this process here."""
        strand = _here()
        self.passing(strand.process, point)
        if strand.process.frozen or not strand.process.alive:
            self.wait(0.0)

    def close(self) -> None:
        """End all threads, one by one."""
        self.closing = True
        for strand in self.strands:
            strand.end()
        self.strands.clear()

    def _turn(self, strand: Strand, ticket: int) -> None:
        process = strand.process
        if strand.over or strand.ticket != ticket or not process.alive:
            return
        if process.frozen:
            process.held[strand] = ticket
            return
        before = _random_state()
        with self.on_behalf_of(process):
            strand.go.release()
            self.back.acquire()
        _set_random_state(before)

    def _give_back(self, strand: Strand) -> None:
        """As each process has its own random numbers, so has each thread here."""
        if self.closing:
            raise EndedError
        state = _random_state()
        self.back.release()
        strand.go.acquire()
        if self.closing:
            raise EndedError
        _set_random_state(state)


def _random_state() -> tuple[Any, ...]:
    """Of torch's, numpy's and Python's generators, and which one is numpy's."""
    numpys = np.random.get_bit_generator()
    return torch.default_generator.get_state(), numpys, np.random.get_state(), random.getstate()


def _set_random_state(state: tuple[Any, ...]) -> None:
    torchs, generator, numpys, pythons = state
    torch.default_generator.set_state(torchs)
    np.random.set_bit_generator(generator)
    np.random.set_state(numpys)
    random.setstate(pythons)


def _closed() -> threading.Lock:
    """A gate that one thread waits at, and another one opens; faster than a semaphore."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def here() -> Strand | None:
    """The member's thread that this is; None: it is none."""
    return getattr(_HERE, "strand", None)


def _here() -> Strand:
    strand = here()
    assert strand is not None, "only a member's thread can wait for its turn"
    return strand


class MemberClock:
    """A member's clock: virtual, and standing still where time has no order (in its feeds)."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic_s(self) -> float:
        stage = self._process.stage
        ours = here() is not None or threading.get_ident() == stage.main
        return stage.world.now_s + self._process.ahead_s if ours else 0.0

    def unix_s(self) -> float:
        return self.monotonic_s()

    def cpu_s(self) -> float:
        return self.monotonic_s()

    def thread_cpu_s(self, thread: int) -> float:
        return self.monotonic_s()
