"""A cluster, asked about itself: what each node says, its clock, and the links between them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from raycloud.clock import Clock, SystemClock
from raycloud.doctor.facts import ClusterFacts, Gpus, Link, Node
from raycloud.doctor.gather import gpu_devices, node_here
from raycloud.doctor.links import LIMIT_S, Ear, ahead, call
from raycloud.errors import MachineError
from raycloud.on_ray.attach import reach

if TYPE_CHECKING:
    from raycloud.doctor.facts import Machine, Settings

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
        options = {"num_cpus": 0, "scheduling_strategy": there}
        task = ray.remote(_versions_alone()).options(max_retries=0, **options)
        self.versions = task.remote()
        # A node without raycloud cannot even load it: the versions above tell why.
        actor: Any = ray.remote(ProbeActor).options(max_concurrency=2, **options)
        self.actor = actor.remote()
        gpus = float(listed["Resources"].get("GPU", 0.0))
        self.said = self.actor.said.remote(self.name, gpus)


def _node(probe: _Probe, said: Any, versions: Any, clock: Clock) -> Node:
    """The node as a fact, its clock asked now."""
    known = dict(versions) if isinstance(versions, dict) else {}
    try:
        if isinstance(said, Exception):
            raise said  # noqa: TRY301 - told as what follows is
        # It has just answered, so it gets less time than for its first word.
        apart = ahead(clock, lambda: float(_get(probe.actor.now_s.remote(), LIMIT_S)))
    except Exception as error:  # noqa: BLE001 - as above
        return Node(name=probe.name, machine=None, versions=known, silence=_told(error))
    return Node(
        name=probe.name,
        machine=said[0],
        versions=known or said[0].versions,
        ahead_s=apart[0],
        unsure_s=apart[1],
    )


class ProbeActor:
    """Stands on a node and answers: thin, what it says comes from `raycloud.doctor`."""

    def __init__(self) -> None:
        self._ears: list[Ear] = []

    def said(self, name: str, gpus: float) -> tuple[Machine, Settings | None]:
        """What the node says of itself; an actor is a child of its node's raylet."""
        return node_here(name, raylet=os.getppid(), gpus=gpus_here(gpus))

    def now_s(self) -> float:
        """The node's unix time, in seconds."""
        return SystemClock().unix_s()

    def listen(self, host: str) -> tuple[int, bytes]:
        """Listen for one caller; the port, and the key that it has to know."""
        ear = Ear(host)
        self._ears.append(ear)  # kept until the actor ends
        return ear.port, ear.key

    def call(self, host: str, port: int, key: bytes, *, measure: bool) -> tuple[float, Any]:
        """Call another node."""
        return call(host, port, key, SystemClock(), measure=measure)


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
        met = _got(source.actor.call.remote(target.address, *heard, measure=measure))
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
