"""`Cluster` on Ray: members are actors, and they meet at a port of the driver's process.

Beside them stand what happens to the machines (`ClusterWatch`) and the run's data (`RunInputs`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raycloud.bounded import json_value, read_whole
from raycloud.commands import Form, Meet, Prepare, Reshare, Spawn
from raycloud.data.block import publish
from raycloud.data.index import Input
from raycloud.errors import MachineError, RaycloudError, RunDirectoryError
from raycloud.events import (
    CapacityChanged,
    DataPrepared,
    Event,
    GenerationFormed,
    MemberLeaving,
    MemberReady,
    MemberSpawned,
    Noticed,
    RangeChanged,
    StepsCommitted,
    StopRequested,
    SyncPoint,
)
from raycloud.net.rendezvous_store import Rendezvous
from raycloud.on_ray.attach import draining, free, inventory, node_id_here
from raycloud.on_ray.fleet import ASKED_PLACE_S, PLACE_S, Fleet
from raycloud.on_ray.ingest import living_pipeline, pipeline_name, settings_digest
from raycloud.on_ray.roles import started_collators
from raycloud.on_ray.session import RunHandle, passed_over
from raycloud.order.layout import lanes_of
from raycloud.planner.cost import LOOPBACK_BYTES_PER_S, Profile
from raycloud.planner.inventory import Inventory, capacity
from raycloud.planner.placement import place
from raycloud.planner.plan import Plan, linked, make
from raycloud.planner.seen import SeenSteps
from raycloud.recovery.rendezvous import Meeting
from raycloud.spec.rundir import take_range, take_servers
from raycloud.task import Task

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.checkpoint import Manifest
    from raycloud.on_ray.failover import Failover
    from raycloud.on_ray.pool import ActorPool
    from raycloud.on_ray.servers import Servers
    from raycloud.on_ray.session import Session
    from raycloud.spec import Job
    from raycloud.worker.outbox import OutboxEntry

LOOK_S = 1.0  # between two looks at the machines
REFRESH_S = 10.0  # between two looks for files that were added
FORMAT = 1  # of data.json
_ASKED_S = 0.5
_KEPT_SHARES = 4
_LARGEST_BYTES = 2**30  # there is an entry for each file that a run reads
_MOST_VALUES = 2**26
# What decides, beside the files, which row is which sample.
_LAYOUT = ("partition_by", "partition_bytes", "stratify", "window", "bad_rows")


class RayCluster:
    """The members of one start, its data's pipeline, and what happens to the machines.

    `written` gives, by member, the number of its newest word that is in the log.

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
        self._watch = ClusterWatch(nodes, session)
        self._inputs = RunInputs(session, pool)
        self._servers: Servers | None = None
        self._rendezvous = Rendezvous(ray.util.get_node_ip_address())
        place_s = ASKED_PLACE_S if session.autoscales else PLACE_S
        self._fleet = Fleet(session.job.resources.worker, session.clock, pool, place_s=place_s)
        self.release, self.leave_out = self._fleet.release, self._fleet.leave_out
        self.readmit, self.holds = self._fleet.readmit, self._fleet.holds
        self.poll, self.lines = self._fleet.heard, self._fleet.lines
        self._closed, self._most = False, session.job.most_workers
        self._ready: dict[int, MemberReady] = {}
        self._seen = SeenSteps()
        self._shares: dict[int, tuple[float, ...]] = {}  # by generation, of the newest few
        self._untold: list[Event] = []
        self._sync: SyncPoint | None = None  # in force or to come, as far as anybody has said
        self._at = -1, 0  # the newest generation, and the step before which it stands
        self._link: tuple[float, float] | None = None  # rate and round trip, as members measured it
        self.plan: Plan | None = None

    def secure(self, members: Sequence[int], least: int, wanted: int) -> int | None:
        """See `Fleet.secure`; returns the room there is for now, None: for all that are wanted.

        Where there are several nodes, members are on those that the plan puts them on.
        """
        resources, there, roles = self._session.job.resources.worker, free(), self._session.roles
        on = () if roles is None else roles.trainers
        if roles is None and self._session.seats is None and len(there.nodes) > 1:
            on = place(there, min(len(members), capacity(there, resources)), resources)
        placed = self._fleet.secure(members, least, on=on)
        if placed >= wanted:
            return None
        self._watch.room = placed
        return placed

    @property
    def pipeline(self) -> str:
        """The name of the data's pipeline."""
        return self._inputs.pipeline

    def begin(self) -> None:
        """Start what members are going to ask, before they are there."""
        self._inputs.begin()
        if self._session.job.servers.shards:
            from raycloud.on_ray.servers import Servers  # few jobs have some

            self._servers = Servers(self._session.job, self._session.checkpoints)
            self._servers.begin(self._watch.inventory)

    def adopt(self, found: Failover) -> None:
        """Go on with members that are there, instead."""
        self._inputs.adopt(found.pipeline)
        self._ready = {one.member: one.ready for one in found.survivors}
        self._fleet.adopt(found.actors, found.collators)

    def spawn(self, command: Spawn) -> None:
        """See `Cluster.spawn`; collators are started beside the first members."""
        told = self._session.config(self._inputs.config_fields())
        servers = () if self._servers is None else self._servers.layouts
        told = replace(told, role=command.role, servers=servers)
        if command.joins:
            told = replace(told, joins=True, origin=self._origin, back=command.back)
            for member, vacancy in zip_longest(command.members, command.vacancies):
                self._fleet.await_place(replace(told, member=member), vacancy)
            return
        told = replace(told, resume_step=self._origin.step if self._origin else None)
        job, roles = self._session.job, self._session.roles
        on = ("",) * job.data.collator_count if roles is None else roles.collators
        started = self._fleet.spawn([replace(told, member=m) for m in command.members], on)
        self._untold += started_collators(self._watch.inventory, on, started)
        spawned = (MemberSpawned(member=member, role=told.role) for member in command.members)
        self._untold.extend(spawned)

    def form(self, command: Form) -> None:
        """See `Cluster.form`."""
        self._meet(command, command.settled)

    def prepare(self, command: Prepare) -> None:
        """See `Cluster.prepare`; to a `Meet`, members come while those of the present compute."""
        change, members = command.change, command.members
        if isinstance(change, Meet):
            self._meet(change, command.number, ahead=members)
            members = tuple(set(members) - set(change.members))
        elif isinstance(change, Reshare):
            self._keep_shares(change.generation, change.shares)
        if isinstance(change, Reshare) and change.caught_up:
            self._at = change.generation, self._at[1]
            self._write_plan(members, change.shares)
        for member in members:
            self._fleet.prepare(member, command.number, change)

    def _meet(self, formed: Form | Meet, settled: int, ahead: Sequence[int] = ()) -> None:
        self._rendezvous.forget(before=formed.generation - 1)  # that may be planned, and withdrawn
        if self._servers is not None:
            self._servers.start_all()
        nodes = tuple(self._ready[member].node for member in formed.members)
        zones = self._watch.inventory.zones(nodes)
        for rank, member in enumerate(formed.members):
            meeting = Meeting.of(
                formed,
                rank,
                self._rendezvous.place,
                nodes=nodes,
                zones=zones,
                settled=settled,
                ahead=settled if member in ahead else None,
            )
            self._fleet.form(member, meeting)
        self._seen.begin(formed.generation)
        self._keep_shares(formed.generation, formed.shares)
        self._at = formed.generation, max(self._at[1], getattr(formed, "step", 0))
        if formed.sync != self._sync:
            self._sync = formed.sync
            self._seen.travel()
        self._write_plan(formed.members, formed.shares)

    def _keep_shares(self, generation: int, shares: tuple[float, ...]) -> None:
        newest = sorted({**self._shares, generation: shares}.items())[-_KEPT_SHARES:]
        self._shares = dict(newest)

    def _write_plan(
        self, members: Sequence[int], shares: tuple[float, ...], profile: Profile | None = None
    ) -> Plan:
        """Keep what is predicted of this generation, to be held against what is measured."""
        job, readies = self._job, [self._ready[member] for member in members]
        elastic = job.elastic.model_copy(update={"shares": shares})
        self.plan = plan = make(
            job.model_copy(update={"elastic": elastic}),
            self._watch.inventory,
            profile or self._seen.of(members, self._tried(members)),
            placed={ready.member: ready.node for ready in readies},
            roles=self._session.roles,
        )
        self._session.directory.write_plan(plan.to_json())
        generation, step = self._at
        left = max(0, (self._session.only_steps or plan.steps) - step)
        self._untold.append(plan.said(generation, step, left, seen=profile is not None))
        return plan

    @property
    def _job(self) -> Job:
        job = self._session.job
        asked = job if self._sync is None else job.at(self._sync)
        return self._seen.in_newest_rounds(asked)

    def _tried(self, members: Sequence[int]) -> Profile:
        """What these have measured of themselves; it is known how fast one machine's memory is."""
        readies = [self._ready[member] for member in members]
        alone = len({ready.node for ready in readies}) == 1
        rate, trip_s = (LOOPBACK_BYTES_PER_S, 0.0) if alone else self._link or (None, 0.0)
        return replace(Profile.of(readies), link_bytes_per_s=rate, round_trip_s=trip_s)

    def hear(self, timeout_s: float) -> list[Event | OutboxEntry]:
        """See `Cluster.hear`.

        Raises:
            SupersededError: Another driver has taken the run over; nothing was heard.
            MachineError: What holds the members' processes is gone.
        """
        untold, self._untold = self._untold, []
        told = self._fleet.poll(0.0 if untold else timeout_s, self._written())
        self._pool.check()  # before any of it is written
        return [
            *untold,
            *told,
            *self._allotted(),
            *self._serve(),
            *self._watch.poll(self._placed, self._fleet),
            *self._inputs.poll(),
        ]

    def _serve(self) -> list[Event]:
        """Another number of servers is asked for, or there."""
        servers = self._servers
        found, wanted = list[Event](), None
        if servers is None or not servers.changing:
            wanted, found = self._watch.take_shards()
        if wanted is not None and servers is None:
            detail = {"why": "the job has no servers"}
            found.append(Noticed(what="a wish for other servers was passed over", detail=detail))
        elif servers is not None and wanted is not None and wanted != servers.shards:
            servers.change(wanted, self._watch.inventory)
        if servers is not None and (what := servers.poll()):
            found.append(Noticed(what=what))
            self._fleet.serve(servers.layouts)
        return found

    def _allotted(self) -> list[Event]:
        """Other runs have a right to seats, or no longer."""
        most, elastic = self._pool.most, self._session.job.elastic
        if most == self._most or most is None:
            return []
        self._most = most
        fewest = elastic.min_workers
        allowed = max(fewest, min(self._session.job.most_workers, most))
        return [RangeChanged(min_workers=fewest, max_workers=allowed)]

    def see(self, event: Event) -> None:
        """An event is in the log: remember what it says of members, data and machines."""
        self._inputs.keep(event)
        if isinstance(event, MemberReady):
            self._ready[event.member] = event
            if self._servers is not None and (layouts := self._servers.see(event.node)):
                self._fleet.serve(layouts)
        elif isinstance(event, MemberLeaving):
            self._watch.leaves(event)
        elif isinstance(event, StepsCommitted):
            self._seen.observe(event)
            self._look(event.generation, event.last_step)
        elif isinstance(event, Noticed) and self._seen.take_choice(event):
            self._look(event.detail["generation"], event.detail["step"])
        elif isinstance(event, GenerationFormed) and event.generation == self._at[0]:
            self._learn_links(event)

    def _learn_links(self, formed: GenerationFormed) -> None:
        """Predict anew where members have measured their links, before any of them has computed."""
        if formed.exchanged:
            on = [self._ready[member].node for member in formed.members]
            self._link = linked(self._job, self._watch.inventory, on, formed.exchanged)
            self._write_plan(formed.members, formed.shares)

    def _look(self, generation: int, step: int) -> None:
        """Predict anew by what a generation has shown, and again where that turns out wrong."""
        self._at = max(self._at[0], generation), max(self._at[1], step)
        shares = self._shares.get(generation, ())
        if (plan := self.plan) is None or len(shares) != len(plan.members):
            return
        members = [one.member for one in plan.members]
        if (profile := self._seen.profile(members, self._tried(members), shares)) is not None:
            found = self._write_plan(members, shares, profile).predicted
            self._seen.expect(found.low_s, found.high_s)

    def _placed(self) -> dict[int, str]:
        """The nodes of the members that are there."""
        return {m: ready.node for m, ready in self._ready.items() if self._fleet.holds(m)}

    def close(self) -> None:
        """End all members, and the pipeline; once."""
        if not self._closed:
            self._closed = True
            self._fleet.close()
            if self._servers is not None:
                self._servers.close()
            self._rendezvous.close()


