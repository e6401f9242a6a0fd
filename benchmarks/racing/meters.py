"""What a window cost: bytes on the wire, and who else used the processors meanwhile."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.testbed import Machine, Testbed

_STAT = Path("/proc/stat")


@dataclass(frozen=True, kw_only=True)
class Used:
    """What was used since the meters were made.

    Attributes:
        sent_bytes: By all machines, head included, also those that are gone.
        steal: Part of the machine's CPU time that its host gave to others.
        outside: Part of it that processes outside of the testbed used, the harness among them.
    """

    sent_bytes: int
    steal: float
    outside: float


class Meters:
    """Counts from now on.

    Args:
        bed: Whose machines are counted; `see` has to be told of new ones.
    """

    def __init__(self, bed: Testbed) -> None:
        """Read what is there now."""
        self._bed = bed
        self._since: dict[Machine, tuple[int, float]] = {}
        for machine in self._present():
            self._since[machine] = machine.traffic().sent_bytes, machine.cpu_s()
        self._ticks = _ticks()

    def see(self) -> None:
        """Count machines that have come; whatever they did, they did since they came."""
        for machine in self._present():
            self._since.setdefault(machine, (0, 0.0))

    def read(self) -> Used:
        """What was used until now."""
        self.see()
        sent = sum(m.traffic().sent_bytes - sent for m, (sent, _) in self._since.items())
        inside_s = sum(m.cpu_s() - cpu_s for m, (_, cpu_s) in self._since.items())
        total, busy, steal = (b - a for a, b in zip(self._ticks, _ticks(), strict=True))
        inside = inside_s * os.sysconf("SC_CLK_TCK")
        return Used(
            sent_bytes=sent,
            steal=steal / max(1, total),
            outside=max(0.0, busy - inside) / max(1, total),
        )

    def _present(self) -> list[Machine]:
        return [self._bed.head, *self._bed.nodes.values()]


def _ticks() -> tuple[int, int, int]:
    """Clock ticks of all processors: in total, busy, stolen."""
    first = _STAT.read_text().splitlines()[0].split()[1:9]
    user, nice, system, idle, waiting, hard, soft, steal = map(int, first)
    busy = user + nice + system + hard + soft
    return busy + idle + waiting + steal, busy, steal
