"""Faults on real processes of this machine, which call themselves workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycloud.faults import Action, LocalHands, NoConnectionError, processes
from raycloud.faults.processes import connections
from tests.live import wait_for

WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
LISTENS = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
print("met", flush=True)
print(peer.recv(1), flush=True)
sys.stdin.read()
"""
CONNECTS = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(
    code: str, *arguments: str, title: str = "ray::MemberActor"
) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [title, "-S", "-c", code, *arguments],
        executable=sys.executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def said(one: subprocess.Popen[str]) -> str:
    assert one.stdout is not None
    return one.stdout.readline().strip()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def hands() -> Iterator[LocalHands]:
    held = LocalHands()
    yield held
    held.close()


def test_a_worker_is_killed_and_told_to_leave(hands: LocalHands) -> None:
    for action, number in ((Action.KILL, signal.SIGKILL), (Action.TERMINATE, signal.SIGTERM)):
        with process(WAITS) as one:
            assert said(one) == "up"
            hands.hold(3, "", one.pid)
            hands.harm(3, action)
            assert one.wait(30) == -number


def test_a_worker_freezes_and_goes_on(hands: LocalHands) -> None:
    with process(WAITS) as one:
        assert said(one) == "up"
        hands.hold(3, "", one.pid)
        hands.harm(3, Action.FREEZE)
        wait_for("its standing still", lambda: state(one.pid) == "T")
        hands.thaw(3)
        wait_for("its going on", lambda: state(one.pid) != "T")
        hands.harm(3, Action.FREEZE)
        hands.close()
        wait_for("its going on", lambda: state(one.pid) != "T")


def test_the_connections_of_a_worker_to_others_are_cut(hands: LocalHands) -> None:
    with process(LISTENS) as one, process(CONNECTS, said(one)) as other:
        assert (said(other), said(one)) == ("up", "met")
        hands.hold(0, "", one.pid)
        hands.hold(1, "", other.pid)
        assert len(connections(one.pid)) == len(connections(other.pid)) == 1
        assert hands.ends(0) == [(there, here) for here, there in hands.ends(1)]
        hands.harm(1, Action.CUT)
        assert said(one) == "b''"
        assert one.poll() is None
        assert other.poll() is None
        wait_for("its end", lambda: not connections(one.pid))
        with pytest.raises(NoConnectionError, match="no connection"):
            hands.harm(0, Action.CUT)


def test_a_connection_that_ends_while_it_is_cut_is_none(
    hands: LocalHands, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(LISTENS) as one, process(CONNECTS, said(one)) as other:
        assert (said(other), said(one)) == ("up", "met")
        hands.hold(0, "", one.pid)
        hands.hold(1, "", other.pid)
        [(ends, (inode, descriptor))] = connections(other.pid).items()
        closed = ends, (inode, 1000)  # no descriptor of that number is open
        reused = ends, ("1", descriptor)  # it is that of another file by now
        for found in (closed, reused):
            monkeypatch.setattr(processes, "connections", lambda _, found=found: dict([found]))
            with pytest.raises(NoConnectionError):
                hands.cut(1, {(ends[1], ends[0])})
        monkeypatch.undo()
        assert len(connections(other.pid)) == 1
        hands.harm(1, Action.CUT)
        assert said(one) == "b''"


def test_another_process_is_never_held(hands: LocalHands) -> None:
    with process(WAITS, title="python") as one:
        assert said(one) == "up"
        with pytest.raises(ProcessLookupError, match="is not a worker"):
            hands.hold(0, "", one.pid)
        with pytest.raises(ProcessLookupError, match="not on this machine"):
            hands.harm(0, Action.KILL)
        assert one.poll() is None


def test_who_is_gone_cannot_be_harmed(hands: LocalHands) -> None:
    with process(WAITS) as one:
        assert said(one) == "up"
        hands.hold(0, "", one.pid)
        one.kill()
        one.wait()
        with pytest.raises(ProcessLookupError):
            hands.harm(0, Action.KILL)
        hands.thaw(0)
        with pytest.raises(ProcessLookupError):
            hands.hold(1, "", one.pid)