class ClusterWatch:
    """What befalls a run from outside: machines that come and go, and what people ask of it.

    Attributes:
        inventory: The machines as they were last seen.
        room: How many members have a place on them, or could have one.
    """

    def __init__(self, inventory: Inventory, session: Session) -> None:
        self.inventory = inventory
        self._asks_for = session.job.most_workers if session.autoscales else 0
        self._resources, self._points = session.job.resources.worker, session.asked_points
        self._directory, self._clock, self._stop = session.directory, session.clock, session.stop
        self._handle = session.stop if isinstance(session.stop, RunHandle) else None
        self._looked_s = self._asked_s = self._clock.monotonic_s()
        self._leaving, self._told = set[str](), set[int]()  # nodes, and members on them
        self.room = self._seen = capacity(inventory, self._resources)

    def _room(self, placed: Mapping[int, str], places: int) -> int:
        """As it looks now; what is going to leave has none.

        Args:
            placed: The nodes of members that are there.
            places: How many members there are, with those that have yet to come.
        """
        self.inventory = inventory()
        nodes = tuple(node for node in free(self.inventory).nodes if node.name not in self._leaving)
        going = sum(node in self._leaving for node in placed.values())
        return capacity(Inventory(nodes=nodes), self._resources) + places - going

    def poll(self, placed: Callable[[], Mapping[int, str]], fleet: Fleet) -> list[Event]:
        """What has happened since this was last asked."""
        now_s = self._clock.monotonic_s()
        found: list[Event] = []
        if self._stop is not None and (why := self._stop.reason) is not None:
            self._stop = None
            found.append(StopRequested(reason=why))
        if now_s - self._asked_s >= _ASKED_S:
            self._asked_s = now_s
            found += [*self._requests(), *self._points(), *self._drained(placed())]
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            room, before = self._room(placed(), fleet.places), self._seen
            # Members then wait for their places, by which Ray's autoscaler goes.
            seen = max(room, self._asks_for)
            if seen == before != self.room:  # twice: what is given to another is nobody's meanwhile
                if room < seen:
                    what = f"Ray's autoscaler is asked for room for {seen} workers"
                    found.append(Noticed(what=what, detail={"machines_hold": room}))
                self.room = seen
                found.append(CapacityChanged(workers=seen))
            self._seen = seen
        return found

    def leaves(self, event: MemberLeaving) -> None:
        """A member has said of itself or its node that it is going to leave."""
        self._told.add(event.member)
        if event.node:
            self._leaving.add(event.node)

    def _drained(self, placed: Mapping[int, str]) -> list[Event]:
        """The members on nodes that Ray drains, each told once."""
        found: list[Event] = []
        for node, notice in draining(self._clock).items():
            self._leaving.add(node)
            members = {member for member, at in placed.items() if at == node} - self._told
            self._told |= members
            leaving = partial(
                MemberLeaving, reason=notice.reason, deadline_s=notice.deadline_s, node=node
            )
            found += [leaving(member=member) for member in sorted(members)]
        return found

    def take_shards(self) -> tuple[int | None, list[Event]]:
        """How many shards of servers are asked for since the last call; None: no wish."""
        if self._handle is not None and (wanted := self._handle.take_servers()) is not None:
            return wanted, []
        try:
            return take_servers(self._directory.path), []
        except ValueError as error:
            return None, [passed_over("servers", error)]

    def _requests(self) -> list[Event]:
        if self._handle is not None and (wanted := self._handle.take_range()) is not None:
            return [RangeChanged(**wanted)]
        try:
            asked = take_range(self._directory.path)
        except ValueError as error:
            return [passed_over("workers", error)]
        return [] if asked is None else [RangeChanged(**asked)]


