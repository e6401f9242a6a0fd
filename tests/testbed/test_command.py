"""The command line, as people use it."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.__main__ import main
from tests.live import Command, command, ran, wait_for
from tests.testbed.remains import remains

LIMIT_S = 60.0
SPEC = """
nodes:
- {name: n1, cores: 0.5, egress_bits_per_s: 20e6, ingress_bits_per_s: 1e9, delay_s: 0.005}
- {name: n2, zone: b, spot: true}
trunks:
- {zones: [a, b], rate_bits_per_s: 500e3, delay_s: 0.04}
"""
SCHEDULE = """
events:
- {at_s: 0, action: freeze, node: n1}
- {at_s: 0.1, action: kill-node, node: n2}
- {at_s: 0.2, action: add, node: n2}
"""
UP = r"""(rt[0-9a-f]{4}) is up
  name  address     zone  cores     sends      receives  delay
  head  10\.77\.0\.10  a     no limit  no limit   no limit  none
  n1    10\.77\.0\.11  a     0\.5       20 Mbit/s  1 Gbit/s  5 ms
  n2    10\.77\.0\.12  b     no limit  no limit   no limit  none   spot
  zones a and b: 500 kbit/s, 40 ms
  TCP goes by [a-z]+
Run something on a machine:
  python -m benchmarks\.testbed exec \1 n1 -- ip address
