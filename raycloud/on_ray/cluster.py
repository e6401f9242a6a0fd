"""`Cluster` on Ray: members are actors, and they meet at a port of the driver's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import ray

from raycloud.commands import Form, Meet, Prepare, Reshare, Spawn
from raycloud.events import (
    CapacityChanged,
    Event,
    MemberLeaving,
    MemberReady,
    MemberSpawned,
    Noticed,
    RangeChanged,
    StopRequested,
)
from raycloud.net.rendezvous import Rendezvous
from raycloud.on_ray.attach import draining, inventory
from raycloud.on_ray.fleet import Fleet
from raycloud.on_ray.inputs import RunInputs
from raycloud.planning.inventory import Inventory, capacity
from raycloud.planning.plan import Plan, Profile, make
from raycloud.planning.shares import Speed
from raycloud.recovery.rendezvous import Meeting
from raycloud.spec.requests import take_range

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.control.heartbeats import Heard
    from raycloud.on_ray.failover import Failover
    from raycloud.on_ray.pool import ActorPool
    from raycloud.on_ray.session import Session
    from raycloud.spec import RoleResources
    from raycloud.worker.outbox import LogLines, OutboxEntry

LOOK_S = 2.0
_ASKED_S = 0.5


class RayCluster:
    """The members of one start, its data's pipeline, and what happens to the machines.

    Args:
        session: The start.
        pool: Makes and holds the processes.
        nodes: The machines as they are now.
        origin: The checkpoint with which the start begins; None: there is none.
        written: By member, the number of its newest word that is in the log.

    Attributes:
        plan: What is predicted of the newest generation; None before the first.
    """

    def __init__(
        self,
        session: Session,
        pool: ActorPool,
        nodes: Inventory,
        origin: Manifest | None,
        written: Callable[[], Mapping[int, int]],
    ) -> None:
        """Listen where members are to meet. There are none yet."""
        self._session, self._pool, self._origin = session, pool, origin
        self._written = written
        worker = session.job.resources.worker
        self._watch = ClusterWatch(nodes, worker, session)
        self._inputs = RunInputs(session, pool)
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address(), session.clock)
        self._fleet = Fleet(worker, session.clock, pool)
        self._closed = False
        self._ready: dict[int, MemberReady] = {}
        self._untold: list[Event] = []
        self.plan: Plan | None = None

    @property
    def room(self) -> int:
        """How many members the machines hold."""
        return self._watch.room

    @property
    def pipeline(self) -> str:
        """The name of the data's pipeline."""
        return self._inputs.pipeline

    def begin(self) -> None:
        """Start what members are going to ask, before they are there."""
        self._inputs.begin()

    def adopt(self, found: Failover) -> None:
        """Go on with members that are there, instead."""
        self._inputs.adopt(found.pipeline)
        self._ready = {one.member: one.ready for one in found.survivors}
        self._fleet.adopt(found.actors, found.collators)

    def spawn(self, command: Spawn) -> None:
        """See `Cluster.spawn`; collators are started beside the first members."""
        asked = self._session.job.data.collators
        told = self._session.config(self._inputs.config_fields())
        if command.joins:
            told = replace(told, joins=True, origin=self._origin, back=command.back)
            for member, vacancy in zip_longest(command.members, command.vacancies):
                self._fleet.await_place(replace(told, member=member), vacancy)
            return
        told = replace(told, resume_step=self._origin.step if self._origin else None)
        collators = self._fleet.spawn([replace(told, member=m) for m in command.members])
        if collators < asked:
            detail = {"asked": asked, "started": collators}
            self._untold.append(Noticed(what="collators found no free CPU", detail=detail))
        self._untold.extend(MemberSpawned(member=member) for member in command.members)

    def form(self, command: Form) -> None:
        """See `Cluster.form`."""
        self._meet(command, command.settled)

    def prepare(self, command: Prepare) -> None:
        """See `Cluster.prepare`; to a `Meet`, members come while those of the present compute."""
        change, members = command.change, command.members
        if isinstance(change, Meet):
            self._meet(change, command.number, ahead=members)
            members = tuple(set(members) - set(change.members))
        elif isinstance(change, Reshare) and change.caught_up:
            self._write_plan(members, change.shares)
        for member in members:
            self._fleet.prepare(member, command.number, change)

    def _meet(self, formed: Form | Meet, settled: int, ahead: Sequence[int] = ()) -> None:
        self._rendezvous.forget(before=formed.generation - 1)  # that may be planned, and withdrawn
        nodes = tuple(self._ready[member].node for member in formed.members)
        for rank, member in enumerate(formed.members):
            meeting = Meeting.of(
                formed,
                rank,
                self._rendezvous.place,
                nodes=nodes,
                settled=settled,
                ahead=settled if member in ahead else None,
            )
            self._fleet.form(member, meeting)
        self._write_plan(formed.members, formed.shares)

    def _write_plan(self, members: Sequence[int], shares: tuple[int, ...]) -> None:
        """Keep what is predicted of this generation, to be held against what is measured."""
        job = self._session.job
        readies = [self._ready[member] for member in members]
        elastic = job.elastic.model_copy(update={"shares": shares})
        self.plan = make(
            job.model_copy(update={"elastic": elastic}),
            self._watch.inventory,
            profile_of(readies),
            placed={ready.member: ready.node for ready in readies},
        )
        self._session.directory.write_plan(self.plan.to_json())

    def release(self, members: Sequence[int]) -> None:
        """See `Cluster.release`."""
        self._fleet.release(members)

    def leave_out(self, member: int) -> None:
        """See `Cluster.leave_out`."""
        self._fleet.leave_out(member)

    def readmit(self, member: int, process: int) -> None:
        """See `Cluster.readmit`."""
        self._fleet.readmit(member, process)

    def holds(self, member: int) -> bool:
        """See `Cluster.holds`."""
        return self._fleet.holds(member)

    def hear(self, timeout_s: float) -> list[Event | OutboxEntry]:
        """See `Cluster.hear`.

        Raises:
            SupersededError: Another driver has taken the run over; nothing was heard.
            MachineError: What holds the members' processes is gone.
        """
        untold, self._untold = self._untold, []
        told = self._fleet.poll(0.0 if untold else timeout_s, self._written())
        self._pool.check()  # before any of it is written
        return [*untold, *told, *self._watch.poll(self._placed), *self._inputs.poll()]

    def see(self, event: Event) -> None:
        """An event is in the log: remember what it says of members, data and machines."""
        self._inputs.keep(event)
        match event:
            case MemberReady():
                self._ready[event.member] = event
            case MemberLeaving():
                self._watch.leaves(event)
            case _:
                pass

    def _placed(self) -> dict[int, str]:
        """The nodes of the members that are there."""
        return {m: ready.node for m, ready in self._ready.items() if self._fleet.holds(m)}

    def poll(self) -> Heard:
        """See `Cluster.poll`."""
        return self._fleet.heard()

    def lines(self) -> list[LogLines]:
        """What members' own logs have said since the last call; it came with their events."""
        return self._fleet.lines()

    def close(self) -> None:
        """End all members, and the pipeline; once."""
        if not self._closed:
            self._closed = True
            self._fleet.close()
            self._rendezvous.close()


