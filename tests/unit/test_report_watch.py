"""Watching a run: the tail of a growing log, the page, the lines, and the command in a terminal."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from raycloud import cli
from raycloud.errors import RunDirectoryError
from raycloud.events import Event, MemberFailed, MemberLost, RunFinished, RunStarted
from raycloud.report.log import Tail
from raycloud.report.progress import status_text
from raycloud.report.run_status import RunStatus
from raycloud.report.watch import Lines, Watched, page_lines
from raycloud.spec import RunDirectory
from tests.live import RAYCLOUD, command, wait_for
from tests.logs import STARTED_T, entries, pairs, run_directory, text
from tests.terminals import terminal

GONE = "killed after step 10: its driver is gone without a last word\nstep 10/10 · loss"


def watched_of(told: list[tuple[float, Event]], directory: Path | None = None) -> Watched:
    watched = Watched(directory or Path("runs/gpt-1"))
    for t, event in told:
        watched.see(t, event)
    return watched


def page(
    watched: Watched, *, after_s: float = 20.0, width: int = 80, height: int = 24
) -> list[str]:
    now_t = STARTED_T + after_s
    lines = page_lines(watched, now_t=now_t, width=width, height=height)
    assert all(isinstance(line, Text) for line in lines)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    return [line.plain.rstrip() for line in lines]


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    tail, told = Tail(log), entries()
    assert tail.read() == []  # not there yet
    whole = text(told)
    cut = len(text(told[:3])) + 20  # in the middle of the fourth line
    log.write_text(whole[:cut])
    assert pairs(tail.read()) == told[:3]
    assert tail.read() == []
    log.write_text(whole)
    assert pairs(tail.read()) == told[3:]
    assert tail.read() == []


def test_a_tail_of_a_log_that_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    tail, told = Tail(log), entries()
    log.write_text(text(told))
    tail.read()
    log.write_text(text(told[:2]))
    assert pairs(tail.read()) == told[:2]


def test_a_tail_reads_a_long_log_in_parts(tmp_path: Path) -> None:
    log, told = tmp_path / "events.jsonl", entries(steps=4000)
    log.write_text(text(told))
    tail, seen, parts = Tail(log), [], 0
    while part := pairs(tail.read()):
        seen, parts = seen + part, parts + 1
    assert seen == told
    assert parts > 1


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"format": 2}'])
def test_a_tail_of_a_damaged_log(tmp_path: Path, line: str) -> None:
    log = tmp_path / "events.jsonl"
    log.write_text(text(entries()[:1]) + line + "\n")
    with pytest.raises(RunDirectoryError, match="line 2 cannot be read"):
        Tail(log).read()


def test_the_page_of_a_run_that_trains(tmp_path: Path) -> None:
    watched = watched_of(entries(status=""))
    watched.job = RunDirectory(run_directory(tmp_path, "steps: 20\n", entries())).job()
    lines = page(watched, after_s=18.0)
    assert lines[0].split() == ["gpt", "running", "runs/gpt-1"]
    assert lines[1].startswith("step 10/20  ━━━")
    assert "50%" in lines[1]
    assert "10.0 s left" in lines[1]
    shown = "\n".join(lines)
    assert "  loss        █▄▃▂▂▂▁▁▁▁ 2.2" in lines
    assert "  samples/s   █████████ 8" in lines
    assert "  held out    loss 2.1 (after step 10)" in lines
    assert "  checkpoint  step 10, 3.0 s ago" in lines
    assert "  generation  0 · 2 workers · recoveries: none · 2.0 kB sent" in lines
    rows = [line.split() for line in lines if "training " in line]
    assert rows == [
        ["0", "training", "1", "10", "0.25", "s", "0.1", "s", "node-a"],
        ["1", "training", "1", "10", "0.25", "s", "0.1", "s", "node-b"],
    ]
    assert "held out after step 10: loss 2.1" in shown
    assert lines[-1] == "q ends this page, not the run"


def test_the_page_of_a_run_that_is_silent() -> None:
    watched = watched_of(entries(status=""))
    assert page(watched, after_s=44.0)[-1] == "q ends this page, not the run"
    assert page(watched, after_s=75.0)[-1].endswith("no word for 1:00")
    assert page(Watched(Path("r")))[-1].endswith("nothing was logged yet")


def test_the_page_of_a_run_that_has_ended_stands_still() -> None:
    watched = watched_of(entries())
    assert page(watched, after_s=20.0) == page(watched, after_s=9000.0)
    shown = "\n".join(page(watched))
    assert "gpt  finished" in shown
    assert "finished after step 10" in shown
    assert " ago" not in shown


def test_the_page_of_a_run_that_failed() -> None:
    t = STARTED_T + 16
    told = [
        (t, MemberLost(member=1, reason="its process died\x1b[2J")),
        (t, MemberFailed(member=0, error="TaskError", message="loss() raised")),
        (t, RunFinished(status="failed", steps=10, error="member 1 was lost")),
    ]
    lines = page(watched_of([*entries(status=""), *told]))
    shown = "\n".join(lines)
    assert "  error       member 1 was lost" in lines
    assert "lost member 1: its process died?[2J" in shown
    states = {line.split()[0]: line.split()[1] for line in lines if "node-" in line}
    assert states == {"0": "failed", "1": "lost"}


def test_a_resumed_run_has_new_members() -> None:
    resumed = RunStarted(job="gpt", version="0.1.0", resumed_from_step=10)
    watched = watched_of([*entries(status="stopped"), (STARTED_T + 100, resumed)])
    assert (watched.state.members, watched.ended) == ({}, False)
    assert any("going on from the checkpoint of step 10" in line for line in page(watched))


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 1), (60, 10), (200, 60), (80, 2)])
def test_a_page_of_any_size(width: int, height: int) -> None:
    assert len(page(watched_of(entries()), width=width, height=height)) == height


def test_many_members_leave_room_for_notes() -> None:
    watched = watched_of(entries())
    for number in range(200):
        watched.state.members[number] = watched.state.members[0]
    lines = page(watched, height=30)
    (more,) = [line for line in lines if line.startswith("  … and ")]
    members = sum("node-a" in line for line in lines)
    assert more == f"  … and {200 - members} more"
    assert any("finished after step 10" in line for line in lines)


def told_lines(told: list[tuple[float, Event]], *, notes: bool) -> list[str]:
    lines = Lines(Watched(Path("runs/gpt-1")), line=brief, every_s=5.0, notes=notes)
    return [line for t, event in told for line in lines.see(t, event)]


def brief(card: RunStatus) -> str:
    return f"[{card.step} {card.status}]"


def test_lines_keep_the_pace_of_the_log() -> None:
    assert told_lines(entries(), notes=False) == [
        "[1 running]",
        "[5 running]",
        "[10 running]",
        "[10 finished]",
    ]
    with_notes = told_lines(entries(), notes=True)
    assert with_notes[0] == "generation 0 from step 0: 2 workers, shares 1 1"
    assert with_notes[-2:] == ["finished after step 10", "[10 finished]"]


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_directory(tmp_path / "gpt-1", "steps: 10\n", entries())


def test_in_a_pipe_it_is_lines_until_the_run_ends(run: Path) -> None:
    code, out, _ = call("watch", run)
    assert code == 0
    assert "\x1b" not in out
    assert out.splitlines()[-2:] == [
        "finished after step 10",
        "step 10/10 · loss 2.2 · 8 samples/s · 2 workers · 2.0 kB sent · generation 0",
    ]


def test_as_json_it_is_cards(run: Path) -> None:
    code, out, _ = call("watch", run, "--json")
    cards = [RunStatus.from_record(json.loads(line)) for line in out.splitlines()]
    assert code == 0
    assert [card.step for card in cards] == [*range(1, 11), 10]
    assert (cards[-1].status, cards[-1].steps, cards[-1].run) == ("finished", 10, "gpt-1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_in_a_pipe_a_signal_ends_it_without_a_word(tmp_path: Path, number: signal.Signals) -> None:
    run = run_directory(tmp_path / "gpt-1", "steps: 10\n", entries(status=""))  # written just now
    with command(tmp_path / "out", RAYCLOUD, "watch", run, "--plain") as one:
        wait_for("its lines", lambda: "step 10/10" in one.out)
        one.process.send_signal(number)
        assert one.code() == 130
    assert one.err == ""


@pytest.mark.parametrize(("option", "last"), [("--plain", GONE), ("--json", '"status": "killed"')])
def test_in_a_pipe_it_ends_with_a_driver_that_was_killed(
    tmp_path: Path, option: str, last: str
) -> None:
    run = run_directory(tmp_path / "gpt-1", "steps: 10\n", entries(status=""))
    os.utime(run / "events.jsonl", (STARTED_T, STARTED_T))  # long ago
    code, out, _ = call("watch", run, option)
    assert code == 0
    assert last in "\n".join(out.splitlines()[-2:])


def test_without_standard_input_it_is_a_page(run: Path) -> None:
    shell = f"exec {RAYCLOUD} watch {run} <&-"
    with terminal("bash", "-c", shell) as one:
        one.wait_for(lambda: "gpt  finished" in one.screen())
        one.press("\x03")
        assert one.code() == 130


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "notes.txt"):
        code, _, err = call("watch", path)
        assert code == 2
        assert "holds no run" in err


def test_a_job_that_cannot_be_read_leaves_the_page(run: Path) -> None:
    (run / "job.yaml").write_text("stepz: 3\n")
    code, out, _ = call("watch", run)
    assert code == 0
    assert out.splitlines()[-1].startswith("step 10 · loss")


def grow(run: Path, told: list[tuple[float, Event]]) -> None:
    with (run / "events.jsonl").open("a") as log:
        log.write(text(told))


def test_a_page_that_follows_and_ends_with_q(tmp_path: Path) -> None:
    told = entries()
    run = run_directory(tmp_path / "gpt-1", "steps: 10\n", told[:10])
    with terminal(RAYCLOUD, "watch", run, width=90, height=20) as one:
        before = one.settings()
        one.wait_for(lambda: "step 2/10" in one.screen() and "q ends" in one.screen())
        assert one.screen().count("\n") == 19
        assert one.settings() != before  # keys are not shown
        grow(run, told[10:16])
        one.wait_for(lambda: "step 5/10" in one.screen())
        grow(run, told[16:])
        one.wait_for(lambda: "gpt  finished" in one.screen())
        one.press("x")
        one.resize(50, 12)
        one.wait_for(lambda: one.screen().count("\n") == 11 and "q ends" in one.screen())
        assert max(map(len, one.screen().split("\n"))) <= 50
        one.press("xq")  # however many keys come at once
        assert one.code() == 0
        assert one.settings() == before
        assert one.written.count("\x1b[?1049h") == one.written.count("\x1b[?1049l") == 1
    assert one.plain().rstrip().endswith(status_text(watched_last(run)))


def watched_last(run: Path) -> RunStatus:
    watched = watched_of(entries(), run)
    watched.job = RunDirectory(run).job()
    return watched.status(0.0)


@pytest.mark.parametrize(
    "end", ["keys", signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "kill", "hung up"]
)
def test_a_page_puts_the_terminal_back(run: Path, end: str | signal.Signals) -> None:
    with terminal(RAYCLOUD, "watch", run) as one:
        before = one.settings()
        one.wait_for(lambda: "gpt  finished" in one.screen())
        if isinstance(end, signal.Signals):
            os.kill(one.process.pid, end)
        else:
            one.press("\x03")
        assert one.code() == 130
        assert one.settings() == before
        assert one.written.rindex("\x1b[?1049l") > one.written.rindex("\x1b[?1049h")
        assert "Traceback" not in one.plain()


def test_plain_in_a_terminal(run: Path) -> None:
    with terminal(RAYCLOUD, "watch", run, "--plain") as one:
        assert one.code() == 0
    assert "\x1b" not in one.written
    assert "finished after step 10" in one.plain()


def test_compare_in_a_terminal_is_coloured_and_fits(run: Path, tmp_path: Path) -> None:
    other = run_directory(tmp_path / "gpt-2", "steps: 20\n", entries(loss=1.0))
    with terminal(RAYCLOUD, "compare", run, other, width=80) as one:
        assert one.code() == 0
    assert "\x1b[1mwhat came of them" in one.written
    assert max(map(len, one.plain().split("\n"))) <= 80
