"""The relay, between two namespaces of its own: delay, order, how much it carries, its end."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import testbed
from benchmarks.testbed import relay
from benchmarks.testbed.relay import Lane
from tests.live import ROOT, wait_for
from tests.testbed.conftest import MakeBed
from tests.testbed.measuring import nearest
from tests.tiers import variants

pytestmark = pytest.mark.alone

NEAR, FAR = "10.77.0.1", "10.77.0.2"
LIMIT_S = 20.0
PINGS = 20
SO_RCVBUFFORCE = 33  # Python has no name for it


@dataclass(frozen=True, slots=True)
class Wire:
    """Two namespaces joined by a relay."""

    process: subprocess.Popen[bytes]
    near: str
    far: str

    def near_socket(self, kind: socket.SocketKind) -> socket.socket:
        return opened(self.near, kind, NEAR)

    def far_socket(self, kind: socket.SocketKind) -> socket.socket:
        return opened(self.far, kind, FAR)


MakeWire = Callable[[float], Wire]


def opened(namespace: str, kind: socket.SocketKind, address: str) -> socket.socket:
    """A socket that lives in a namespace, wherever its owner is."""
    with relay._inside(Path("/run/netns") / namespace):
        made = socket.socket(socket.AF_INET, kind)
    made.settimeout(LIMIT_S)
    made.bind((address, 0))
    return made


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def devices(namespace: str) -> str:
    return ip("-n", namespace, "-brief", "link")


@pytest.fixture
def make_wire(ground: None) -> Iterator[MakeWire]:
    """Makes two namespaces and a relay between them, gone after the test."""
    with contextlib.ExitStack() as stack:

        def make(delay_s: float) -> Wire:
            tag = f"wire{secrets.token_hex(2)}"
            near, far = f"{tag}-near", f"{tag}-far"
            for name in (near, far):
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            process = started(near, far, delay_s)
            stack.callback(ended, process)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            for name, address in ((near, NEAR), (far, FAR)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
            return Wire(process, near, far)

        yield make


def started(near: str, far: str, delay_s: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "benchmarks.testbed.relay",
            "--end", f"{near}:eth0", "--end", f"{far}:eth0", "--delay-s", str(delay_s),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    process.communicate()
    return process.wait()


def round_trip_s(near: socket.socket, far: socket.socket) -> float:
    """The median over some pings; the first, which looks for its neighbour, does not count."""
    near.connect(far.getsockname())
    took_s = []
    for _ in range(PINGS + 1):
        began_s = time.monotonic()
        near.send(b"ping")
        said, who = far.recvfrom(100)
        far.sendto(said, who)
        near.recv(100)
        took_s.append(time.monotonic() - began_s)
    return statistics.median(took_s[1:])


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Come before others that wait for a CPU: the wait of who measures is no property of a wire."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -15)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


@contextlib.contextmanager
def at_once(*relays: int) -> Iterator[None]:
    """Run whenever there is something to do, with relays: for what takes next to no time.

    A priority is not enough on a busy machine, where the kernel weighs whole sessions.
    """
    for pid in (*relays, 0):
        with contextlib.suppress(PermissionError):  # a kernel that keeps this from groups
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def check_round_trip(near: socket.socket, far: socket.socket, wanted_s: float) -> None:
    found_s = nearest(lambda: round_trip_s(near, far), lambda took_s: took_s / wanted_s - 1)
    assert found_s == pytest.approx(wanted_s, rel=0.1)


@pytest.mark.parametrize("delay_s", variants(0.04, 0.005))
def test_a_round_trip_takes_twice_the_delay(make_wire: MakeWire, delay_s: float) -> None:
    wire = make_wire(delay_s)
    with (
        wire.near_socket(socket.SOCK_DGRAM) as near,
        wire.far_socket(socket.SOCK_DGRAM) as far,
        at_once(wire.process.pid),
    ):
        check_round_trip(near, far, 2 * delay_s)


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0.04, 0.005])
def test_a_delayed_node_and_a_delayed_trunk(make_bed: MakeBed, delay_s: float) -> None:
    bed = make_bed(
        testbed.NodeSpec(name="n1"),
        testbed.NodeSpec(name="n2", delay_s=delay_s),
        testbed.NodeSpec(name="n3", zone="b"),
        trunks=(testbed.TrunkSpec(zones=("a", "b"), delay_s=delay_s),),
    )
    relays = [link.relay._process.pid for link in bed._links if link.relay is not None]
    n1, n2, n3 = (
        opened(bed[name].namespace, socket.SOCK_DGRAM, bed[name].address)
        for name in ("n1", "n2", "n3")
    )
    with n1, n2, n3, at_once(*relays):
        for near, far, times in ((n1, n2, 2), (n1, n3, 2), (n3, n2, 4)):
            check_round_trip(near, far, times * delay_s)


@pytest.mark.full
def test_20_mbit_per_s_arrive_whole_and_in_order(make_wire: MakeWire) -> None:
    wire, number, size = make_wire(0.04), 2000, 1250  # a second's worth
    with wire.near_socket(socket.SOCK_DGRAM) as near, wire.far_socket(socket.SOCK_DGRAM) as far:
        far.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 * 2**20)
        near.connect(far.getsockname())
        pause, began_s = threading.Event(), time.monotonic()
        for n in range(number):
            pause.wait(max(0.0, began_s + n / number - time.monotonic()))
            near.send(n.to_bytes(4, "big").ljust(size, b"\0"))
        sent_s = time.monotonic() - began_s
        found = [int.from_bytes(far.recv(size)[:4], "big") for _ in range(number)]
    assert found == list(range(number))
    assert sent_s < 2.0


@pytest.mark.full
def test_500_mbit_per_s_of_tcp(make_wire: MakeWire) -> None:
    wire = make_wire(0.005)

    def pids() -> list[int]:
        return [wire.process.pid, os.getpid()]

    with ahead():
        found = nearest(
            lambda: tcp_bits_per_s(wire),
            lambda bits_per_s: max(0.0, 1 - bits_per_s / 5e8),
            most_off=0.0,
            pids=pids,
        )
    assert found >= 5e8


def tcp_bits_per_s(wire: Wire) -> float:
    """What TCP reaches in two seconds, after half a second to get going."""
    until, chunk = threading.Event(), b"\0" * 2**20
    with wire.far_socket(socket.SOCK_STREAM) as server:
        server.listen()
        with wire.near_socket(socket.SOCK_STREAM) as near:
            near.connect(server.getsockname())

            def send() -> None:
                while not until.is_set():
                    near.send(chunk)

            sending = threading.Thread(target=send)
            sending.start()
            far, _ = server.accept()
            with far:
                began_s, received = time.monotonic(), 0
                while (elapsed_s := time.monotonic() - began_s) < 2.5:
                    count = len(far.recv(2**20))
                    received += count if elapsed_s >= 0.5 else 0
                until.set()
                sending.join()
    return received * 8 / 2.0


@pytest.mark.full
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "its standard input closes"])
def test_its_devices_go_with_it(make_wire: MakeWire, how: str) -> None:
    wire = make_wire(0.04)
    assert "eth0" in devices(wire.near)
    if how.startswith("SIG"):
        wire.process.send_signal(signal.Signals[how])
    else:
        assert wire.process.stdin is not None
        wire.process.stdin.close()
        wire.process.stdin = None
    assert wire.process.wait(LIMIT_S) == 0
    assert wire.process.communicate() == (b"", b"")
    for namespace in (wire.near, wire.far):
        wait_for("eth0 is gone", lambda n=namespace: "eth0" not in devices(n), seconds=LIMIT_S)


@pytest.mark.full
def test_it_ends_when_a_device_is_taken_away(make_wire: MakeWire) -> None:
    wire = make_wire(0.04)
    ip("-n", wire.far, "link", "del", "eth0")
    assert wire.process.wait(LIMIT_S) == 1
    assert b"error: a device was taken away" in wire.process.communicate()[1]


@pytest.mark.full
def test_it_goes_on_when_a_device_is_down(make_wire: MakeWire) -> None:
    wire = make_wire(0.005)
    with wire.near_socket(socket.SOCK_DGRAM) as near, wire.far_socket(socket.SOCK_DGRAM) as far:
        round_trip_s(near, far)
        ip("-n", wire.far, "link", "set", "eth0", "down")
        for _ in range(10):
            near.send(b"lost")
        ip("-n", wire.far, "link", "set", "eth0", "up")
        near.settimeout(0.5)
        far.settimeout(0.5)

        def passes() -> bool:
            with contextlib.suppress(TimeoutError):
                return round_trip_s(near, far) > 0
            return False

        wait_for("it carries again", passes, seconds=LIMIT_S)


def test_what_it_cannot_hold_is_dropped() -> None:
    near, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sink, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, source, sink, far:
        source.setblocking(False)
        far.setblocking(False)
        lane = Lane(source.fileno(), sink.fileno(), delay_s=0.01, most_bytes=2500)
        for n in range(4):
            near.send(bytes([n]) * 1000)
        lane.take()
        lane.deliver()
        with pytest.raises(BlockingIOError):
            far.recv(1000)
        assert lane.dropped_frames == 2
        wait_for("it is time", lambda: lane.next_s < time.monotonic(), seconds=LIMIT_S)
        lane.deliver()
        assert [far.recv(1000)[0] for _ in range(2)] == [0, 1]
        assert lane.next_s is None
        near.send(b"next")
        lane.take()
        assert lane.next_s is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--end", "x", "--end", "a:b"], "error: --end 'x': not NAMESPACE:DEVICE"),
        (["--end", "a:sixteen-letters-", "--end", "a:b"], "at most 15 characters"),
        (["--end", "a:b"], "error: --end: given 1 times; a wire has two ends"),
        (["--end", "nowhere:b", "--end", "a:b"], "error: --end nowhere:b: no such file"),
        (["--end", "a:b", "--end", "a:b", "--delay-s", "40"], "--delay-s 40: not from 0 to 10"),
    ],
)
def test_what_cannot_be_is_named(arguments: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.testbed.relay", "--delay-s", "0.1", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