class ClusterWatch:
    """What befalls a run from outside: machines that come and go, and what people ask of it.

    Args:
        inventory: The machines as they are now.
        resources: What one member reserves.
        session: The start, with the directory in which people leave what they ask for.

    Attributes:
        inventory: The machines as they were last seen.
    """

    def __init__(self, inventory: Inventory, resources: RoleResources, session: Session) -> None:
        """Nothing has changed yet."""
        self.inventory = inventory
        self._resources = resources
        self._directory, self._clock = session.directory, session.clock
        self._stop = session.stop
        self._looked_s = self._asked_s = self._clock.monotonic_s()
        self._leaving: set[str] = set()  # nodes
        self._told: set[int] = set()  # members on them
        self._room = self.room

    @property
    def room(self) -> int:
        """How many members the machines hold together, those that they hold already counted.

        What is going to leave holds none.
        """
        nodes = (node for node in self.inventory.nodes if node.name not in self._leaving)
        return capacity(Inventory(nodes=tuple(nodes)), self._resources)

    def poll(self, placed: Callable[[], Mapping[int, str]]) -> list[Event]:
        """What has happened since this was last asked.

        Args:
            placed: Gives the nodes of members, by member; asked now and then.
        """
        now_s = self._clock.monotonic_s()
        found: list[Event] = []
        if self._stop is not None and (why := self._stop.reason) is not None:
            self._stop = None
            found.append(StopRequested(reason=why))
        if now_s - self._asked_s >= _ASKED_S:
            self._asked_s = now_s
            found += [*self._requests(), *self._drained(placed())]
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self.inventory = inventory()
            if self.room != self._room:
                self._room = self.room
                found.append(CapacityChanged(workers=self._room))
        return found

    def leaves(self, event: MemberLeaving) -> None:
        """A member has said of itself or its node that it is going to leave."""
        self._told.add(event.member)
        if event.node:
            self._leaving.add(event.node)

    def _drained(self, placed: Mapping[int, str]) -> list[Event]:
        """The members on nodes that Ray drains, each told once."""
        found: list[Event] = []
        for node, leaving in draining(self._clock).items():
            self._leaving.add(node)
            for member in sorted(m for m, at in placed.items() if at == node):
                if member not in self._told:
                    self._told.add(member)
                    found.append(
                        MemberLeaving(
                            member=member,
                            reason=leaving.reason,
                            deadline_s=leaving.deadline_s,
                            node=node,
                        )
                    )
        return found

    def _requests(self) -> list[Event]:
        try:
            asked = take_range(self._directory.path)
        except ValueError as error:
            detail = {"why": str(error)}
            return [Noticed(what="a wish for other workers was passed over", detail=detail)]
        return [] if asked is None else [RangeChanged(**asked)]


def profile_of(readies: Sequence[MemberReady]) -> Profile:
    """The profile of a task as members measured it: sizes are the first one's."""
    first = readies[0]
    return Profile(
        samples=first.samples,
        parameters=first.parameters,
        gradient_bytes=first.gradient_bytes,
        state_bytes=first.state_bytes,
        speeds=tuple(Speed(fixed_s=r.fixed_s, micro_batch_s=r.micro_batch_s) for r in readies),
    )
