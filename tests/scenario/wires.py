"""The transport of members that live in one process: slow, cut and broken as a script says.

What a member gets of an exchange arrives at a moment of its own, so that where something befalls
the others between two such moments some have the result of a step and some never will.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from raycloud.errors import TransportError
from raycloud.net.exchange import reduction_bytes
from raycloud.net.transport import Abandoned
from raycloud.net.zones import Zones
from raycloud.spec.sizes import ring_bytes
from tests.coded import simulated, simulated_by_zones
from tests.scenario.stage import here
from tests.scenario.streams import Streams

if TYPE_CHECKING:
    import torch

    from raycloud.net.transport import Coding
    from raycloud.recovery.rendezvous import Meeting
    from tests.scenario.stage import Process, Stage, Strand

_TRAVELS_S = (0.002, 0.02)
_OFTEN_SLOW = 0.1  # the chance of five times as long
_HEARS_S = (0.005, 0.3)  # from a connection's end to a peer's knowing
_HEARS = 0.8  # the chance that a peer does
_AT_ONCE = 0.5  # the chance that one that does, does so when it calls
_LOST = 0.5  # the chance that what is on its way to a peer does not arrive
_LOOK_UP_S = 0.25
_STREAMS = 2


class Arrival:
    """What one member waits for."""

    def __init__(self, group: Group, tensors: tuple[torch.Tensor, ...], point: str) -> None:
        self.group, self._tensors, self._point = group, tensors, point
        self.done, self.why = False, ""
        self._waiting: Strand | None = None

    def wait(self, timeout_s: float) -> bool:
        if not self.done and not self.why:
            self._waiting = here()
            self.group.stage.wait(timeout_s, self._point)
            self._waiting = None
        if self.why:
            raise TransportError(self.why)
        return self.done

    def arrive(self, results: tuple[torch.Tensor, ...]) -> None:
        """The results are there, one for each tensor."""
        if not self.why and not self.done:
            for tensor, result in zip(self._tensors, results, strict=True):
                tensor.copy_(result)
            self.done = True
            self._wake()

    def fail(self, why: str) -> None:
        """It never will be."""
        if not self.done and not self.why:
            self.why = why
            self._wake()

    def spoil(self) -> None:
        """Whatever the buffer of a broken exchange holds, nobody may look at it."""
        for tensor in self._tensors if not self.done else ():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)

    def _wake(self) -> None:
        if self._waiting is not None:
            self.group.stage.wake(self._waiting)


@dataclass(eq=False)
class _Slot:
    """One exchange: what each rank gave, and what it waits for."""

    given: dict[int, torch.Tensor] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    source: int | None = None
    coding: Coding | None = None
    on_its_way: bool = False


class Group:
    """The connections among the members of a generation, for one purpose."""

    def __init__(
        self,
        stage: Stage,
        generation: int,
        purpose: str,
        processes: list[Process],
        zones: Zones | None,
    ) -> None:
        self.stage, self.generation, self._purpose = stage, generation, purpose
        self._processes, self._zones = processes, zones
        self._slots: list[_Slot] = []
        self._calls = [0] * len(processes)
        self._whole = 0  # exchanges that are on their way, or done
        self._lost: set[int] = set()  # ranks that nothing reaches any more
        self._hears: set[int] = set()  # those that know that it broke
        self.why = ""

    def _point(self, index: int, source: int | None) -> str:
        """What a member does that waits for this exchange."""
        if source is not None:
            return "take"
        return "stand" if self._purpose == "lane" and index == 0 else self._purpose

    def has(self, process: Process) -> bool:
        return process in self._processes

    def give(
        self,
        rank: int,
        tensor: torch.Tensor,
        source: int | None = None,
        total: torch.Tensor | None = None,
        coding: Coding | None = None,
    ) -> Arrival:
        """A member's part of its next exchange; with a codec the sum is to come to `total`."""
        index, process = self._calls[rank], self._processes[rank]
        self._calls[rank] += 1
        while len(self._slots) <= index:
            self._slots.append(_Slot())
        slot = self._slots[index]
        world = self.stage.world
        if self.why and rank in self._hears and world.likely(_AT_ONCE):
            raise TransportError(self.why)
        slot.given[rank], slot.source, slot.coding = tensor.clone(), source, coding
        tensors = (tensor,) if total is None else (tensor, total)
        arrival = slot.arrivals[rank] = Arrival(self, tensors, self._point(index, source))
        process.awaited.append(arrival)
        if self.why:
            arrival.spoil()
            if rank in self._hears:
                world.after(world.between(*_HEARS_S), partial(arrival.fail, self.why))
        elif process.cut:
            process.withheld.append(self.look)
        self.look()
        return arrival

    def look(self) -> None:
        """Send what is complete, in order."""
        world = self.stage.world
        while self._whole < len(self._slots) and not self.why:
            slot = self._slots[self._whole]
            away = [p for p in self._processes if p.cut]
            if len(slot.given) < len(self._processes) or away:
                for process in away:
                    process.withheld.append(self.look)
                return
            self._whole += 1
            results = self._results(slot)
            for rank in range(len(self._processes)):
                seconds = world.between(*_TRAVELS_S)
                seconds *= 5.0 if world.likely(_OFTEN_SLOW) else 1.0
                world.after(seconds, partial(self._deliver, slot, rank, results[rank]))

    def _results(self, slot: _Slot) -> list[tuple[torch.Tensor, ...]]:
        """What comes to each rank."""
        tensors = [slot.given[rank] for rank in range(len(self._processes))]
        assert len({(t.shape, t.dtype) for t in tensors}) == 1, f"{self._purpose}: {tensors}"
        if slot.source is not None:
            return [(tensors[slot.source],)] * len(tensors)
        if slot.coding is not None:
            if self._zones is None:
                total, left = simulated(tensors, slot.coding)
            else:
                total, left = simulated_by_zones(tensors, slot.coding, self._zones)
            return [(one, total) for one in left]
        result = tensors[0].clone()
        for tensor in tensors[1:]:
            result += tensor
        return [(result,)] * len(tensors)

    def _deliver(self, slot: _Slot, rank: int, results: tuple[torch.Tensor, ...]) -> None:
        process = self._processes[rank]
        if rank in self._lost:
            return
        if process.cut:
            process.withheld.append(partial(self._deliver, slot, rank, results))
            return
        slot.arrivals[rank].arrive(results)
        process.awaited = [arrival for arrival in process.awaited if not arrival.done]
        for arrival in process.awaited:  # an exchange that was left behind may still write
            if arrival.group.generation < self.generation:
                arrival.spoil()
        if self._purpose == "gradients" and any(not a.done for a in slot.arrivals.values()):
            self.stage.passing(process, "delivered")

    def cut(self, why: str) -> None:
        """What is on its way reaches some and not others; most who wait hear of that soon."""
        world = self.stage.world
        if self.why:
            return
        self.why = why
        ranks = range(len(self._processes))
        self._lost = {rank for rank in ranks if world.likely(_LOST)}
        self._hears = {rank for rank in ranks if world.likely(_HEARS)} | {world.below(len(ranks))}
        for slot in self._slots:
            for rank, arrival in slot.arrivals.items():
                arrival.spoil()
                if rank in self._hears:
                    world.after(world.between(*_HEARS_S), partial(arrival.fail, why))


