"""The only source of time.

Everything else takes a `Clock` as an argument, so that a simulation can pass a virtual one.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Protocol

# CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of Linux's posix-timers.
_CLOCK_OF_A_THREAD = 4 | 2


class Clock(Protocol):
    """Where seconds come from."""

    def monotonic_s(self) -> float:
        """Seconds since some fixed moment, never going back; for durations."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970-01-01 UTC; for what people read, never for durations."""
        ...

    def cpu_s(self) -> float:
        """Processor seconds this process has used, over all of its threads."""
        ...

    def thread_cpu_s(self, thread: int) -> float:
        """Processor seconds that a thread of this process, of this native id, has used so far.

        Infinite where it has ended.
        """
        ...


class SystemClock:
    """The clock of this machine."""

    def monotonic_s(self) -> float:
        """Seconds since some fixed moment of this machine's uptime."""
        return time.perf_counter()

    def unix_s(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        return time.time()

    def cpu_s(self) -> float:
        """User and system time of this process."""
        return time.process_time()

    def thread_cpu_s(self, thread: int) -> float:
        """User and system time of the thread of this native id.

        By Linux's number of its clock: `pthread_getcpuclockid` must not be asked of one that ended.
        """
        try:
            return time.clock_gettime(~thread << 3 | _CLOCK_OF_A_THREAD)
        except OSError:
            return math.inf

    def process_started_s(self) -> float:
        """`monotonic_s` when this process was started, its interpreter's own start included.

        Read from Linux's `/proc`, exact to 10 ms; elsewhere the present moment.
        """
        try:
            fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime, since boot
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
        except (OSError, ValueError, AttributeError):
            age_s = 0.0
        return self.monotonic_s() - age_s


class VirtualClock:
    """A clock that stands still until it is told to advance; for simulations and tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def monotonic_s(self) -> float:
        """The virtual now, in seconds."""
        return self._now_s

    # A virtual process is always busy, and so are its threads.
    unix_s = cpu_s = monotonic_s

    def thread_cpu_s(self, thread: int) -> float:  # noqa: ARG002 - one for all threads
        """The virtual now, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the virtual now forward.

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance() takes seconds >= 0, got {seconds}")
        self._now_s += seconds
