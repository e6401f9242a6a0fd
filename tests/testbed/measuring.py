"""Measuring on a machine that has other things to do, without asking for less."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from benchmarks import testbed

TRIES = 5
STOLEN = 0.05  # of the time that a measurement took
_AMPLE_CORES = 64.0

Found = TypeVar("Found")


def nearest(
    measure: Callable[[], Found],
    off: Callable[[Found], float],
    *,
    most_off: float = 0.1,
    pids: Callable[[], Iterable[int]] = tuple,
) -> Found:
    """What is measured, up to five times: the first that is near enough, else the nearest one.

    One during which somebody who takes part waited for a CPU counts only if it is near enough, or
    if all are like it.

    Args:
        measure: Takes one measurement.
        off: How far it is from what it should be; below 0 what no busy machine can cause, which
            is taken at once.
        most_off: What is near enough.
        pids: Who takes part, now.
    """
    whole, disturbed = [], []
    for _ in range(TRIES):
        before_s, began_s = _waited_s(pids()), time.monotonic()
        found = measure()
        took_s = time.monotonic() - began_s
        after_s = _waited_s(before_s)
        stolen = max((after_s[pid] - before_s[pid] for pid in after_s), default=0.0) / took_s
        # Shown if a test fails.
        waited = f", waited for a CPU {stolen:.1%} of the time" if after_s else ""
        sys.stderr.write(f"{found}: {off(found):.1%} off{waited}\n")
        if off(found) <= most_off:
            return found
        (disturbed if stolen > STOLEN else whole).append(found)
    return min(whole or disturbed, key=off)


def come_first(*machines: testbed.Machine) -> None:
    """Let machines come before others that wait for a CPU: their wait is no property of a link.

    A bed does once one of them has a quota (see `benchmarks/testbed/quota.py`): here one that takes
    nothing.
    """
    for machine in machines:
        machine.throttle(_AMPLE_CORES)


def _waited_s(pids: Iterable[int]) -> dict[int, float]:
    """How long each living process has waited for a CPU so far; none where the kernel won't say."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return found
