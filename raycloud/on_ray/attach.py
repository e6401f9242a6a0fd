"""A Ray to run on: one that is already there, or one started inside this process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.bounded import expanded
from raycloud.doctor.checks import SESSION, SOCKET_BYTES
from raycloud.doctor.facts import Settings
from raycloud.doctor.links import greet
from raycloud.errors import MachineError
from raycloud.planner.inventory import Inventory, Node
from raycloud.preemption import PreemptionNotice
from raycloud.redact import know, redact_text
from raycloud.spec import Environment
from raycloud.spec.secrets import secrets_of

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.spec import Job

# Read by Ray when it starts, and by the workers it starts. A user's own settings win.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_LOG_TO_DRIVER_EVENT_LEVEL": "ERROR",
}
_HASH_SEED = "PYTHONHASHSEED"
_EMBEDDED = {
    _HASH_SEED: "0",  # a set of strings has the same order in every worker
    "RAY_enable_metrics_collection": "0",  # nobody scrapes an embedded cluster
    "RAY_task_events_report_interval_ms": "0",  # and nobody lists its tasks
    "RAY_preload_python_modules": "torch",  # imported while the cluster starts, not after
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "3600",  # nobody is shown Ray's own events, either,
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",  # or how its processes fare
    "RAY_worker_niceness": "0",  # Ray would take 15: behind every other process of the machine
}

_NOBODY = b"127.0.0.1:1"  # refuses connections
NODE_LABEL = "ray.io/node-id"  # that Ray gives each node
NAMESPACE = "raycloud"  # of names on a cluster that was there before
REASON = "Ray drains its node"  # it keeps to itself what for, as long as the node lives


@contextlib.contextmanager
def attached(
    job: Job, address: str | None, metadata: Mapping[str, str] | None = None
) -> Iterator[bool]:
    """Attach to the cluster at `address`, or start one here and end it afterwards.

    A caller that is attached already stays so: its Ray is used and left as it was. `metadata` is
    what a cluster that is joined here shows of this process, beside what a submission says.

    Raises:
        MachineError: No cluster answers at `address`.
    """
    with environment(_QUIET if address else _QUIET | _EMBEDDED):
        import ray  # reads its settings as it is imported

        if ray.is_initialized():
            yield False
            return
        before = signal.getsignal(signal.SIGTERM)
        _start(job, address, metadata)
        try:
            _keep_private(expanded(Path("~/.ray/auth_token")))
            yield address is None
        finally:
            ray.shutdown()  # which leaves SIGTERM to the system
            if before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)


def joined() -> bool:
    """Whether this process has joined a cluster that was there before, and is named there."""
    import ray

    return bool(ray.get_runtime_context().namespace == NAMESPACE)


def hash_seeded(*, always: bool = False) -> dict[str, Any]:
    """Options of an actor whose process, and those that it starts, hash strings as all others do.

    An embedded cluster has that in its environment; on another one Ray starts a process for it.

    Args:
        always: Also where this process has a seed itself, which says nothing of the cluster's.
    """
    if _HASH_SEED in os.environ and not always:
        return {}
    seed = os.environ.get(_HASH_SEED, _EMBEDDED[_HASH_SEED])
    return {"runtime_env": {"env_vars": {_HASH_SEED: seed}}}


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those of these variables that are not set; afterwards they are not set again."""
    ours = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in ours})
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _start(job: Job, address: str | None, metadata: Mapping[str, str] | None) -> None:
    import ray

    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "job_config": ray.job_config.JobConfig(metadata=dict(metadata or {})),
    }
    if address is None:
        _check_temporary()
        what = "Ray could not be started"
        hint = "look into the newest session below Ray's temporary directory for its logs"
        options |= {"include_dashboard": False, "num_cpus": _embedded_cpus(job)}
    else:
        named = os.environ.get("RAY_ADDRESS") == address
        what = f"no Ray cluster answers at {address!r}{' (RAY_ADDRESS)' if named else ''}"
        instead = "unset RAY_ADDRESS" if named else "leave --address out"
        hint = (
            "check `ray status` there; where it asks for a token, set RAY_AUTH_MODE=token; or "
            f"{instead} to run on this machine alone"
        )
        options |= {"namespace": NAMESPACE}
    try:
        if address is not None:
            reach(address, tls=True)  # who it is, Ray finds out
        with _handler_kept(), _few_services() if address is None else contextlib.nullcontext():
            ray.init(address=address or "local", **options)
    except Exception as error:
        # Ray raises a bare Exception where its own processes take too long to start.
        known = isinstance(error, OSError | RuntimeError | ValueError) or type(error) is Exception
        if not known:
            raise
        raise MachineError(f"{what}: {error}", hint=hint) from error


