"""Makes the events of a schedule happen to a bed, and says what became of each."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from benchmarks.testbed.events import Event, Same, ScheduleError
from benchmarks.testbed.machine import MachineError
from benchmarks.testbed.spec import HEAD, NodeSpec

if TYPE_CHECKING:
    from types import EllipsisType

    from benchmarks.testbed.bed import Testbed
    from benchmarks.testbed.machine import Machine


class Rays(Protocol):
    """What Ray has to do when nodes come and go; `Cluster` does it."""

    def join(self, *names: str) -> None:
        """Start Ray on nodes."""
        ...

    def drain(self, name: str, deadline_s: float) -> None:
        """Give Ray notice that a node will go."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of an event.

    Attributes:
        event: It.
        happened: Whether it found whom it was for: nobody can freeze a node that is gone.
        detail: In words.
    """

    event: Event
    happened: bool
    detail: str


def apply(event: Event, bed: Testbed, *, cluster: Rays | None = None) -> Outcome:
    """Make one event happen; `apply_all` is quicker where several nodes come at once.

    Args:
        event: Of a schedule.
        bed: Where.
        cluster: Its Ray: nodes that come join it, and a drain is told to it. None: a drain sends
            SIGTERM to the node's processes, as a cloud's notice does to a machine's services.

    Raises:
        ScheduleError: A node is to come of which nobody said what it is, or that is there.
    """
    return apply_all([event], bed, cluster=cluster)[0]


def apply_all(
    events: Sequence[Event], bed: Testbed, *, cluster: Rays | None = None
) -> tuple[Outcome, ...]:
    """Make events happen in order; nodes that come one after the other come together.

    Args:
        events: Of a schedule, due now.
        bed: Where.
        cluster: As for `apply`.

    Raises:
        ScheduleError: As by `apply`.
    """
    found: list[Outcome] = []
    for adding, some in groupby(events, lambda event: event.action == "add"):
        if adding:
            found += _add(list(some), bed, cluster)
        else:
            found += [_apply(event, bed, cluster) for event in some]
    return tuple(found)


def _add(events: Sequence[Event], bed: Testbed, cluster: Rays | None) -> list[Outcome]:
    """Let nodes come: without a quota until their Ray has joined, since that is much work."""
    specs = [event.spec or _known(event.node, bed) for event in events]
    for spec in specs:
        if spec.name in bed.nodes:
            raise ScheduleError(f"add of {spec.name!r}: it is there; kill or drain it before")
    machines = [bed.add(spec) for spec in specs]
    if cluster is not None:
        cluster.join(*(machine.name for machine in machines))
    for machine in machines:
        machine.throttle(machine.spec.cores)
    return [
        Outcome(event=event, happened=True, detail=f"{machine.name} is there, at {machine.address}")
        for event, machine in zip(events, machines, strict=True)
    ]


def _known(name: str, bed: Testbed) -> NodeSpec:
    for spec in bed.spec.nodes:
        if spec.name == name:
            return spec
    raise ScheduleError(f"add of {name!r}: the bed's spec has no such node; give its `spec`")


def _apply(event: Event, bed: Testbed, cluster: Rays | None) -> Outcome:
    if event.node != HEAD and event.node not in bed.nodes:
        return Outcome(event=event, happened=False, detail=f"{event.node} is not there")
    machine = bed[event.node]
    if event.action == "kill-process":
        return _kill_process(event, machine)
    detail = f"{event.node}: {event.action}"
    match event.action:
        case "kill-node":
            machine.kill()
        case "freeze":
            machine.freeze()
        case "thaw":
            machine.thaw()
        case "cut":
            machine.cut(event.direction or "both")
            detail += f" {event.direction or 'both'}"
        case "mend":
            machine.mend()
        case "throttle":
            machine.throttle(event.cores)
            detail += f" to {event.cores:g} cores" if event.cores else " no more"
        case "rate":
            detail += "".join(
                f", {what} {'all' if rate is None else f'{rate:g} bit/s'}"
                for what, rate in (
                    ("sends", event.egress_bits_per_s),
                    ("receives", event.ingress_bits_per_s),
                )
                if rate != "same"
            )
            machine.rate(
                egress_bits_per_s=_rate(event.egress_bits_per_s),
                ingress_bits_per_s=_rate(event.ingress_bits_per_s),
            )
        case "drain":
            _drain(event, machine, cluster)
            detail += f", to be killed in {event.deadline_s:g} s"
    return Outcome(event=event, happened=True, detail=detail)


def _rate(value: float | Same | None) -> float | EllipsisType | None:
    return ... if value == "same" else value


def _drain(event: Event, machine: Machine, cluster: Rays | None) -> None:
    if cluster is None:
        machine.terminate()
    else:
        cluster.drain(event.node, event.deadline_s or 0.0)


def _kill_process(event: Event, machine: Machine) -> Outcome:
    """SIGKILL to the youngest of the node's processes that match."""
    wanted = event.matching or ""
    found = [(began, pid) for pid in machine.processes() if (began := _began(pid, wanted))]
    for _, pid in sorted(found, reverse=True):
        with contextlib.suppress(MachineError):  # it ended just now
            machine.signal(pid, signal.SIGKILL)
            return Outcome(event=event, happened=True, detail=f"{event.node}: killed process {pid}")
    detail = f"{event.node}: no process matches {wanted!r}"
    return Outcome(event=event, happened=False, detail=detail)


def _began(pid: int, wanted: str) -> int:
    """When a process began, in clock ticks; 0 if its command line lacks `wanted`, or it ended."""
    folder = Path("/proc") / str(pid)
    try:
        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        began = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
    return began if wanted in line else 0
