"""Survey: a cluster, asked about itself, and what a job's task takes on each of its machines.

`checkup` asks each node what it says of itself, its clock, and for the links between nodes.

`survey` starts workers where a job would have them, at the same time, as in a run; then each node
sends to the next for a second, as in a ring. Where there are more than `MOST` workers, nodes that
are not measured are taken to be as those of their type, told by their resources and labels.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import repeat
from typing import TYPE_CHECKING, Any

from raycloud import __version__
from raycloud.bounded import expanded, read_whole
from raycloud.clock import Clock, SystemClock
from raycloud.data.block import publish
from raycloud.doctor.facts import ClusterFacts, Gpus, Link
from raycloud.doctor.facts import Node as NodeFacts
from raycloud.doctor.gather import gpu_devices, node_here
from raycloud.doctor.links import LIMIT_S, MEASURED_S, LinkEnds, ahead
from raycloud.errors import MachineError, MemberLostError
from raycloud.events import MemberFailed, MemberLost, MemberReady
from raycloud.on_ray.attach import NODE_LABEL, free, node_id_here, reach
from raycloud.planner.cost import LOOPBACK_BYTES_PER_S, Profile
from raycloud.planner.surveyed import LinkMeasure, Measures, NodeMeasures, digest, name_of

if TYPE_CHECKING:
    from pathlib import Path

    from raycloud.doctor.facts import Machine, Settings
    from raycloud.packing.code import TaskCode
    from raycloud.planner.inventory import Inventory, Node
    from raycloud.spec import Job
    from raycloud.worker.context import MemberConfig

MOST = 16  # workers that are measured, or as many as there are types of nodes
_EACH = 4  # of them on one node
_GIVEN_BACK_S, _LOOK_S = 2.0, 0.05  # to wait for what Ray gives back at most, between two looks
_RING_S = 0.5  # that nodes send for, all at the same time

PATIENCE_S = 60.0
_REFUSALS = ("Unauthenticated", "InvalidAuthToken", "AuthenticationError", "authentication token")


def checkup(address: str, *, links: bool, clock: Clock, tls: bool = False) -> ClusterFacts:
    """Ask the cluster at an address; it is left as it was.

    With `links` their rates are measured, a second for each node; `tls`: Ray speaks encrypted.

    Raises:
        MachineError: No temporary file can be made here.
    """
    noise: Callable[[], str] = str
    try:
        with _stderr_kept() as noise:
            reach(address, tls=tls)
            import ray

            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except MachineError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the finding
        text = f"{type(error).__name__}: {error}"
        refused = any(mark in text + noise() for mark in _REFUSALS)
        return ClusterFacts(address=address, failure=text.splitlines()[0], refused=refused)
    try:
        return _asked(address, ray.nodes(), links=links, clock=clock)
    finally:
        ray.shutdown()


def _asked(
    address: str, listed: Sequence[dict[str, Any]], *, links: bool, clock: Clock
) -> ClusterFacts:
    living = sorted((node for node in listed if node["Alive"]), key=_head_first)
    addresses = Counter(node["NodeManagerAddress"] for node in living)
    probes = [_Probe(node, alone=addresses[node["NodeManagerAddress"]] == 1) for node in living]
    told = all_got([probe.said for probe in probes] + [probe.versions for probe in probes])
    said, versions = told[: len(probes)], told[len(probes) :]
    nodes = tuple(map(_node, probes, said, versions, repeat(clock)))
    known = [one[1] for one in said if isinstance(one, tuple) and one[1] is not None]
    able = [probe for probe, node in zip(probes, nodes, strict=True) if not node.silence]
    return ClusterFacts(
        address=address,
        auth_mode=(known[0].auth_mode or "disabled") if known else None,
        nodes=nodes,
        links=tuple(_linked(able, measure=links)),
    )


class _Probe:
    """A node that is being asked; nothing waits."""

    def __init__(self, listed: dict[str, Any], *, alone: bool) -> None:
        """Send the questions; a node that is not alone at its address is told by its id, too."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.address = str(listed["NodeManagerAddress"])
        self.name = f"node {self.address}" + ("" if alone else f" ({listed['NodeID'][:8]})")
        there = NodeAffinitySchedulingStrategy(listed["NodeID"], soft=False)
        task = ray.remote(_versions_alone()).options(
            max_retries=0, num_cpus=0, scheduling_strategy=there
        )
        self.versions = task.remote()
        # A node without raycloud cannot even load it: the versions above tell why.
        self.actor = _probe_on(listed["NodeID"])
        gpus = float(listed["Resources"].get("GPU", 0.0))
        self.said = self.actor.said.remote(self.name, gpus)