def _check_temporary() -> None:
    """Ray puts sockets below its temporary folder, and the system limits their paths."""
    most, folder = SOCKET_BYTES - len(SESSION), str(Settings.from_mapping(os.environ).temp)
    if len(os.fsencode(folder)) > most:
        name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
        raise MachineError(
            f"{name} = {folder!r} is too long: Ray's sockets below it would have paths that the "
            "system does not allow",
            hint=f"set RAY_TMPDIR to a path of at most {most} bytes, such as /tmp",
        )


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
    """Ray takes SIGTERM over when it starts: a caller that has a handler of its own keeps it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _few_services() -> Iterator[None]:
    """Ray starts without its dashboard, log monitor and autoscaler, which nobody asks here.

    `ray.init` then does not wait for the dashboard to start, and the workers have the processor
    and the memory that three processes would take. What it starts is in groups of its own: a signal
    to this process's group, as `timeout` sends it, would end Ray before the last checkpoint.
    """
    # Private: `ray start` has options for two of them, and `ray.init` for none; without its
    # frontend it still starts the dashboard, and waits for it. Held by tests of what runs and ends.
    import ray
    from ray._private import parameter, ray_constants, services, utils
    from ray.experimental import internal_kv

    tied: Any = utils.set_kill_on_parent_death_linux

    def tied_and_apart() -> None:
        tied()
        os.setpgrp()

    without = {"include_log_monitor": False, "no_monitor": True}
    ours: tuple[tuple[Any, str, Any], ...] = (
        (parameter, "RayParams", partial(parameter.RayParams, **without)),  # type: ignore[arg-type]
        (services, "start_api_server", lambda *_, **__: ("", None)),
        (utils, "set_kill_on_parent_death_linux", tied_and_apart),
    )
    with contextlib.ExitStack() as kept:
        for module, name, instead in ours:
            kept.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, instead)
        yield
    # Its agent would look for the dashboard each second, and log that there is none.
    keep = internal_kv._internal_kv_put  # noqa: SLF001 -- private, as all of this is
    where = ray_constants.DASHBOARD_ADDRESS.encode()
    if ray.is_initialized():
        with contextlib.suppress(ray.exceptions.RpcError):
            keep(where, _NOBODY, namespace=ray_constants.KV_NAMESPACE_DASHBOARD)


def reach(address: str, *, tls: bool) -> None:
    """See who listens at `host:port`, with TLS only whether: Ray itself would try for minutes.

    Raises:
        OSError: Nobody does, or somebody else. Other forms of address are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host:
        greet(host.strip("[]"), int(port), tls=tls)


def _keep_private(token: Path) -> None:
    """Ray writes its token readable by everyone on the machine: leave it to its owner alone."""
    with contextlib.suppress(OSError):  # not there, or another user's
        if token.stat().st_mode & 0o077:
            token.chmod(0o600)


def inventory() -> Inventory:
    """The living nodes, in the order of their names."""
    import ray

    nodes = (
        Node(
            name=found["NodeID"],
            address=found["NodeManagerAddress"],
            host=found["NodeManagerHostname"],
            cpus=found["Resources"].get("CPU", 0.0),
            gpus=found["Resources"].get("GPU", 0.0),
            memory_bytes=int(found["Resources"].get("memory", 0)) or None,
            labels=dict(found.get("Labels") or {}),
        )
        for found in ray.nodes()
        if found["Alive"]
    )
    return Inventory(nodes=tuple(sorted(nodes, key=lambda node: node.name)))


def free(nodes: Inventory | None = None) -> Inventory:
    """The living nodes, or these, with what nobody has reserved of them, as of a moment ago.

    What a placement group waits for is still free.
    """
    # Private: the public call adds all nodes up, and a member needs its place on one of them.
    from ray._private.state import available_resources_per_node

    left = available_resources_per_node()
    all_nodes = inventory() if nodes is None else nodes
    return Inventory(
        nodes=tuple(
            replace(
                node,
                cpus=left[node.name].get("CPU", 0.0),
                gpus=left[node.name].get("GPU", 0.0),
                memory_bytes=node.memory_bytes and int(left[node.name].get("memory", 0.0)),
            )
            for node in all_nodes.nodes
            if node.name in left
        )
    )


def _embedded_cpus(job: Job) -> int:
    """This machine's, or what the fewest workers need, who share it; not less than one needs."""
    cores, each = len(os.sched_getaffinity(0)), job.resources.worker.cpus
    return max(cores, job.elastic.min_workers * each) if each <= cores else cores


def first_line(error: BaseException) -> str:
    """What an error of Ray says, in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def node_id_here() -> str:
    """The node that this process is on."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def draining(clock: Clock) -> dict[str, PreemptionNotice]:
    """The nodes that Ray drains now, by id, and when they will be gone: 0.3 ms, one call.

    Ray places nothing more there; what runs there goes on until whoever drains it ends it.
    """
    # Private: no public call tells of draining nodes. Ray Data and Ray Train call this one
    # themselves, and it needs no dashboard. Tests on a cluster and without one hold it.
    from ray._private.state import state

    now_s, found = clock.unix_s(), dict[str, PreemptionNotice]()
    for node, until_ms in state.get_draining_nodes().items():
        deadline_s = max(0.0, until_ms / 1000 - now_s) if until_ms else None  # 0: there is none
        found[node] = PreemptionNotice(reason=REASON, deadline_s=deadline_s)
    return found


class _Filtered(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


_HANDLER = logging.StreamHandler()
_HANDLER.setFormatter(_Filtered("%(levelname)s %(name)s: %(message)s"))


def keep_confidential(job: Job) -> None:
    """Know the job's secrets in this process, and take them out of what is logged here.

    Members have a journal instead. What the task prints by itself is not filtered.
    """
    know(Environment.from_process().secrets | secrets_of(job))
    logging.getLogger().addHandler(_HANDLER)  # once, however often it is added