class RunInputs:
    """What the driver knows of the run's `Source`s. Asks the pipeline from time to time.

    Attributes:
        pipeline: What it is called.
        known: The inputs of the training samples, in their order.
    """

    def __init__(self, session: Session, pool: ActorPool) -> None:
        """Read what the run knew, if it goes on.

        Raises:
            RunDirectoryError: `data.json` is damaged.
        """
        self._session, self._pool = session, pool
        self._file = session.directory.data_json
        self._look_s = float("inf")
        self._looking: Any = None
        self._told: set[str] = set()
        self.known = read_known(self._file) if session.resume else ()
        self.pipeline = pipeline_name()
        self._own_pipeline = ""
        if pool.pipelines and not session.job.data.refresh:
            before = read_pipeline(self._file) if self.known else ""
            if not self.known or before.startswith(pool.pipelines):  # by which they were read
                self.pipeline = before or shared_name(session, pool.pipelines)
                self._own_pipeline = f"{self.pipeline}-{settings_digest(session.job)}"

    def begin(self) -> None:
        """Start the pipeline before members ask for it, if they will. They hear of its errors."""
        session = self._session
        if session.task.preprocess is not Task.preprocess:  # which is for the rows of a `Source`
            from raycloud.on_ray.pipeline import PipelineConfig  # loads much

            job = session.code.named_in(session.job)
            config = PipelineConfig(job=job, task=session.code, known=self.known)
            told = self.pipeline, [ray.put(config)], node_id_here()
            self._pool.start_pipeline(*told).call.remote("begin")

    def adopt(self, pipeline: str) -> None:
        """Go on with a pipeline that is there."""
        self.pipeline = pipeline
        self._look_later()

    def config_fields(self) -> dict[str, Any]:
        """What members are told, as fields of `MemberConfig`."""
        return {
            "pipeline": self.pipeline,
            "own_pipeline": self._own_pipeline,
            "known": self.known,
            "home": node_id_here(),
        }

    def keep(self, event: Event) -> None:
        """Keep which inputs the training samples come from, before a checkpoint counts on them."""
        if not isinstance(event, DataPrepared) or event.split != "train":
            return
        inputs = tuple(Input(**record) for record in event.inputs)
        if len(inputs) > len(self.known) or not self._file.exists():
            self.known = inputs
            write_known(self._file, self._session.job, inputs, self.pipeline)
        if self._look_s == float("inf"):
            self._look_later()

    def _look_later(self) -> None:
        if self._session.job.data.refresh:
            self._look_s = self._session.clock.monotonic_s() + REFRESH_S

    def poll(self) -> list[Event]:
        """What the last look for added files has found. Returns at once."""
        if self._looking is None:
            if self._session.clock.monotonic_s() < self._look_s:
                return []
            self._look_later()
            try:
                self._looking = living_pipeline(self.pipeline).call.remote("refresh")
            except ValueError:  # whoever needs a block makes it again
                return self._once("the data's pipeline is gone", "resume the run to take them up")
        if not ray.wait([self._looking], timeout=0)[0]:
            return []
        looking, self._looking = self._looking, None
        try:
            found = ray.get(looking)
        except RayError as error:
            return self._once(f"the data's pipeline did not answer: {type(error).__name__}", "")
        if isinstance(found, RaycloudError):
            return self._once(found.message, found.hint)
        told: list[Event] = [Noticed(what=what, detail=dict(d)) for what, d in found.notices]
        return [*told, found.grown] if found.grown is not None else told

    def _once(self, why: str, hint: str) -> list[Event]:
        if why in self._told:
            return []
        self._told.add(why)
        detail = {"why": why, "hint": hint}
        return [Noticed(what="files that were added are not taken up", detail=detail)]


