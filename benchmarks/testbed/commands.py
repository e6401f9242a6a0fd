"""What the commands of the command line do."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.testbed import ground, quota, shell, traces
from benchmarks.testbed.cluster import Cluster
from benchmarks.testbed.events import ScheduleError
from benchmarks.testbed.faults import apply_all
from benchmarks.testbed.link import DEVICE
from benchmarks.testbed.machine import environment_of
from benchmarks.testbed.schedule import Schedule
from benchmarks.testbed.spec import Spec

if TYPE_CHECKING:
    from benchmarks.testbed.bed import Testbed

_END_S = 10.0
_TUN = Path("/dev/net/tun")


class NoSuchError(Exception):
    """There is no such testbed or node; names those that there are."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A spot trace to be replayed.

    Attributes:
        file: It; None: the window that comes with the testbed.
        start_hour: Hours from the beginning of the file.
        hours: How much of it; None: to its end.
        seconds_per_hour: How long an hour of the trace takes.
        notice_s: Seconds of notice before a node goes; 0: none.
    """

    file: Path | None
    start_hour: float = 0.0
    hours: float | None = None
    seconds_per_hour: float = 60.0
    notice_s: float = 0.0

    def of(self, spec: Spec) -> Schedule:
        """What it does to the nodes of a spec.

        Raises:
            TraceError: It cannot be read, or there are too few nodes.
        """
        window = traces.SPOT
        if self.file is not None:
            window = traces.read(self.file, start_hour=self.start_hour, hours=self.hours)
        return Schedule(
            traces.events(
                window,
                spec.nodes,
                seconds_per_hour=self.seconds_per_hour,
                notice_s=self.notice_s,
            )
        )


def read(file: Path, *, schedule: Path | None, trace: Replay | None) -> tuple[Spec, Schedule]:
    """Read what a testbed is to be and what is to happen to it.

    Args:
        file: Of the spec.
        schedule: File of the events.
        trace: In place of a schedule.

    Raises:
        SpecError: The spec cannot be.
        ScheduleError: The schedule cannot be, or there is a trace too.
        TraceError: The trace cannot be.
    """
    spec = Spec.load(file)
    if schedule is not None and trace is not None:
        raise ScheduleError("--schedule and --trace: use one of them")
    if trace is not None:
        return spec, trace.of(spec)
    events = Schedule.load(schedule) if schedule is not None else Schedule(())
    events.check(spec)
    return spec, events


def up(bed: Testbed, schedule: Schedule, *, ray: bool) -> int:
    """Hold a testbed until Ctrl-C.

    Args:
        bed: Not made yet.
        schedule: What happens to it meanwhile.
        ray: With Ray on every machine.
    """
    try:
        with _made(bed, ray=ray) as cluster:
            print(describe(bed, cluster), flush=True)
            _play(bed, schedule, cluster, until=threading.Event())
    except KeyboardInterrupt:
        print(f"\n{bed.id or 'it'} is removed" if bed.id else "\nnothing was made")
    return 0


def run(bed: Testbed, command: Sequence[str], schedule: Schedule, *, ray: bool) -> int:
    """Run a command on the head of a testbed, which lasts as long.

    Args:
        bed: Not made yet.
        command: Program and arguments.
        schedule: What happens to it meanwhile.
        ray: With Ray on every machine; the command finds it by RAY_ADDRESS.

    Returns:
        What the command ended with; 128 and its number for a signal.
    """
    with _printed() as output, _made(bed, ray=ray) as cluster:
        environment = dict(os.environ) if cluster is None else cluster.environment
        process, ended = None, threading.Event()
        try:  # from its very start: Ctrl-C may come at once
            process = bed.head.start(command, environment=environment, log=output)
            watching = threading.Thread(target=_watch, args=(process.pid, ended), daemon=True)
            watching.start()
            _play(bed, schedule, cluster, until=ended)
        except KeyboardInterrupt:
            if process is not None:
                with contextlib.suppress(ProcessLookupError):  # it is to end as if from a terminal
                    os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(shell.LateError):
                    process.wait(_END_S)
            raise
        code = process.wait(_END_S)
    return code if code >= 0 else 128 - code


def execute(bed_id: str, node: str, command: Sequence[str]) -> int:
    """Become a command on a node of a living testbed: with its address, link and quota.

    Args:
        bed_id: The testbed's.
        node: The node's name.
        command: Program and arguments.

    Raises:
        NoSuchError: There is none.
    """
    living = {state.bed_id for state in ground.states() if state.owner_lives}
    if bed_id not in living:
        others = f"there are {', '.join(sorted(living))}" if living else "there is none"
        raise NoSuchError(f"no testbed {bed_id!r} is up; {others}")
    if node not in ground.nodes(bed_id):
        raise NoSuchError(f"{bed_id} has no {node!r}; use {', '.join(ground.nodes(bed_id))}")
    namespace = ground.namespace_name(bed_id, node)
    asking = ["ip", "-json", "-4", "address", "show", "dev", DEVICE]
    told = json.loads(shell.run(shell.entering(namespace, asking)))
    address = told[0]["addr_info"][0]["local"]
    # Before it enters the namespace: from inside, /sys may show other groups.
    quota.group(ground.group_name(bed_id, node)).join(os.getpid())
    words = shell.entering(namespace, command)
    os.execve(words[0], words, {**os.environ, **environment_of(node, address)})


def ls() -> int:
    """Print the testbeds of this machine."""
    states = ground.states()
    for state in states:
        nodes = ", ".join(ground.nodes(state.bed_id)) or "no machines"
        owner = f"held by process {state.owner_pid}" if state.owner_lives else "left over"
        print(f"{state.bed_id}  {owner}: {nodes}")
    if not states:
        print("no testbeds")
    elif not all(state.owner_lives for state in states):
        print("`clean` removes those left over")
    return 0


def clean() -> int:
    """Remove what is left of testbeds whose owner has ended."""
    left = ground.sweep()
    print(f"removed {', '.join(left)}" if left else "nothing was left over")
    if held := [state for state in ground.states() if state.owner_lives]:
        each = ", ".join(f"{state.bed_id} (process {state.owner_pid})" for state in held)
        print(f"still up: {each}; end the process that holds it")
    return 0


def check() -> int:
    """Print whether there can be a testbed here; 1 where there can not."""
    if why := ground.missing():
        print(f"no testbed can be made here: {why}")
        return 1
    print("a testbed can be made here")
    if not os.access(_TUN, os.R_OK | os.W_OK):
        print(f"without delays: there is no {_TUN}; load the `tun` module")
    return 0


def describe(bed: Testbed, cluster: Cluster | None) -> str:
    """A living testbed in words: its machines, and how to run something on them."""
    rows = [("name", "address", "zone", "cores", "sends", "receives", "delay", "")]
    for machine in (bed.head, *bed.nodes.values()):
        spec = machine.spec
        rows.append(
            (
                machine.name,
                machine.address,
                spec.zone,
                "no limit" if spec.cores is None else f"{spec.cores:g}",
                _rate(spec.egress_bits_per_s),
                _rate(spec.ingress_bits_per_s),
                f"{spec.delay_s * 1000:g} ms" if spec.delay_s else "none",
                "spot" if spec.spot else "",
            )
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = [f"{bed.id} is up"]
    lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [
        f"  zones {near} and {far}: {_rate(trunk.rate_bits_per_s)}, {trunk.delay_s * 1000:g} ms"
        for trunk in bed.spec.all_trunks()
        for near, far in [trunk.zones]
    ]
    lines += [f"  TCP goes by {bed.congestion_control}"]
    first = next(iter(bed.nodes), "head")
    start = "python -m benchmarks.testbed exec"
    lines += ["Run something on a machine:", f"  {start} {bed.id} {first} -- ip address"]
    if cluster is not None:
        settings = ("RAY_ADDRESS", "RAY_AUTH_MODE")
        words = shlex.join(f"{name}={cluster.environment[name]}" for name in settings)
        lines += [
            "Ray runs on all of them; a driver belongs on the head:",
            f"  {start} {bed.id} head -- env {words} python driver.py",
        ]
    return "\n".join([*lines, "Ctrl-C removes it."])


@contextlib.contextmanager
def _made(bed: Testbed, *, ray: bool) -> Iterator[Cluster | None]:
    """Make a testbed, and its Ray; quotas are set once Ray has joined."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(bed)
        cluster = None
        if ray:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{bed.id}-")))
            cluster = Cluster(bed, directory=folder, environment=dict(os.environ))
            stack.enter_context(cluster)
            cluster.join(*bed.nodes)
        bed.limit()
        yield cluster


