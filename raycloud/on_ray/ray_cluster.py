"""`Cluster` on Ray: members are actors, and they meet at a port of the driver's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import ray

from raycloud.commands import Form, Meet, Prepare, Reshare, Spawn
from raycloud.events import Event, MemberLeaving, MemberReady, MemberSpawned, Noticed
from raycloud.net.rendezvous import Rendezvous
from raycloud.on_ray.fleet import Fleet
from raycloud.on_ray.outside import Outside
from raycloud.on_ray.profile import profile_of
from raycloud.on_ray.sources import Sources
from raycloud.planning.plan import Plan, make
from raycloud.recovery.rendezvous import Meeting

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.control.heartbeats import Heard
    from raycloud.on_ray.keeper import Keeper
    from raycloud.on_ray.session import Session
    from raycloud.on_ray.takeover import Takeover
    from raycloud.on_ray.tenure import Tenure
    from raycloud.planning.inventory import Inventory
    from raycloud.training.journal import Lines
    from raycloud.training.words import Word


class RayCluster:
    """The members of one start, its data's pipeline, and what happens to the machines.

    Args:
        session: The start.
        keeper: Makes and holds the processes.
        nodes: The machines as they are now.
        origin: The checkpoint with which the start begins; None: there is none.
        written: By member, the number of its newest word that is in the log.

    Attributes:
        plan: What is predicted of the newest generation; None before the first.
    """

    def __init__(
        self,
        session: Session,
        keeper: Keeper | Tenure,
        nodes: Inventory,
        origin: Manifest | None,
        written: Callable[[], Mapping[int, int]],
    ) -> None:
        """Listen where members are to meet. There are none yet."""
        self._session, self._keeper, self._origin = session, keeper, origin
        self._written = written
        worker = session.job.resources.worker
        self._outside = Outside(nodes, worker, session.directory, session.clock, session.stop)
        self._sources = Sources(session, keeper)
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address(), session.clock)
        self._fleet = Fleet(worker, session.clock, keeper)
        self._closed = False
        self._ready: dict[int, MemberReady] = {}
        self._untold: list[Event] = []
        self.plan: Plan | None = None

    @property
    def room(self) -> int:
        """How many members the machines hold."""
        return self._outside.room

    @property
    def pipeline(self) -> str:
        """The name of the data's pipeline."""
        return self._sources.pipeline

    def begin(self) -> None:
        """Start what members are going to ask, before they are there."""
        self._sources.begin()

    def adopt(self, taken: Takeover) -> None:
        """Go on with members that are there, instead."""
        self._sources.adopt(taken.pipeline)
        self._ready = {one.member: one.ready for one in taken.survivors}
        self._fleet.adopt(taken.actors, taken.collators)

    def spawn(self, command: Spawn) -> None:
        """See `Cluster.spawn`; collators are started beside the first members."""
        asked = self._session.job.data.collators
        told = self._session.config(self._sources.told())
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
            self._outside.inventory,
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

    def hear(self, timeout_s: float) -> list[Event | Word]:
        """See `Cluster.hear`.

        Raises:
            FollowedError: Another driver has taken the run over; nothing was heard.
            MachineError: What holds the members' processes is gone.
        """
        untold, self._untold = self._untold, []
        told = self._fleet.poll(0.0 if untold else timeout_s, self._written())
        self._keeper.check()  # before any of it is written
        return [*untold, *told, *self._outside.poll(self._placed), *self._sources.poll()]

    def see(self, event: Event) -> None:
        """An event is in the log: remember what it says of members, data and machines."""
        self._sources.on(event)
        match event:
            case MemberReady():
                self._ready[event.member] = event
            case MemberLeaving():
                self._outside.leaves(event)
            case _:
                pass

    def _placed(self) -> dict[int, str]:
        """The nodes of the members that are there."""
        return {m: ready.node for m, ready in self._ready.items() if self._fleet.holds(m)}

    def poll(self) -> Heard:
        """See `Cluster.poll`."""
        return self._fleet.heard()

    def lines(self) -> list[Lines]:
        """What members' own logs have said since the last call; it came with their events."""
        return self._fleet.lines()

    def close(self) -> None:
        """End all members, and the pipeline; once."""
        if not self._closed:
            self._closed = True
            self._fleet.close()
            self._rendezvous.close()
