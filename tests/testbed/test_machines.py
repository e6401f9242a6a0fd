"""What can happen to a machine: starting, signals, freezing, its end, and coming back."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from benchmarks.testbed import LateError, MachineError, NodeSpec, SpecError
from tests.live import wait_for
from tests.testbed.conftest import MakeBed
from tests.testbed.programs import PORT
from tests.testbed.remains import LIMIT_S, first, let_pass, listening, runs, said, start


def test_four_nodes_are_there_at_once(make_bed: MakeBed) -> None:
    bed = make_bed(
        *(
            NodeSpec(name=f"n{n}", egress_bits_per_s=20e6, ingress_bits_per_s=20e6, cores=0.4)
            for n in range(1, 5)
        )
    )
    assert list(bed.nodes) == ["n1", "n2", "n3", "n4"]
    assert bed.head.address == "10.77.0.10"
    assert [m.address for m in bed.nodes.values()] == [f"10.77.0.{n}" for n in (11, 12, 13, 14)]
    assert all(machine.alive and machine.processes() == () for machine in bed.nodes.values())


@pytest.mark.full
def test_a_process_finds_its_machine(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"))
    process = start(bed["n1"], tmp_path, "whoami")
    assert process.wait(LIMIT_S) == 0
    (found,) = said(process.log)
    assert found["interfaces"] == ["eth0", "lo"]
    assert found["hostname"] == socket.gethostname()
    assert found["hosts"] == Path("/etc/hosts").read_text()
    assert found["session"]
    added = {"TESTBED_NODE": "n1", "TESTBED_ADDRESS": "10.77.0.11", "GLOO_SOCKET_IFNAME": "eth0"}
    assert found["environment"].items() >= ({"PYTHONUNBUFFERED": "1"} | added).items()
    assert "PATH" not in found["environment"]  # nothing of ours
    # A namespace may only have what the host's administrator allows everybody.
    host = Path("/proc/sys/net/ipv4")
    allowed = (host / "tcp_allowed_congestion_control").read_text().split()
    default = (host / "tcp_congestion_control").read_text().strip()
    assert found["algorithm"] == bed.congestion_control
    assert bed.congestion_control == ("cubic" if "cubic" in allowed else default)


@pytest.mark.full
def test_output_is_appended_and_a_missing_program_says_so(
    make_bed: MakeBed, tmp_path: Path
) -> None:
    node = make_bed(NodeSpec(name="n1"))["n1"]
    log = tmp_path / "log"
    log.write_text("before\n")
    shell = ["/bin/sh", "-c", "pwd; echo error >&2; cat; exit 3"]
    assert node.start(shell, environment={}, log=log, cwd=tmp_path).wait(LIMIT_S) == 3
    assert log.read_text() == f"before\n{tmp_path}\nerror\n"
    assert node.start(["no-such-program"], environment={}, log=log).wait(LIMIT_S) == 127
    assert "no-such-program" in log.read_text()


@pytest.mark.full
def test_the_own_processes_are_known_with_their_children(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2"))
    process = start(bed["n1"], tmp_path, "stubborn")
    assert process.pid in bed["n1"].processes()  # at once
    assert process.poll() is None
    wait_for("the child", lambda: len(bed["n1"].processes()) == 2, seconds=LIMIT_S)
    (child,) = set(bed["n1"].processes()) - {process.pid}
    wait_for("it leaves the session", lambda: os.getsid(child) == child, seconds=LIMIT_S)
    for pid in (process.pid, child):
        inside = Path(f"/proc/{pid}/ns/net").readlink()
        assert inside != Path("/proc/self/ns/net").readlink()
    with pytest.raises(MachineError, match=rf"n2: pid {child} is not one of its own; see"):
        bed["n2"].signal(child, signal.SIGKILL)
    with pytest.raises(MachineError, match="not one of its own"):
        bed["n1"].signal(os.getpid(), signal.SIGKILL)
    bed["n1"].signal(child, signal.SIGKILL)
    wait_for("its end", lambda: bed["n1"].processes() == (process.pid,), seconds=LIMIT_S)
    assert process.poll() is None


@pytest.mark.full
def test_a_notice_is_sigterm_and_nothing_else(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"))
    kind, other = (start(bed["n1"], tmp_path, name) for name in ("wait", "stubborn"))
    first(kind, "pid")
    wait_for("all three", lambda: len(bed["n1"].processes()) == 3, seconds=LIMIT_S)
    first(other, "pid")
    bed["n1"].terminate()
    assert kind.wait(LIMIT_S) == 7
    assert first(kind, "terminated")
    assert other.poll() is None
    assert bed["n1"].alive


@pytest.mark.full
def test_a_frozen_machine_says_nothing_but_its_kernel_answers(
    make_bed: MakeBed, tmp_path: Path
) -> None:
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2"))
    hearing = listening(bed["n2"], tmp_path, "hear", PORT)
    listening(bed["n1"], tmp_path, "serve", PORT)
    start(bed["n1"], tmp_path, "speak", bed["n2"].address, PORT)
    first(hearing, "sent_s")
    bed["n1"].freeze()
    frozen_s = time.monotonic()
    first(start(bed["n2"], tmp_path, "reach", bed["n1"].address, PORT), "reached")
    let_pass(1.0)
    thawed_s = time.monotonic()
    bed["n1"].thaw()

    def sent() -> list[float]:
        return [line["sent_s"] for line in said(hearing.log) if "sent_s" in line]

    wait_for("it speaks again", lambda: sent()[-1] > thawed_s, seconds=LIMIT_S)
    # One may have read the clock before and send after.
    assert [sent_s for sent_s in sent() if frozen_s < sent_s < thawed_s] == []


def test_nobody_hears_that_a_machine_was_killed(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2"), NodeSpec(name="n3"))
    for name in ("n1", "n2"):
        serving = listening(bed[name], tmp_path, "serve", PORT)
    peers = {n: start(bed["n3"], tmp_path, "connect", bed[n].address, PORT) for n in ("n1", "n2")}
    for peer in peers.values():
        first(peer, "connected")
    stubborn = start(bed["n1"], tmp_path, "stubborn")
    wait_for("all three", lambda: len(bed["n1"].processes()) == 3, seconds=LIMIT_S)
    pids, machine, sent = bed["n1"].processes(), bed["n1"], bed["n1"].traffic().sent_bytes
    machine.kill()
    assert not any(runs(pid) for pid in pids)
    assert stubborn.poll() == -signal.SIGKILL
    assert not machine.alive
    assert list(bed.nodes) == ["n2", "n3"]
    assert machine.processes() == ()
    assert machine.traffic().sent_bytes == sent  # not one goodbye
    with pytest.raises(KeyError, match="'n1' is no living machine"):
        bed["n1"]
    for call in (machine.kill, machine.freeze, machine.mend, machine.remove):
        with pytest.raises(MachineError, match=r"n1: cannot .*, the machine is gone"):
            call()
    bed["n2"].signal(serving.pid, signal.SIGKILL)  # a process alone: its kernel says so
    first(peers["n2"], "closed")
    with pytest.raises(LateError):
        peers["n1"].wait(2.0)
    assert [line for line in said(peers["n1"].log) if "connected" not in line] == []


@pytest.mark.full
@pytest.mark.parametrize("state", ["frozen", "throttled", "cut", "frozen in a cut"])
def test_a_machine_in_trouble_can_be_killed(make_bed: MakeBed, tmp_path: Path, state: str) -> None:
    bed = make_bed(NodeSpec(name="n1"))
    first(start(bed["n1"], tmp_path, "burn", 2), "pid")
    if state == "throttled":
        bed["n1"].throttle(0.1)
    if "cut" in state:
        bed["n1"].cut("in")
    if "frozen" in state:
        bed["n1"].freeze()
    pids = bed["n1"].processes()
    bed["n1"].kill()
    assert not any(runs(pid) for pid in pids)


@pytest.mark.full
def test_a_removed_machine_may_say_goodbye(make_bed: MakeBed, tmp_path: Path) -> None:
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2"))
    listening(bed["n1"], tmp_path, "serve", PORT)
    kind = start(bed["n1"], tmp_path, "wait")
    first(kind, "pid")
    peer = start(bed["n2"], tmp_path, "connect", bed["n1"].address, PORT)
    first(peer, "connected")
    bed.remove("n1")
    assert kind.poll() == 7
    assert first(peer, "closed")
    assert list(bed.nodes) == ["n2"]


@pytest.mark.full
def test_a_machine_comes_back_under_its_name(make_bed: MakeBed, tmp_path: Path) -> None:
    """At its address, to peers that talked to it before; also in another zone."""
    bed = make_bed(NodeSpec(name="n1"), NodeSpec(name="n2"))
    with pytest.raises(SpecError, match="name: 'n1' lives; kill or remove it first"):
        bed.add(NodeSpec(name="n1"))
    with pytest.raises(SpecError, match="is the head's"):
        bed.add(NodeSpec(name="head"))
    for zone in ("a", "a", "b"):
        listening(bed["n1"], tmp_path, "serve", PORT)
        first(start(bed["n2"], tmp_path, "reach", "10.77.0.11", PORT), "reached")
        before = bed["n1"]
        before.kill()
        again = bed.add(NodeSpec(name="n1", zone=zone))
        assert again is bed["n1"]
        assert again is not before
        assert again.address == "10.77.0.11"
        assert again.cpu_s() == 0
    third = bed.add(NodeSpec(name="n3"))
    assert third.address == "10.77.0.13"
    bed.remove("n3")
    bed.remove("n2")
    assert bed.add(NodeSpec(name="n2")).address == "10.77.0.12"
    assert list(bed.nodes) == ["n1", "n2"]