def _play(
    bed: Testbed, schedule: Schedule, cluster: Cluster | None, *, until: threading.Event
) -> None:
    """Let a schedule happen, printing what does, and then wait on."""
    began_s = time.monotonic()
    while not until.is_set():
        elapsed_s = time.monotonic() - began_s
        for outcome in apply_all(schedule.due(elapsed_s), bed, cluster=cluster):
            print(f"{outcome.event.at_s:8.1f} s  {outcome.detail}", flush=True)
        left_s = None
        if schedule.next_s is not None:
            left_s = max(0.0, schedule.next_s - (time.monotonic() - began_s))
        until.wait(left_s)


@contextlib.contextmanager
def _printed() -> Iterator[Path]:
    """A file of which all that is appended to it gets printed, while it lasts.

    Standard output itself cannot be opened again where it is a socket, and would be written over
    where it is a file.
    """
    reading, writing = os.pipe()

    def pass_on() -> None:
        while said := os.read(reading, 65536):
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()

    passing = threading.Thread(target=pass_on, daemon=True)
    passing.start()
    try:
        yield Path(f"/dev/fd/{writing}")
    finally:
        os.close(writing)
        passing.join(_END_S)  # until whoever holds it has ended, which the bed sees to
        os.close(reading)


def _watch(pid: int, ended: threading.Event) -> None:
    """Tell when a child has ended, without taking note of how in its place."""
    with contextlib.suppress(ChildProcessError):  # someone took note already
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ended.set()


def _rate(bits_per_s: float | None) -> str:
    if bits_per_s is None:
        return "no limit"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:g} {unit}"
    return f"{bits_per_s / 1e3:g} kbit/s"
