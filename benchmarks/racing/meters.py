"""What a window cost: bytes on the wire, and who else used the processors meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.testbed import quota

if TYPE_CHECKING:
    from benchmarks.testbed import Machine, Testbed

_STAT = Path("/proc/stat")
_V2_CPU = "cpu.stat"


@dataclass(frozen=True, kw_only=True)
class Used:
    """What was used since the meters were made.

    Attributes:
        sent_bytes: By all machines, head included, also those that are gone.
        trunk_bytes: That crossed trunks, both ways together.
        steal: Part of the machine's CPU time that its host gave to others.
        outside: Part of the processors' time that processes outside of the testbed used, the
            harness among them.
    """

    sent_bytes: int
    trunk_bytes: int
    steal: float
    outside: float


class Meters:
    """Counts from now on.

    Args:
        bed: Whose machines are counted; `see` has to be told of new ones.
    """

    def __init__(self, bed: Testbed) -> None:
        self._bed = bed
        self._mounts = quota.find()
        self._since: dict[Machine, tuple[int, float]] = {}
        for machine in self._present():
            self._since[machine] = machine.traffic().sent_bytes, machine.cpu_s()
        self._trunk_bytes = bed.trunk_bytes()
        self._ticks = _ticks()
        self._began_s, self._all_s = time.monotonic(), used_s(self._mounts)

    def see(self) -> None:
        """Count machines that have come; whatever they did, they did since they came."""
        for machine in self._present():
            self._since.setdefault(machine, (0, 0.0))

    def read(self) -> Used:
        """What was used until now."""
        self.see()
        sent = sum(m.traffic().sent_bytes - sent for m, (sent, _) in self._since.items())
        inside_s = sum(m.cpu_s() - cpu_s for m, (_, cpu_s) in self._since.items())
        now_s, all_s = time.monotonic(), used_s(self._mounts)
        busy_s = sum(max(0.0, s - self._all_s.get(name, 0.0)) for name, s in all_s.items())
        total, steal = (b - a for a, b in zip(self._ticks, _ticks(), strict=True))
        capacity_s = (now_s - self._began_s) * (os.cpu_count() or 1)
        return Used(
            sent_bytes=sent,
            trunk_bytes=self._bed.trunk_bytes() - self._trunk_bytes,
            steal=steal / max(1, total),
            outside=max(0.0, busy_s - inside_s) / max(1e-9, capacity_s),
        )

    def _present(self) -> list[Machine]:
        return [self._bed.head, *self._bed.nodes.values()]


def used_s(mounts: quota.Mounts) -> Mapping[str, float]:
    """CPU seconds of all processes so far, by the groups that count them.

    They are those of the scheduler. The kernel's counts of clock ticks see a process only where a
    tick meets it, and a quota's periods are as regular as the ticks. The topmost group of version 2
    counts by ticks as well, so there the groups right below it are taken; what is in none of them,
    such as the kernel's own threads, is not counted.

    Args:
        mounts: Where the groups are.
    """
    if mounts.version == 1:
        nanoseconds = (mounts.folders["cpuacct"] / "cpuacct.usage").read_text()
        return {"": int(nanoseconds) / 1e9}
    root = mounts.folders[""]
    if (root / "cgroup.type").exists():  # a container's topmost is none of the machine's
        return {"": _v2_s(root)}
    return {below.name: _v2_s(below) for below in root.iterdir() if (below / _V2_CPU).exists()}


def _v2_s(folder: Path) -> float:
    try:
        lines = (folder / _V2_CPU).read_text().splitlines()
    except OSError:  # gone just now
        return 0.0
    return int(dict(line.split() for line in lines)["usage_usec"]) / 1e6


def _ticks() -> tuple[int, int]:
    """Clock ticks of all processors: in total, stolen."""
    first = [int(ticks) for ticks in _STAT.read_text().splitlines()[0].split()[1:9]]
    return sum(first), first[-1]
