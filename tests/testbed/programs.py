"""What the tests run on the machines of a bed: `python programs.py NAME ARGUMENTS`.

Each prints lines of JSON. Most import nothing but the standard library, so that they start at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

PORT = 5000
CHUNK = b"\0" * 65536


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def sink(port: str) -> None:
    """Receive over TCP; says how many bytes by now, twenty times a second."""
    with socket.create_server(("0.0.0.0", int(port))) as server:
        say(listening=True)
        connection, _ = server.accept()
        said_s, received = 0.0, 0
        while chunk := connection.recv(len(CHUNK)):
            received += len(chunk)
            if time.monotonic() - said_s > 0.05:
                said_s = time.monotonic()
                say(t_s=said_s, received=received)
        say(ended=True, received=received)


def source(host: str, port: str, count: str = "-1") -> None:
    """Send bytes over TCP; for ever, or so many."""
    left = int(count)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.settimeout(None)
        while left != 0:
            sent = connection.send(CHUNK if left < 0 else CHUNK[:left])
            left -= sent if left > 0 else 0


def hear(port: str) -> None:
    """Receive datagrams; says when each was sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("0.0.0.0", int(port)))
        say(listening=True)
        while True:
            say(sent_s=float(own.recv(100)))


def speak(host: str, port: str) -> None:
    """Send a datagram with the time a hundred times a second."""
    pause = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        while True:
            try:
                own.sendto(repr(time.monotonic()).encode(), (host, int(port)))
            except OSError as error:  # the neighbour does not answer, as on any cut link
                say(error=str(error))
            pause.wait(0.01)


def count(port: str) -> None:
    """Receive datagrams; says how many bytes by now, twenty times a second."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.bind(("0.0.0.0", int(port)))
        say(listening=True)
        said_s, received = 0.0, 0
        while True:
            received += len(own.recv(2000))
            if time.monotonic() - said_s > 0.05:
                said_s = time.monotonic()
                say(t_s=said_s, received=received)


def pour(host: str, port: str, bits_per_s: str) -> None:
    """Send datagrams at a rate, whoever receives them."""
    pause, began_s, sent = threading.Event(), time.monotonic(), 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        while True:
            while 8 * sent < float(bits_per_s) * (time.monotonic() - began_s):
                sent += own.sendto(CHUNK[:1400], (host, int(port)))
            pause.wait(0.002)


def serve(port: str) -> None:
    """Hold connections open."""
    held = []
    with socket.create_server(("0.0.0.0", int(port))) as server:
        say(listening=True)
        while True:
            held.append(server.accept())


def connect(host: str, port: str) -> None:
    """Connect, and say what becomes of it."""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.settimeout(None)
        say(connected=True)
        try:
            say(closed=connection.recv(1) == b"")
        except OSError as error:
            say(error=str(error))


def reach(host: str, port: str) -> None:
    """Connect once."""
    socket.create_connection((host, int(port)), timeout=5).close()
    say(reached=True)


def burn(number: str = "1") -> None:
    """Compute in so many processes, for ever."""
    for _ in range(int(number) - 1):
        if os.fork() == 0:
            break
    say(pid=os.getpid())
    while True:
        pass


def wait() -> None:
    """Say when SIGTERM comes, and end."""

    def end(*_: object) -> None:
        say(terminated=True)
        sys.exit(7)

    signal.signal(signal.SIGTERM, end)
    say(pid=os.getpid())
    while True:
        signal.pause()


def stubborn() -> None:
    """Stay, whatever is asked, with a child that has left the session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
    say(pid=os.getpid())
    while True:
        signal.pause()


def whoami() -> None:
    """Say what a process finds."""
    say(
        environment=dict(os.environ),
        hostname=socket.gethostname(),
        hosts=open("/etc/hosts").read(),  # noqa: PTH123, SIM115 - as plain as can be
        interfaces=sorted(name for _, name in socket.if_nameindex()),
        session=os.getsid(0) == os.getpid(),
        algorithm=open("/proc/sys/net/ipv4/tcp_congestion_control").read().strip(),  # noqa: PTH123, SIM115
    )


def ask(address: str) -> None:
    """Ask members' machines whether they are there; say what is found out with each turn."""
    from raycloud.clock import SystemClock
    from raycloud.net.heartbeat import Heartbeats

    asks, pause = Heartbeats(address, SystemClock()), threading.Event()
    if asks.place is None:
        raise OSError("this system does not tell what was acknowledged")
    say(place=[asks.place.address, asks.place.port, asks.place.key])
    before = None
    while True:
        found = asks.reach
        if found is not before:
            say(reached=sorted(found.reached), cut={str(m): s for m, s in found.cut_s.items()})
        before = found
        pause.wait(0.01)


def answer(member: str, *place: str) -> None:
    """Be a member whose machine is asked."""
    from raycloud.clock import SystemClock
    from raycloud.net.heartbeat import HeartbeatPeer
    from raycloud.net.stream import Place

    address, port, key = place
    probed, pause = HeartbeatPeer(SystemClock()), threading.Event()
    while True:
        probed.keep(Place(address, int(port), int(key)), int(member))
        pause.wait(0.2)


def own(seconds: str) -> None:
    """Own a bed of two nodes with processes on them, until killed."""
    from pathlib import Path

    from benchmarks.testbed import NodeSpec, Spec, Testbed

    folder = Path.cwd()
    spec = Spec(nodes=(NodeSpec(name="n1"), NodeSpec(name="n2", zone="b")))
    with Testbed(spec) as bed:
        for name in ("n1", "n2", "head"):
            machine = bed[name]
            machine.start(
                [sys.executable, __file__, "stubborn"], environment={}, log=folder / f"{name}.log"
            )
        bed["n2"].freeze()
        bed["n1"].throttle(0.1)
        while any(len(bed[name].processes()) < 2 for name in ("n1", "head")):
            pass
        pids = [pid for name in ("n1", "n2", "head") for pid in bed[name].processes()]
        say(bed_id=bed.id, pids=pids, reaper=bed._reaper.pid)
        threading.Event().wait(float(seconds))


def refused() -> None:
    """Try to have a bed as somebody else than root."""
    from benchmarks.testbed import MissingError, Spec, Testbed

    os.setuid(65534)
    try:
        with Testbed(Spec(nodes=())):
            say(made=True)
    except MissingError as error:
        say(error=str(error))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