def _probe_on(node: str) -> Any:
    """A probe on a node of this id, and nowhere else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    actor: Any = ray.remote(ProbeActor)
    return actor.options(max_concurrency=2, num_cpus=0, scheduling_strategy=there).remote()


def ring_links(nodes: Sequence[Node], there: Mapping[str, Any]) -> list[Link]:
    """The links from each of some nodes to the next, the last to the first, all at the same time.

    So do the members of a ring send. What could not be measured has no rate.

    Args:
        nodes: In their order in the ring.
        there: Actors on nodes, by name, that can call and listen; on others some are started.
    """
    import ray

    probes = {node.name: _probe_on(node.name) for node in nodes if node.name not in there}
    actors = [{**there, **probes}[node.name] for node in nodes]
    ears = all_got([a.listen.remote(n.address) for a, n in zip(actors, nodes, strict=True)])
    pairs = list(zip(range(len(nodes)), [*range(1, len(nodes)), 0], strict=True))
    calls = [
        actors[a].call.remote(nodes[b].address, *ears[b], _RING_S)
        for a, b in pairs
        if not isinstance(ears[b], Exception)
    ]
    heard = iter(all_got(calls))
    found = []
    for a, b in pairs:
        link = Link(source=nodes[a].name, target=nodes[b].name)
        met = ears[b] if isinstance(ears[b], Exception) else next(heard)
        found.append(
            replace(link, failure=_told(met))
            if isinstance(met, Exception)
            else replace(link, round_trip_s=met[0], bytes_per_s=met[1])
        )
    for actor in probes.values():
        ray.kill(actor)
    return found


def _node(probe: _Probe, said: Any, versions: Any, clock: Clock) -> NodeFacts:
    """The node as a fact, its clock asked now."""
    known = dict(versions) if isinstance(versions, dict) else {}
    try:
        if isinstance(said, Exception):
            raise said  # noqa: TRY301 - told as what follows is
        # It has just answered, so it gets less time than for its first word.
        apart = ahead(clock, lambda: float(_get(probe.actor.now_s.remote(), LIMIT_S)))
    except Exception as error:  # noqa: BLE001 - as above
        return NodeFacts(name=probe.name, machine=None, versions=known, silence=_told(error))
    return NodeFacts(
        name=probe.name,
        machine=said[0],
        versions=known or said[0].versions,
        ahead_s=apart[0],
        unsure_s=apart[1],
    )


class ProbeActor:
    """Stands on a node and answers: thin, what it says comes from `raycloud.doctor`."""

    def __init__(self) -> None:
        self._ends = LinkEnds(SystemClock())

    def said(self, name: str, gpus: float) -> tuple[Machine, Settings | None]:
        """What the node says of itself; an actor is a child of its node's raylet."""
        return node_here(name, raylet=os.getppid(), gpus=gpus_here(gpus))

    def now_s(self) -> float:
        """The node's unix time, in seconds."""
        return SystemClock().unix_s()

    def listen(self, host: str) -> tuple[int, bytes]:
        """See `LinkEnds.listen`."""
        return self._ends.listen(host)

    def call(self, host: str, port: int, key: bytes, lasts_s: float) -> tuple[float, Any]:
        """See `LinkEnds.call`."""
        return self._ends.call(host, port, key, lasts_s)


