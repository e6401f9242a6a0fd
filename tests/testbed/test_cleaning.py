"""Nothing of a bed is left, however its owner ends; and nothing of another bed is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import testbed
from benchmarks.testbed import NodeSpec, ground
from tests.live import ROOT, wait_for
from tests.testbed.conftest import MakeBed
from tests.testbed.programs import PORT
from tests.testbed.remains import LIMIT_S, PROGRAMS, first, listening, remains, runs, start
from tests.tiers import variants

GONE_S = 30.0


@contextmanager
def owner(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that makes a bed."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS), *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    return json.loads(process.stdout.readline())


def wait_gone(made: dict[str, Any]) -> None:
    def left() -> list[str]:
        return remains(made["bed_id"], [*made["pids"], made["reaper"]])

    try:
        wait_for("all is gone", lambda: not left(), seconds=GONE_S)
    except AssertionError:
        assert left() == []
        raise


@pytest.mark.parametrize("number", variants(signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
def test_a_dead_owner_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Two nodes, one of them frozen, with processes that no SIGTERM ends; in two zones."""
    with owner(tmp_path, "own", "600") as process:
        made = line_of(process)
        assert len(made["pids"]) >= 4
        assert all(runs(pid) for pid in [*made["pids"], made["reaper"]])
        os.killpg(process.pid, number)  # the whole group, as Ctrl-C does
        wait_gone(made)


@pytest.mark.full
def test_a_bed_without_owner_and_reaper_is_swept(tmp_path: Path, make_bed: MakeBed) -> None:
    with owner(tmp_path, "own", "600") as process:
        made = line_of(process)
        os.kill(made["reaper"], signal.SIGKILL)
        wait_for("the reaper's end", lambda: not runs(made["reaper"]), seconds=LIMIT_S)
        process.kill()
        process.wait()
        assert all(runs(pid) for pid in made["pids"])
        assert len(remains(made["bed_id"])) > 8
        assert made["bed_id"] in testbed.sweep()
        assert remains(made["bed_id"], made["pids"]) == []
        assert testbed.sweep() == ()
        ground.remove(made["bed_id"])  # which is gone: nothing happens


@pytest.mark.full
def test_a_new_bed_sweeps_first(tmp_path: Path, make_bed: MakeBed) -> None:
    with owner(tmp_path, "own", "600") as process:
        made = line_of(process)
        os.kill(made["reaper"], signal.SIGKILL)
        process.kill()
        process.wait()
        make_bed()
        wait_gone(made)


@pytest.mark.full
def test_a_living_bed_is_not_swept(tmp_path: Path, make_bed: MakeBed) -> None:
    """Nor what merely looks like one of a bed."""
    mine = make_bed(NodeSpec(name="n1"))
    process = start(mine["n1"], tmp_path, "burn")
    first(process, "pid")
    stranger = "rt0000-x1"  # no state file knows it
    subprocess.run(["ip", "netns", "add", stranger], check=True)
    try:
        with owner(tmp_path, "own", "600") as other:
            made = line_of(other)
            before = remains(made["bed_id"]), remains(mine.id)
            assert testbed.sweep() == ()
            assert (remains(made["bed_id"]), remains(mine.id)) == before
            assert all(runs(pid) for pid in (*made["pids"], process.pid))
            assert {mine.id, made["bed_id"]} <= {state.bed_id for state in ground.states()}
        wait_gone(made)
        assert process.poll() is None
        assert (Path("/run/netns") / stranger).exists()
    finally:
        subprocess.run(["ip", "netns", "del", stranger], check=True)


@pytest.mark.full
def test_two_beds_do_not_know_each_other(tmp_path: Path, make_bed: MakeBed) -> None:
    """They have the same names and addresses."""
    one, two = make_bed(NodeSpec(name="n1")), make_bed(NodeSpec(name="n1"))
    assert one.id != two.id
    assert one["n1"].address == two["n1"].address
    listening(one["n1"], tmp_path, "serve", PORT)
    first(start(one.head, tmp_path, "reach", one["n1"].address, PORT), "reached")
    refused = start(two.head, tmp_path, "reach", two["n1"].address, PORT)
    assert refused.wait(LIMIT_S) == 1
    assert "ConnectionRefusedError" in refused.log.read_text()
    one["n1"].kill()
    assert list(two.nodes) == ["n1"]
    assert ground.nodes(two.id) == ("head", "n1")
    assert ground.nodes(one.id) == ("head",)


@pytest.mark.full
def test_an_error_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    spec = testbed.Spec(nodes=(NodeSpec(name="n1"), NodeSpec(name="n2")))
    bed, started = testbed.Testbed(spec), []

    def fail() -> None:
        with bed:
            started.append(start(bed["n1"], tmp_path, "stubborn"))
            bed["n2"].kill()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].poll() == -signal.SIGKILL
    assert remains(bed.id, [started[0].pid, bed._reaper.pid]) == []


@pytest.mark.full
def test_an_error_while_it_is_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    bed = testbed.Testbed(testbed.Spec(nodes=(NodeSpec(name="n1"),)))
    monkeypatch.setattr("benchmarks.testbed.bed.bring_up", fail)
    with pytest.raises(KeyboardInterrupt):
        bed.__enter__()
    assert bed.id
    assert remains(bed.id, [bed._reaper.pid]) == []


@pytest.mark.full
@pytest.mark.parametrize("failing", ["ground.remove", "machine.Machine.reap", "link.Relay.end"])
def test_a_step_that_fails_does_not_keep_the_others_from_being_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    bed = testbed.Testbed(testbed.Spec(nodes=(NodeSpec(name="n1", delay_s=0.001),)))
    bed.__enter__()
    process = start(bed["n1"], tmp_path, "stubborn")
    relay = bed._links[-1].relay
    calls = []

    def fail(*_: object) -> None:
        calls.append(failing)
        raise ZeroDivisionError(f"{failing} {len(calls)}")

    with monkeypatch.context() as patch:
        patch.setattr(f"benchmarks.testbed.{failing}", fail)
        with pytest.raises(ZeroDivisionError, match=f"{failing} 1"):
            bed.__exit__(None, None, None)
    if failing == "machine.Machine.reap":
        assert len(calls) == 2  # the head's, too
    assert bed._reaper.poll() == 0
    assert relay._process.poll() == -signal.SIGKILL
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    relay.end()  # its pipes
    assert remains(bed.id, [process.pid]) == []


def test_who_is_not_root_is_told(tmp_path: Path) -> None:
    with owner(tmp_path, "refused") as process:
        error = line_of(process)["error"]
    assert error == "a testbed makes network namespaces, which takes root; run it as root"


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert testbed.missing() == (
        "a testbed needs ip, tc, nsenter, unshare; install iproute2 and util-linux"
    )
    with pytest.raises(testbed.MissingError, match="install iproute2"):
        testbed.Testbed(testbed.Spec(nodes=())).__enter__()
