"""When faults happen, and to whom: with processes that only note it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycloud.clock import VirtualClock
from raycloud.events import (
    Event,
    ExchangeBroken,
    GenerationFormed,
    MemberLost,
    Recovered,
    StepsCommitted,
)
from raycloud.faults import (
    NO_CONNECTION,
    Action,
    Fault,
    Injector,
    LocalProcesses,
    NoConnectionError,
    injector,
)
from raycloud.faults.injector import connections
from tests.live import wait_for
from tests.logs import commit, ready


class Noting:
    """Processes that harm nobody."""

    def __init__(self, refuses: str = "") -> None:
        self.done: list[tuple[int, str]] = []
        self.refuses = refuses

    def hold(self, member: int, node: str, pid: int) -> None:
        if self.refuses == "hold":
            raise ProcessLookupError("it is none of ours")

    def harm(self, member: int, action: Action) -> None:
        if self.refuses == "cut":
            raise NoConnectionError(NO_CONNECTION)
        if self.refuses == "harm":
            raise PermissionError(1, "Operation not permitted")
        self.done.append((member, action.value))

    def thaw(self, member: int) -> None:
        self.done.append((member, "thaw"))

    def close(self) -> None:
        self.done.append((-1, "close"))


def formed(*members: int, generation: int = 0) -> GenerationFormed:
    shares = (1,) * len(members)
    return GenerationFormed(generation=generation, members=members, shares=shares, first_step=0)


def told(member: int, last: int) -> StepsCommitted:
    return commit(member, last - 1, last)


class Scene:
    """An injector with three members that have committed the first step."""

    def __init__(self, *faults: Fault, refuses: str = "") -> None:
        self.clock, self.processes = VirtualClock(), Noting(refuses)
        self.said: list[str] = []
        self.injector = Injector(faults, self.processes, self.clock, self.said.append)
        self.see(*map(ready, (0, 1, 2)), formed(0, 1, 2), *(told(m, 1) for m in (0, 1, 2)))

    def see(self, *events: Event) -> None:
        for event in events:
            self.injector.see(event)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.injector.look()

    @property
    def done(self) -> list[tuple[int, str]]:
        return self.processes.done


def test_a_fault_comes_with_its_step_and_by_rank() -> None:
    scene = Scene(Fault(action=Action.KILL, at_step=5, rank=4))
    scene.see(told(0, 4))
    assert scene.done == []
    scene.see(told(2, 5))
    assert scene.done == [(1, "kill")]
    [hit] = scene.injector.hits
    assert (hit.member, hit.step, hit.why) == (1, 5, "")
    assert scene.said == ["fault: step 5: kill: member 1"]
    assert scene.injector.left == ()


def test_a_fault_comes_with_its_second() -> None:
    scene = Scene(Fault(action=Action.TERMINATE, at_s=3.0))
    scene.wait(2.9)
    assert scene.done == []
    scene.wait(0.2)
    assert scene.done == [(0, "terminate")]


def test_several_are_hit_at_once_and_one_is_left() -> None:
    scene = Scene(
        Fault(action=Action.KILL, at_step=2, many=2, rank=2), Fault(action=Action.KILL, at_step=2)
    )
    scene.see(told(0, 2))
    assert scene.done == [(2, "kill"), (0, "kill")]
    scene.see(told(1, 9))
    assert len(scene.injector.left) == 1  # nobody else has the state


def test_a_fault_waits_until_a_newcomer_has_the_state() -> None:
    scene = Scene(
        Fault(action=Action.KILL, at_step=2, many=2), Fault(action=Action.KILL, at_step=3)
    )
    scene.see(told(0, 2), MemberLost(member=0, reason=""), MemberLost(member=1, reason=""))
    scene.see(told(2, 3), ready(3), formed(2, 3, generation=1))
    assert len(scene.done) == 2
    scene.see(told(3, 4))
    assert scene.done[2:] == [(2, "kill")]


def test_one_comes_during_the_recovery_from_another() -> None:
    scene = Scene(
        Fault(action=Action.KILL, at_step=2),
        Fault(action=Action.CUT, at_step=2, recovering=True),
    )
    scene.see(told(0, 2))
    assert scene.done == [(0, "kill")]
    scene.see(ExchangeBroken(member=1, generation=0, why="reset"))
    assert scene.done[1:] == [(1, "cut")]
    assert scene.injector.left == ()


def test_a_late_word_of_what_is_over_begins_no_recovery() -> None:
    scene = Scene(Fault(action=Action.KILL, at_step=2, recovering=True))
    broken = ExchangeBroken(member=1, generation=0, why="reset")
    scene.see(Recovered(generation=1, lost=(), cause="", detected_s=0.0, resumed_s=1.0), broken)
    scene.see(told(0, 2))
    assert scene.done == []
    scene.see(ExchangeBroken(member=2, generation=1, why="reset"))
    assert scene.done == [(0, "kill")]


def test_what_is_to_come_during_a_recovery_does_not_come_after_it() -> None:
    scene = Scene(Fault(action=Action.KILL, at_step=2, recovering=True))
    scene.see(MemberLost(member=1, reason=""))
    scene.see(Recovered(generation=1, lost=(1,), cause="", detected_s=0.0, resumed_s=1.0))
    scene.see(told(0, 2))
    assert scene.done == []


def test_a_frozen_one_thaws_in_time_and_may_be_hit_again() -> None:
    scene = Scene(
        Fault(action=Action.FREEZE, at_step=2, seconds=1.5, many=2),
        Fault(action=Action.KILL, at_step=2),
    )
    scene.see(told(0, 2))
    assert scene.done == [(0, "freeze"), (1, "freeze")]
    scene.wait(1.0)
    assert len(scene.done) == 2
    scene.wait(0.5)
    assert scene.done[2:] == [(0, "thaw"), (1, "thaw"), (0, "kill")]


def test_a_cut_harms_nobody_for_long() -> None:
    scene = Scene(Fault(action=Action.CUT, at_step=2), Fault(action=Action.CUT, at_step=2))
    scene.see(told(0, 2))
    assert scene.done == [(0, "cut"), (0, "cut")]


def test_a_cut_waits_for_connections() -> None:
    scene = Scene(Fault(action=Action.CUT, at_step=2), refuses="cut")
    scene.see(told(0, 2))
    assert (scene.injector.hits, scene.said) == ([], [])
    scene.processes.refuses = ""
    scene.wait(0.1)
    assert scene.done == [(0, "cut")]
    assert scene.injector.left == ()


def test_what_cannot_be_done_is_told() -> None:
    scene = Scene(Fault(action=Action.CUT, at_step=2), refuses="harm")
    scene.see(told(0, 2))
    [hit] = scene.injector.hits
    assert hit.why == "Operation not permitted"
    assert scene.said == ["fault: step 2: cut: member 0, but Operation not permitted"]


def test_who_cannot_be_reached_is_told() -> None:
    scene = Scene(refuses="hold")
    assert scene.said[0] == "note: no fault can reach member 0: it is none of ours"


def test_nobody_stays_frozen() -> None:
    scene = Scene(Fault(action=Action.FREEZE, at_step=2, seconds=100.0))
    with scene.injector.at_work():
        scene.see(told(0, 2))
    assert scene.done == [(0, "freeze"), (-1, "close")]


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
def processes() -> Iterator[LocalProcesses]:
    held = LocalProcesses()
    yield held
    held.close()


def test_a_worker_is_killed_and_told_to_leave(processes: LocalProcesses) -> None:
    for action, number in ((Action.KILL, signal.SIGKILL), (Action.TERMINATE, signal.SIGTERM)):
        with process(WAITS) as one:
            assert said(one) == "up"
            processes.hold(3, "", one.pid)
            processes.harm(3, action)
            assert one.wait(30) == -number


def test_a_worker_freezes_and_goes_on(processes: LocalProcesses) -> None:
    with process(WAITS) as one:
        assert said(one) == "up"
        processes.hold(3, "", one.pid)
        processes.harm(3, Action.FREEZE)
        wait_for("its standing still", lambda: state(one.pid) == "T")
        processes.thaw(3)
        wait_for("its going on", lambda: state(one.pid) != "T")
        processes.harm(3, Action.FREEZE)
        processes.close()
        wait_for("its going on", lambda: state(one.pid) != "T")


def test_the_connections_of_a_worker_to_others_are_cut(processes: LocalProcesses) -> None:
    with process(LISTENS) as one, process(CONNECTS, said(one)) as other:
        assert (said(other), said(one)) == ("up", "met")
        processes.hold(0, "", one.pid)
        processes.hold(1, "", other.pid)
        assert len(connections(one.pid)) == len(connections(other.pid)) == 1
        assert processes.ends(0) == [(there, here) for here, there in processes.ends(1)]
        processes.harm(1, Action.CUT)
        assert said(one) == "b''"
        assert one.poll() is None
        assert other.poll() is None
        wait_for("its end", lambda: not connections(one.pid))
        with pytest.raises(NoConnectionError, match="no connection"):
            processes.harm(0, Action.CUT)


def test_a_connection_that_ends_while_it_is_cut_is_none(
    processes: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    with process(LISTENS) as one, process(CONNECTS, said(one)) as other:
        assert (said(other), said(one)) == ("up", "met")
        processes.hold(0, "", one.pid)
        processes.hold(1, "", other.pid)
        [(ends, (inode, descriptor))] = connections(other.pid).items()
        closed = ends, (inode, 1000)  # no descriptor of that number is open
        reused = ends, ("1", descriptor)  # it is that of another file by now
        for found in (closed, reused):
            monkeypatch.setattr(injector, "connections", lambda _, found=found: dict([found]))
            with pytest.raises(NoConnectionError):
                processes.cut(1, {(ends[1], ends[0])})
        monkeypatch.undo()
        assert len(connections(other.pid)) == 1
        processes.harm(1, Action.CUT)
        assert said(one) == "b''"


def test_another_process_is_never_held(processes: LocalProcesses) -> None:
    with process(WAITS, title="python") as one:
        assert said(one) == "up"
        with pytest.raises(ProcessLookupError, match="is not a worker"):
            processes.hold(0, "", one.pid)
        with pytest.raises(ProcessLookupError, match="not on this machine"):
            processes.harm(0, Action.KILL)
        assert one.poll() is None


def test_who_is_gone_cannot_be_harmed(processes: LocalProcesses) -> None:
    with process(WAITS) as one:
        assert said(one) == "up"
        processes.hold(0, "", one.pid)
        one.kill()
        one.wait()
        with pytest.raises(ProcessLookupError):
            processes.harm(0, Action.KILL)
        processes.thaw(0)
        with pytest.raises(ProcessLookupError):
            processes.hold(1, "", one.pid)
