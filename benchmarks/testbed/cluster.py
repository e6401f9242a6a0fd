"""Ray on a bed: the head on the bed's head, and one raylet on each node that joins."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.testbed.link import ROOT
from benchmarks.testbed.machine import MachineError
from benchmarks.testbed.shell import LateError, wait_for
from benchmarks.testbed.spec import HEAD

if TYPE_CHECKING:
    from types import TracebackType

    from benchmarks.testbed.bed import Testbed
    from benchmarks.testbed.machine import Machine
    from benchmarks.testbed.process import Process

RAY = Path(sys.executable).with_name("ray")
NODE_LABEL = "node"
_PORT = 6379
_START_S = 120.0
_ASK_S = 30.0
_END_S = 10.0
_POLL_S = 0.1  # a question costs the head CPU that the nodes need to start
_STORE_BYTES = 100_000_000
_LOG_CHARACTERS = 3000
# A path of a Unix socket has at most 107 bytes. Ray puts below ours: /<node>/session_<date and
# time>_<pid>/sockets/plasma_store.
_LONGEST_PATH = 107 - 75

# A user may set each of them. The caller's own settings win.
_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # nobody else is in these namespaces
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",  # nobody scrapes it
    "RAY_task_events_report_interval_ms": "0",  # and nobody lists its tasks
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "3600",  # or is shown its events,
    "REPORTER_UPDATE_INTERVAL_MS": "3600000",  # or what its processes use
    "RAY_worker_niceness": "0",  # as everything else that runs on a node
}


class ClusterError(Exception):
    """Ray does not do on a bed what it should; holds the end of its log."""


class Cluster:
    """Ray on the machines of a bed; ends with the `with` block, or with the bed.

    Attributes:
        address: Of the head, `host:port`; empty before the start.
        files: Ray's own files: its sessions with their logs, its sockets.

    On each node run what `ray start` starts: itself, the raylet, and Ray's two agents. There is no
    dashboard, no log monitor, no metrics: they would eat a node of a fifth of a core.
    """

    def __init__(self, bed: Testbed, *, directory: Path, environment: Mapping[str, str]) -> None:
        """Describe it; nothing is started.

        Args:
            bed: Living.
            directory: For its logs; made if need be. Ray's own files are in it too if its path is
                short enough for their sockets, else in the system's temporary directory, and are
                removed at the end.
            environment: All of that of Ray's processes, besides a few settings of Ray, which it
                may overrule: PATH and HOME belong in it.
        """
        self._bed = bed
        self._logs = directory
        self.files = _short(directory / "ray", bed.id)
        self._environment = {**_SETTINGS, **environment, "RAY_TMPDIR": str(self.files)}
        self._processes: dict[str, Process] = {}
        self.address = ""

    def __enter__(self) -> Cluster:
        """Start it."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it."""
        self.close()

    @property
    def environment(self) -> Mapping[str, str]:
        """All of the environment that a driver on the head needs to speak to this Ray."""
        return {**self._environment, "RAY_ADDRESS": self.address}

    def start(self) -> None:
        """Start the head, without CPUs of its own; returns once it answers.

        Raises:
            ClusterError: It does not.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        self.files.mkdir(parents=True, exist_ok=True)
        head = self._bed.head
        address = f"{head.address}:{_PORT}"
        self._ray(
            head,
            cpus=0,
            more=("--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"),
        )
        command = [sys.executable, "-m", "benchmarks.testbed.gcs", f"--address={address}"]
        self._processes["gcs"] = head.start(
            [*command, f"--socket={self._socket}"],
            environment={**self._environment, "PYTHONPATH": str(ROOT)},
            log=self._logs / "gcs.log",
        )
        self._wait("Ray's head answers", lambda: HEAD in self.node_ids(), (HEAD, "gcs"))
        self.address = address

    def join(self, *names: str, cpus: int = 1, more: Mapping[str, str] | None = None) -> None:
        """Start a raylet on each node; returns once Ray sees all of them.

        Nodes should have no CPU quota yet: starting at a fifth of a core takes minutes.

        Args:
            names: Living nodes of the bed, without a raylet.
            cpus: What each says it has.
            more: Of the environment of their processes.

        Raises:
            ClusterError: A raylet ends, or is not seen in time.
        """
        before = self.node_ids()  # one that was killed a moment ago may still be in it
        for name in names:
            address = (f"--address={self.address}",)
            self._ray(self._bed[name], cpus=cpus, more=address, environment=more or {})

        def seen() -> bool:
            now = self.node_ids()
            return all(name in now and now[name] != before.get(name) for name in names)

        self._wait(f"Ray sees {', '.join(names)}", seen, names)

    def drain(self, name: str, deadline_s: float) -> None:
        """Give Ray notice that a node will go, as a spot machine does.

        Ray places nothing there any more; it moves nothing and ends nothing.

        Args:
            name: The node's.
            deadline_s: Seconds from now.

        Raises:
            ClusterError: Ray sees no such node, or refuses.
        """
        try:
            node_id = self.node_ids()[name]
        except KeyError:
            raise ClusterError(f"drain: Ray sees no living node {name!r}; let it join") from None
        deadline_ms = round((time.time() + deadline_s) * 1000)
        self._ask({"about": "drain", "node_id": node_id, "deadline_ms": deadline_ms})

    def nodes(self) -> list[dict[str, Any]]:
        """All nodes that Ray has seen: `id`, `alive`, `address`, `labels`, `started_ms`."""
        found: list[dict[str, Any]] = self._ask({"about": "nodes"})["nodes"]
        return found

    def node_ids(self) -> Mapping[str, str]:
        """Ray's NodeID of each living node, the head too, by its name on the bed.

        Of two of the same name the younger one: Ray takes its time to see that a node is gone.
        """
        nodes = sorted(self.nodes(), key=lambda node: node["started_ms"])
        return {node["labels"][NODE_LABEL]: node["id"] for node in nodes if node["alive"]}

    def draining(self) -> Mapping[str, float]:
        """When each node that has notice will be gone, in seconds since the epoch, by name."""
        answer = self._ask({"about": "nodes"})
        names = {node["id"]: node["labels"][NODE_LABEL] for node in answer["nodes"]}
        return {names[one]: at_ms / 1000 for one, at_ms in answer["draining"].items()}

    def close(self) -> None:
        """End all of it, and remove Ray's files; the logs of `ray start` stay."""
        sessions = {process.pid for process in self._processes.values()}
        for machine in [self._bed.head, *self._bed.nodes.values()] if sessions else []:
            with contextlib.suppress(LateError):
                wait_for("", lambda m=machine: not _kill(m, sessions), limit_s=_END_S)
        self._processes.clear()
        shutil.rmtree(self.files, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        return self.files / "gcs"

    def _ray(
        self,
        machine: Machine,
        *,
        cpus: int,
        more: tuple[str, ...],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start Ray on a machine, with the labels of its spec."""
        spec = machine.spec
        labels = {
            "ray.io/market-type": "spot" if spec.spot else "on-demand",
            "ray.io/availability-zone": spec.zone,
            NODE_LABEL: machine.name,
            **spec.labels,
        }
        command = [
            str(RAY), "start", "--block", *more,
            f"--node-ip-address={machine.address}",
            f"--node-name={machine.name}",
            f"--num-cpus={cpus}",
            "--num-gpus=0",
            f"--labels={','.join(f'{k}={v}' for k, v in labels.items())}",
            f"--object-store-memory={_STORE_BYTES}",
            f"--temp-dir={self.files / machine.name}",
            "--include-log-monitor=false",
        ]  # fmt: skip
        log = self._logs / f"{machine.name}.log"
        self._processes[machine.name] = machine.start(
            command, environment={**self._environment, **(environment or {})}, log=log
        )

    def _wait(self, what: str, look: Callable[[], bool], names: tuple[str, ...]) -> None:
        """Wait until something is so; fail as soon as a process that it takes has ended."""
        end_s = time.monotonic() + _START_S
        while not (self._socket.exists() and look()):
            for name in names:
                code = self._processes[name].poll()
                if code is not None:
                    raise ClusterError(f"{what}: not, {name} ended with {code}{self._said(name)}")
            if time.monotonic() > end_s:
                said = "".join(map(self._said, names))
                raise ClusterError(f"{what}: not within {_START_S:g} s{said}")
            time.sleep(_POLL_S)

    def _said(self, name: str) -> str:
        log = self._processes[name].log
        return f"\n{log}:\n{log.read_text(errors='replace')[-_LOG_CHARACTERS:]}"

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_ASK_S)
            try:
                asking.connect(str(self._socket))
                asking.sendall(json.dumps(question).encode() + b"\n")
                answer: dict[str, Any] = json.loads(asking.makefile().readline())
            except (OSError, ValueError) as error:
                raise ClusterError(f"Ray's head does not answer: {error}; see {self._logs}") from (
                    error
                )
        if "error" in answer:
            raise ClusterError(f"{question['about']}: {answer['error']}")
        return answer


def _short(wanted: Path, bed_id: str) -> Path:
    """A folder for Ray whose path leaves room for its sockets."""
    for path in (wanted.absolute(), Path(tempfile.gettempdir()) / f"{bed_id}-ray"):
        if len(os.fsencode(path)) <= _LONGEST_PATH:
            return path
    return Path("/tmp") / f"{bed_id}-ray"


def _kill(machine: Machine, sessions: set[int]) -> bool:
    """Send SIGKILL to a machine's processes of these sessions; whether there are any."""
    found = False
    for pid in machine.processes():
        with contextlib.suppress(ProcessLookupError, MachineError):  # it ended just now
            if os.getsid(pid) in sessions:
                machine.signal(pid, signal.SIGKILL)
                found = True
    return found