class Wire:
    """One member's end of a group: a `Transport`."""

    def __init__(self, group: Group, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def all_reduce(self, tensor: torch.Tensor) -> Arrival:
        return self._group.give(self.rank, tensor)

    def all_reduce_bytes(self, size: int) -> int:
        return ring_bytes(size, self.size)

    def reduce(self, values: torch.Tensor, total: torch.Tensor, coding: Coding) -> Arrival:
        return self._group.give(self.rank, values, total=total, coding=coding)

    def reduce_bytes(self, count: int, coding: Coding) -> int:
        return reduction_bytes(count, self.rank, self.size, coding)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Arrival:
        return self._group.give(self.rank, tensor, source)

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(eq=False)
class _Gathering:
    """A generation that meets."""

    come: dict[int, Process] = field(default_factory=dict)
    groups: tuple[Group, Group] | None = None
    why: str = ""


class Wires:
    """Where members meet, and all connections that there ever were."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._gatherings: dict[int, _Gathering] = {}
        self.streams = Streams(stage)

    def meet(
        self,
        meeting: Meeting,
        address: str,
        device: torch.device,
        abandoned: Callable[[], bool],
        *,
        topology: str = "ring",
    ) -> tuple[Wire, Wire]:
        """Takes the place of `raycloud.recovery.rendezvous.meet`."""
        strand = here()
        assert strand is not None
        gathering = self._gatherings.setdefault(meeting.generation, _Gathering())
        gathering.come[meeting.rank] = strand.process
        size = len(meeting.members)
        while gathering.groups is None:
            if gathering.why:
                raise TransportError(gathering.why)
            if len(gathering.come) == size and not any(p.cut for p in gathering.come.values()):
                zones = meeting.near if topology == "tree" else None
                gathering.groups = self._connect(
                    meeting.generation, [gathering.come[r] for r in range(size)], zones
                )
            else:
                self._stage.wait(_LOOK_UP_S, "meet")
                if abandoned():
                    raise Abandoned("the generation was abandoned before all had met")
        self._stage.wait(self._stage.world.between(*_TRAVELS_S), "met")
        gradients, lane = gathering.groups
        return Wire(gradients, meeting.rank, size), Wire(lane, meeting.rank, size)

    def _connect(
        self, generation: int, processes: list[Process], zones: Zones | None
    ) -> tuple[Group, Group]:
        gradients = Group(self._stage, generation, "gradients", processes, zones)
        lane = Group(self._stage, generation, "lane", processes, zones)
        if not all(process.alive for process in processes):
            gradients.cut("connection refused")
            lane.cut("connection refused")
        return gradients, lane

    def gone(self, process: Process) -> None:
        """A process has ended, and with it its connections."""
        for gathering in self._gatherings.values():
            if gathering.groups is None:
                if process in gathering.come.values() and self._stage.world.likely(0.5):
                    gathering.why = f"{process} cannot be met"
            elif gathering.groups[0].has(process):
                for group in gathering.groups:
                    group.cut(f"connection to {process} reset")
        self.streams.gone(process)

    def reset(self, process: Process | None = None) -> None:
        """Connections are reset, one purpose's or all: everyone's, or one process's."""
        world = self._stage.world
        which = ((0,), (1,), (0, 1), (_STREAMS,), (0, 1, _STREAMS))[world.below(5)]
        for gathering in self._gatherings.values():
            groups = gathering.groups
            if groups is not None and (process is None or groups[0].has(process)):
                for number in which:
                    if number != _STREAMS:
                        groups[number].cut("connection reset by peer")
        if _STREAMS in which:
            self.streams.cut(process)