def _linked(probes: Sequence[_Probe], *, measure: bool) -> Iterator[Link]:
    """Each node to the next, the last to the first, as in a ring; one after the other."""
    if len(probes) == 1:
        return
    for source, target in zip(probes, [*probes[1:], *probes[:1]], strict=True):
        link = Link(source=source.name, target=target.name)
        heard = _got(target.actor.listen.remote(target.address), LIMIT_S)
        if isinstance(heard, Exception):
            yield replace(link, failure=f"cannot listen there: {_told(heard)}")
            continue
        met = _got(source.actor.call.remote(target.address, *heard, MEASURED_S * measure))
        if isinstance(met, Exception):
            yield replace(link, failure=_told(met))
        else:
            yield replace(link, round_trip_s=met[0], bytes_per_s=met[1])


def _versions_alone() -> Callable[[], dict[str, str | None]]:
    """A task that travels by value: it runs where there is no raycloud, or another one."""

    def versions() -> dict[str, str | None]:
        import platform
        from importlib import metadata

        found: dict[str, str | None] = {"python": platform.python_version()}
        for library in ("raycloud", "ray", "torch"):
            try:
                found[library] = metadata.version(library)
            except metadata.PackageNotFoundError:
                found[library] = None
        return found

    return versions


class SilentError(Exception):
    """A node has not answered in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer within {limit_s:g} s")


def all_got(references: Sequence[Any], limit_s: float = PATIENCE_S) -> list[Any]:
    """What each of several calls brought, or the exception; all of them have the same time."""
    import ray

    ready, _ = ray.wait(list(references), num_returns=len(references), timeout=limit_s)
    there = set(ready)
    return [_got(one) if one in there else SilentError(limit_s) for one in references]


def _got(reference: Any, limit_s: float = PATIENCE_S) -> Any:
    """What a call brought, or the exception."""
    try:
        return _get(reference, limit_s)
    except Exception as error:  # noqa: BLE001 - whatever it was, it is the finding
        return error


def _get(reference: Any, limit_s: float) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        raise SilentError(limit_s) from None


def _told(error: Exception) -> str:
    """Why, in one line: of what happened in a task, its own exception."""
    import ray

    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, SilentError):
        return str(cause)
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[-1].strip() if text else ''}"


def _head_first(node: dict[str, Any]) -> tuple[bool, str, str]:
    return (
        "node:__internal_head__" not in node["Resources"],
        str(node["NodeManagerAddress"]),
        str(node["NodeID"]),
    )


@contextlib.contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """What Ray's C++ writes to stderr meanwhile, which says why it failed, instead of a screenful.

    Yields:
        Gives what was written, once this is over.

    Raises:
        MachineError: No temporary file can be made: this machine's fault, and not the cluster's.
    """
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    except OSError as error:
        raise MachineError(
            f"no temporary file can be made on this machine: {error}",
            hint="make room there, or let TMPDIR name another folder",
        ) from error
    sys.stderr.flush()
    kept, written = os.dup(2), ""
    with file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: written
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            written = file.read().decode(errors="replace")


def gpus_here(handed_out: float | None = None) -> Gpus:
    """GPUs by the word of the driver, of torch and of Ray.

    Torch is imported only where somebody speaks of GPUs: it takes seconds.
    """
    driver = gpu_devices()
    if not (driver or handed_out):
        return Gpus(ray=handed_out)
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = tuple(torch.cuda.get_device_name(number) for number in range(seen))
    return Gpus(driver=driver, torch=seen, ray=handed_out, names=names)


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found out.

    Attributes:
        readies: What the workers on each measured node say of themselves, by the node's name.
        stands_for: For each node the one whose measure is taken for it.
        link_bytes_per_s: Of the slowest link from a measured node to the next; None: there is one
            node only, or no link could be measured.
        round_trip_s: Of the farthest two of them.
        kept_s: The age of the oldest measure that was kept and counts; None: all are new.
    """

    readies: Mapping[str, Sequence[MemberReady]]
    stands_for: Mapping[str, str]
    link_bytes_per_s: float | None
    round_trip_s: float
    kept_s: float | None = None

    def profile(self, placed: Sequence[str]) -> Profile:
        """Of the task, with the speeds of workers on these nodes."""
        turn = Counter[str]()
        found = []
        for node in placed:
            readies = self.readies[self.stands_for[node]]
            found.append(readies[turn[node] % len(readies)])
            turn[node] += 1
        alone = len(set(placed)) == 1
        return replace(
            Profile.of(found),
            link_bytes_per_s=LOOPBACK_BYTES_PER_S if alone else self.link_bytes_per_s,
            round_trip_s=self.round_trip_s,
        )