def shared_name(session: Session, prefix: str) -> str:
    """The name of a pipeline for all runs whose data may be prepared alike.

    They have the same task and `data`, and so many micro-batches a step that samples are dealt to
    the same lanes. Whose settings make other rows of it finds that out (`RayProvider.provide`).
    """
    job = session.job
    lanes = lanes_of(job.global_batch, job.micro_batch)
    same = [session.code.digest, job.seed, lanes, job.data.model_dump(mode="json")]
    told = json.dumps(same, sort_keys=True, default=repr)
    return f"{prefix}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def read_known(file: Path) -> tuple[Input, ...]:
    """The inputs of a run, in their order; none where it has read none.

    Raises:
        RunDirectoryError: The file is damaged, or of another version.
    """
    try:
        record = json_value(read_whole(file, _LARGEST_BYTES), _MOST_VALUES)
        inputs = tuple(Input(**one) for one in record["inputs"])
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']!r}, not {FORMAT}")  # noqa: TRY301 - as below
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}",
            hint="it says which files the samples came from: restore it, go on with the version of "
            "raycloud that wrote it, or start a new run",
        ) from error
    return inputs


def read_pipeline(file: Path) -> str:
    """The name of the pipeline that a run's known inputs were read by; empty: nobody knows."""
    record = json_value(read_whole(file, _LARGEST_BYTES), _MOST_VALUES)
    return str(record.get("pipeline", ""))


def write_known(file: Path, job: Job, inputs: tuple[Input, ...], pipeline: str = "") -> None:
    """Keep the inputs of a run, all of them or what was there, and who has read them.

    Raises:
        MachineError: They cannot be written.
    """
    data = job.data.model_dump(mode="json")
    record = {
        "format": FORMAT,
        "layout": {
            "global_batch": job.global_batch,
            "micro_batch": job.micro_batch,
            **{name: data[name] for name in _LAYOUT},
        },
        "versions": max((one.version for one in inputs), default=0) + 1,
        "inputs": [asdict(one) for one in inputs],
        "pipeline": pipeline,
    }
    try:
        publish(file, json.dumps(record, indent=1).encode())
    except OSError as error:
        raise MachineError(
            f"{file} cannot be written: {error.strerror}",
            hint="free space there, or give another --run-dir",
        ) from error