Ctrl-C removes it\.
"""
PROGRAM = (sys.executable, "-m", "benchmarks.testbed")

pytestmark = pytest.mark.timeout(180)  # each command imports it all, on a busy machine


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC)
    return file


@pytest.fixture
def up(tmp_path: Path, spec: Path) -> Iterator[Command]:
    schedule = tmp_path / "schedule.yaml"
    schedule.write_text(SCHEDULE)
    with command(tmp_path / "up", *PROGRAM, "up", spec, "--schedule", schedule) as one:
        wait_for("it is up", lambda: one.ended() or "Ctrl-C" in one.out, seconds=LIMIT_S)
        assert not one.ended(), one.err
        yield one


def bed_id(up: Command) -> str:
    return up.out.split()[0]


@pytest.mark.full
def test_up_says_what_there_is_and_what_happens_and_ctrl_c_removes_it(
    up: Command, tmp_path: Path
) -> None:
    events = (
        "     0.0 s  n1: freeze\n"
        "     0.1 s  n2: kill-node\n"
        "     0.2 s  n2 is there, at 10.77.0.12\n"
    )
    wait_for("what happens", lambda: up.out.endswith(events), seconds=LIMIT_S)
    assert re.fullmatch(UP, up.out.removesuffix(events)), up.out
    code, ls = ran(tmp_path / "ls", *PROGRAM, "ls")
    assert code == 0
    assert f"{bed_id(up)}  held by process {up.process.pid}: head, n1, n2\n" in ls.out
    code, clean = ran(tmp_path / "clean", *PROGRAM, "clean")
    assert code == 0
    assert f"{bed_id(up)} (process {up.process.pid})" in clean.out
    up.interrupt()
    assert up.code(LIMIT_S) == 0
    assert up.err == ""
    assert up.out.endswith(f"\n{bed_id(up)} is removed\n")
    assert remains(bed_id(up)) == []


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(up: Command, number: signal.Signals) -> None:
    up.process.send_signal(number)
    up.code(LIMIT_S)
    wait_for("it is gone", lambda: not remains(bed_id(up)), seconds=LIMIT_S)


@pytest.mark.full
def test_exec_runs_on_a_node(up: Command, tmp_path: Path) -> None:
    program = (
        "import json, os, socket;"
        "print(json.dumps([os.environ['TESTBED_NODE'], os.environ['TESTBED_ADDRESS'],"
        "open('/proc/self/cgroup').read(), [n for _, n in socket.if_nameindex()]]))"
    )
    words = (*PROGRAM, "exec", bed_id(up), "n2", "--", sys.executable, "-c", program)
    wait_for("it is back", lambda: "is there" in up.out, seconds=LIMIT_S)
    code, done = ran(tmp_path / "exec", *words)
    assert code == 0, done.err
    node, address, groups, interfaces = json.loads(done.out)
    assert (node, address, sorted(interfaces)) == ("n2", "10.77.0.12", ["eth0", "lo"])
    assert f"/raycloud-testbed/{bed_id(up)}/n2\n" in groups
    code, done = ran(tmp_path / "code", *PROGRAM, "exec", bed_id(up), "head", "--", "false")
    assert code == 1
    code, done = ran(tmp_path / "node", *PROGRAM, "exec", bed_id(up), "n9", "--", "true")
    assert (code, done.err) == (1, f"error: {bed_id(up)} has no 'n9'; use head, n1, n2\n")
    code, done = ran(tmp_path / "bed", *PROGRAM, "exec", "rtzzzz", "n1", "--", "true")
    assert code == 1
    assert done.err.startswith("error: no testbed 'rtzzzz' is up; there are rt")


def test_run_runs_on_the_head_and_ends_as_its_command_does(spec: Path, tmp_path: Path) -> None:
    script = "echo $TESTBED_NODE $TESTBED_ADDRESS; sleep 600 & exit 7"
    code, done = ran(tmp_path / "run", *PROGRAM, "run", spec, "--", "sh", "-c", script)
    assert (code, done.out, done.err) == (7, "head 10.77.0.10\n", "")
    code, done = ran(tmp_path / "killed", *PROGRAM, "run", spec, "--", "sh", "-c", "kill -9 $$")
    assert code == 128 + 9


@pytest.mark.full
def test_run_with_ray_on_every_machine(spec: Path, tmp_path: Path) -> None:
    program = (
        "import ray; ray.init(logging_level='ERROR');"
        "print(sorted(n['Labels']['node'] for n in ray.nodes() if n['Alive']))"
    )
    words = ("run", spec, "--ray", "--", sys.executable, "-c", program)
    code, done = ran(tmp_path / "run", *PROGRAM, *words)
    assert (code, done.out) == (0, "['head', 'n1', 'n2']\n"), done.err


@pytest.mark.full
def test_ctrl_c_ends_run_and_its_command(spec: Path, tmp_path: Path) -> None:
    script = "trap 'echo interrupted; exit' INT; echo begun; while :; do sleep 0.05; done"
    with command(tmp_path / "run", *PROGRAM, "run", spec, "--", "sh", "-c", script) as one:
        wait_for("it runs", lambda: one.ended() or "begun" in one.out, seconds=LIMIT_S)
        one.interrupt()
        assert one.code(LIMIT_S) == 130
        assert (one.out, one.err) == ("begun\ninterrupted\n", "")


def test_check_says_that_it_can_be(tmp_path: Path) -> None:
    code, done = ran(tmp_path / "check", *PROGRAM, "check")
    assert (code, done.out) == (0, "a testbed can be made here\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["up", "wrong.yaml"], "'speed' is no field"),
        (["up", "spec.yaml", "--schedule", "wrong.yaml"], "wrong.yaml: not a mapping with a list"),
        (["up", "spec.yaml", "--trace"], "it holds 4 nodes, and there are 2; add nodes"),
        (["up", "spec.yaml", "--trace", "spec.yaml"], "spec.yaml: no trace with gap_seconds"),
        (["up", "spec.yaml", "--trace", "--schedule", "wrong.yaml"], "use one of them"),
        (["up", "spec.yaml", "--", "ls"], "up: takes no command, but there is one after --"),
        (["run", "spec.yaml"], "run: write the command after --, as in `python -m benchmarks"),
        (["exec", "rt1a2b", "n1"], "exec: write the command after --"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_cannot_be_is_named(
    spec: Path,
    tmp_path: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, which has imported it all."""
    (tmp_path / "wrong.yaml").write_text("nodes: [{name: n1, speed: 3}]")
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGHUP)
    try:
        code = main(words)
    except SystemExit as ended:  # by argparse
        code = ended.code
    finally:
        signal.signal(signal.SIGHUP, before)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert "error: " in err