def survey(
    job: Job,
    code: TaskCode,
    nodes: Inventory,
    placed: Sequence[str],
    kept: MeasuresFile | None = None,
) -> Survey:
    """Measure the nodes on which workers are `placed`, and the links between them.

    What is in the file `kept`, and still counts, is not measured again, and what is measured is
    kept there.

    Raises:
        MachineError: A worker was lost, or found no place on its node.
        JobError: The task's code raised.
    """
    known = {node.name: node for node in nodes.nodes}
    counts = Counter(placed)
    stands_for = chosen([known[name] for name in counts], MOST)
    measured = list(dict.fromkeys(stands_for.values()))
    each = max(1, min(_EACH, MOST // len(measured)))
    many = {name: min(each, counts[name]) for name in measured}
    before = Measures() if kept is None else kept.read()
    found: dict[str, NodeMeasures] = {}
    for name in measured:
        one = before.of(digest(*_type_of(known[name])), known[name].address, many[name])
        if one is not None:
            found[name] = one
    ring = [known[name] for name in measured] if len(measured) > 1 else []
    link = before.link([node.address for node in ring]) if ring else None
    missing = [known[name] for name in measured if name not in found]
    if missing or (ring and link is None):
        new, seen = _measured(job, code, missing, many, ring if link is None else [])
        link, found = seen or link, {**found, **{one.name: new[one.name] for one in missing}}
        if kept is not None:
            kept.write(before.learn([*new.values()], seen))
    made_s = [one.unix_s for one in found.values()] + ([] if link is None else [link.unix_s])
    age_s = SystemClock().unix_s() - min(made_s)
    return Survey(
        {name: _here(found[name].readies, name) for name in measured},
        stands_for,
        None if link is None else link.bytes_per_s,
        0.0 if link is None else link.round_trip_s,
        kept_s=age_s if len(missing) < len(measured) or (link and link in before.links) else None,
    )


def _here(readies: Sequence[MemberReady], name: str) -> list[MemberReady]:
    """The same words, said on the node of this name."""
    return [replace(one, node=name) for one in readies]


class MeasuresFile:
    """Where the measures of a task and job are kept, on the machine of the command.

    What cannot be read is not there, and what cannot be written is measured again.
    """

    def __init__(self, folder: Path, job: Job, code: TaskCode) -> None:
        """Name the file; `folder` need not be there."""
        versions = (__version__, platform.python_version(), metadata.version("torch"))
        self._path = folder / f"{name_of(code.named_in(job), code.digest, versions)}.json"

    def read(self) -> Measures:
        """What still counts."""
        try:
            text = read_whole(expanded(self._path)).decode()
            return Measures.from_json(text).fresh(SystemClock().unix_s())
        except (OSError, ValueError):
            return Measures()

    def write(self, measures: Measures) -> None:
        """Keep them in place of what was there."""
        path = expanded(self._path)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            publish(path, measures.to_json().encode())


def chosen(nodes: Sequence[Node], most: int) -> dict[str, str]:
    """For each node the one that is measured in its place: itself, of the first `most`.

    One of each type at least is measured, and of no type far more than of another.

    >>> from raycloud.planner.inventory import Node
    >>> chosen([Node(name="a"), Node(name="b", cpus=4), Node(name="c")], 2)
    {'a': 'a', 'b': 'b', 'c': 'a'}
    """
    by_type: dict[Any, list[str]] = {}
    for node in nodes:
        by_type.setdefault(_type_of(node), []).append(node.name)
    types = list(by_type.values())
    turns = max(map(len, types), default=0)
    order = [names[turn] for turn in range(turns) for names in types if turn < len(names)]
    measured = set(order[: max(most, len(by_type))])
    return {
        node.name: node.name if node.name in measured else by_type[_type_of(node)][0]
        for node in nodes
    }


def _type_of(node: Node) -> tuple[Any, ...]:
    labels = {name: text for name, text in node.labels.items() if name != NODE_LABEL}
    memory = None if node.memory_bytes is None else node.memory_bytes.bit_length()
    return node.cpus, node.gpus, memory, tuple(sorted(labels.items()))


def tried_config(job: Job, code: TaskCode, folder: str) -> MemberConfig:
    """Of a process that only measures the task, and keeps nothing but in `folder`."""
    from raycloud.on_ray.ingest import pipeline_name
    from raycloud.worker.context import MemberConfig

    return MemberConfig(
        member=0,
        node="",
        address="",
        job=code.named_in(job),
        task=code,
        checkpoints=folder,
        pipeline=pipeline_name(),
        home=node_id_here(),
    )


def _measured(
    job: Job, code: TaskCode, nodes: Sequence[Node], many: Mapping[str, int], ring: Sequence[Node]
) -> tuple[dict[str, NodeMeasures], LinkMeasure | None]:
    """What so many workers on each of these nodes measure of themselves, all at the same time.

    Then the first of each node measure the links of the ring; None: it has none.
    """
    from raycloud.on_ray.fleet import Fleet
    from raycloud.on_ray.session import error_of
    from raycloud.worker.outbox import OutboxEntry

    on = [node.name for node in nodes for _ in range(many[node.name])]
    clock = SystemClock()
    fleet = Fleet(job.resources.worker, clock)
    found: dict[int, MemberReady] = {}
    with tempfile.TemporaryDirectory() as nothing, contextlib.closing(fleet):
        members = range(len(on))
        if on:
            first = replace(tried_config(job, code, nothing), plans=True)
            fleet.secure(members, len(on), on=on, strictly=True)
            fleet.spawn([replace(first, member=member) for member in members])
        while len(found) < len(on):
            for event in fleet.poll(1.0, {}):
                match event:
                    case OutboxEntry(event=MemberReady() as ready):
                        found[ready.member] = ready
                    case OutboxEntry(event=MemberFailed() as failed):
                        raise error_of(failed)
                    case MemberLost():
                        raise MemberLostError(f"a worker was lost: {event.reason}")
                    case _:
                        pass
        there = {name: fleet.actor(member) for member, name in enumerate(on)}
        links = ring_links(ring, there) if ring else []
    _wait_given_back(nodes, clock)
    now_s = clock.unix_s()
    said: dict[str, list[MemberReady]] = {}
    for member, name in enumerate(on):
        said.setdefault(name, []).append(found[member])
    return {
        node.name: NodeMeasures(
            kind=digest(*_type_of(node)),
            address=node.address,
            unix_s=now_s,
            readies=tuple(said[node.name]),
        )
        for node in nodes
    }, _slowest(ring, links, now_s)


def _wait_given_back(nodes: Sequence[Node], clock: Clock) -> None:
    """Wait until Ray says that what these had free is free again, or somebody else may have it."""
    pause, over_s = threading.Event(), clock.monotonic_s() + _GIVEN_BACK_S
    while clock.monotonic_s() < over_s:
        left = {node.name: node.cpus for node in free().nodes}
        if all(left.get(node.name, 0.0) >= node.cpus for node in nodes):
            return
        pause.wait(_LOOK_S)


def _slowest(ring: Sequence[Node], links: Sequence[Link], now_s: float) -> LinkMeasure | None:
    rates = [link.bytes_per_s for link in links if link.bytes_per_s]
    trips = [link.round_trip_s for link in links if link.round_trip_s]
    if not links:
        return None
    return LinkMeasure(
        addresses=tuple(node.address for node in ring),
        unix_s=now_s,
        bytes_per_s=min(rates, default=None),
        round_trip_s=max(trips, default=0.0),
    )
