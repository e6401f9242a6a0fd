"""A run directory here: who drives it, how it stands, what it says; and lists of runs."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycloud.clock import VirtualClock
from raycloud.errors import JobError, MachineError, RunDirectoryError, SpecError
from raycloud.events import Noticed, RoundsRefused, RunFinished, RunStarted
from raycloud.report import runs
from raycloud.report.log import to_line
from raycloud.report.run_status import RunStatus, parse_line
from raycloud.report.runs import (
    Listed,
    ask_for_point,
    driver_of,
    is_driven,
    is_run,
    listed_text,
    log_lines,
    member_lines,
    record_of,
    run_text,
    runs_below,
    status_in,
    status_or_why,
    stop_driver,
)
from raycloud.spec import RunDirectory
from tests.lockstep import job

HOLDS = """
import ctypes, fcntl, signal, sys
log = open(sys.argv[1], "a")
fcntl.flock(log, fcntl.LOCK_EX)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if sys.argv[2:] == ["unseen"]:
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: only root may look into it
print("held", flush=True)
signal.sigwait({signal.SIGTERM})
"""
CAP_SYS_PTRACE = 19
CARD = RunStatus(run="one", job="gpt", status="running", t=1000.0, step=6, steps=30, workers=2)


def started(directory: Path, *more: object) -> Path:
    directory.mkdir(parents=True)
    run = RunDirectory(directory)
    run.write_job(job(steps=30))
    events = [RunStarted(job="gpt", version="1"), *more]
    lines = [to_line(100.0 + at, event) for at, event in enumerate(events)]
    run.events_jsonl.write_text("".join(line + "\n" for line in lines))
    return directory


@contextmanager
def driven(directory: Path, *how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's log as a driver does, and ends at SIGTERM."""
    log = directory / "events.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, log, *how], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_driver_is_who_holds_the_log(tmp_path: Path) -> None:
    one, other = started(tmp_path / "one"), started(tmp_path / "other")
    assert driver_of(one) is None
    with driven(one) as process:
        assert driver_of(one) == process.pid
        assert driver_of(other) is None
        assert stop_driver(one) == process.pid
        assert process.wait(20) == 0
    assert driver_of(one) is None
    with pytest.raises(JobError, match="nobody on this machine drives"):
        stop_driver(one)


def test_rounds_that_members_have_refused_are_refused_at_once(tmp_path: Path) -> None:
    why = "Adam keeps 'seen', of type int"
    one = started(tmp_path / "one", RoundsRefused(member=0, why=why))
    new = started(tmp_path / "new")
    with driven(new):
        assert "period 8" in ask_for_point(new, ["period=8"])
    with driven(one), pytest.raises(SpecError) as refused:
        ask_for_point(one, ["period=8"])
    assert refused.value.field == "period"
    assert why in str(refused.value)


@contextmanager
def not_seeing_all() -> Iterator[None]:
    """Do without root's right to look into every process, for a while."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0)
    before = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; and their upper halves
    assert libc.capget(header, before) == 0
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~(1 << CAP_SYS_PTRACE)
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def test_a_driver_that_may_not_be_looked_into_is_one(tmp_path: Path) -> None:
    one, other = started(tmp_path / "one"), started(tmp_path / "other")
    with driven(one, "unseen") as process, not_seeing_all():
        assert driver_of(one) == process.pid
        assert driver_of(other) is None
        assert status_in(one, VirtualClock(1000.0)).status == "starting"
        with pytest.raises(MachineError, match="may not be looked into") as refused:
            stop_driver(one)
        assert refused.value.hint == "ask as the user who started it"
        assert process.poll() is None


def test_a_driver_that_is_not_shown_at_all_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where /proc is mounted with hidepid: the lock is there, but not its process."""

    def kill(pid: int, _: int) -> None:
        raise PermissionError if pid == 7 else ProcessLookupError

    one, locks = started(tmp_path / "one"), tmp_path / "locks"
    monkeypatch.setattr(runs, "_PROC", tmp_path)
    monkeypatch.setattr(runs, "_LOCKS", locks)
    monkeypatch.setattr(os, "kill", kill)
    found = (one / "events.jsonl").stat()
    major, minor = os.major(found.st_dev), os.minor(found.st_dev)
    lock = "7: FLOCK  ADVISORY  WRITE {} {:02x}:{:02x}:{} 0 EOF\n8: -> FLOCK\n"
    elsewhere = None if major else 7  # a made-up number tells nothing
    for pid, device, driver in ((7, major, 7), (7, major + 1, elsewhere), (8, major, None)):
        locks.write_text(lock.format(pid, device, minor, found.st_ino))
        assert driver_of(one) == driver


def test_a_log_that_grows_without_a_lock_here_speaks_for_a_driver_elsewhere(tmp_path: Path) -> None:
    one = started(tmp_path / "one")
    written_t = (one / "events.jsonl").stat().st_mtime
    for clock in (VirtualClock(written_t + 50.0), VirtualClock(written_t - 50.0)):
        assert is_driven(one, clock)
        assert status_in(one, clock).status == "starting"
    later = VirtualClock(written_t + 70.0)
    assert not is_driven(one, later)
    assert status_in(one, later).status == "killed"


def test_following_goes_on_while_the_log_is_fresh_and_ends_with_the_run(tmp_path: Path) -> None:
    one = started(tmp_path / "one")
    clock = VirtualClock((one / "events.jsonl").stat().st_mtime)
    lines = log_lines(one, clock, follow=True)
    cards = [parse_line(next(lines)) for _ in range(2)]
    assert [card.status for card in cards if card] == ["starting", "starting"]
    with (one / "events.jsonl").open("a") as log:
        log.write(to_line(clock.unix_s(), RunFinished(status="finished", steps=0)) + "\n")
    (last,) = lines
    card = parse_line(last)
    assert card is not None
    assert card.status == "finished"


def test_a_reader_of_the_log_is_no_driver(tmp_path: Path) -> None:
    one = started(tmp_path / "one")
    with (one / "events.jsonl").open():
        assert driver_of(one) is None


def test_no_run_has_no_driver(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        driver_of(tmp_path)
    with pytest.raises(RunDirectoryError):
        status_in(tmp_path, VirtualClock())
    with pytest.raises(RunDirectoryError):
        list(log_lines(tmp_path, VirtualClock(), follow=False))


def test_status_in_a_run_that_goes_on_was_killed_or_has_ended(tmp_path: Path) -> None:
    one, clock = started(tmp_path / "one"), VirtualClock(200.0)
    with driven(one):
        card = status_in(one, clock)
        assert (card.status, card.t, card.steps, card.run) == ("starting", 200.0, 30, "one")
        assert card.directory == str(one)
    card = status_in(one, clock)
    assert (card.status, card.t) == ("killed", 100.0)
    other = started(tmp_path / "other", RunFinished(status="finished", steps=0))
    assert status_in(other, clock).status == "finished"
    (other / "events.jsonl").write_text("{}\n")
    with pytest.raises(RunDirectoryError):
        status_in(other, clock)
    assert status_or_why(other, clock).status == "unreadable"
    assert {path.name for path in runs_below(tmp_path)} == {"one", "other"}


def test_log_lines_are_notes_and_a_card(tmp_path: Path) -> None:
    noticed = Noticed(what="two\nlines")
    one = started(tmp_path / "one", noticed, RunFinished(status="stopped", steps=0))
    *notes, last = log_lines(one, VirtualClock(200.0), follow=True)
    assert notes == ["note: two lines"]
    card = parse_line(last)
    assert card is not None
    assert card.status == "stopped"


def test_following_goes_on_until_the_driver_is_gone(tmp_path: Path) -> None:
    one = started(tmp_path / "one")
    with driven(one) as process:
        lines = log_lines(one, VirtualClock(200.0), follow=True)
        first = parse_line(next(lines))
        assert first is not None
        assert first.status == "starting"
        entry = to_line(201.0, Noticed(what="half"))
        with (one / "events.jsonl").open("a") as log:
            log.write(entry[:20])
            log.flush()
            half = parse_line(next(lines))  # a line that is not whole yet is left for later
            log.write(entry[20:] + "\n")
        assert half is not None
        assert next(line for line in lines if parse_line(line) is None) == "note: half"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
        *_, last = lines
    card = parse_line(last)
    assert card is not None
    assert card.status == "killed"


def test_member_log(tmp_path: Path) -> None:
    one = started(tmp_path / "one")
    with pytest.raises(RunDirectoryError, match=r"member 0 of .* has logged nothing"):
        list(member_lines(one, 0, raw=False))
    (one / "logs").mkdir()
    entry = {"t": 3600, "level": "INFO", "logger": "task", "message": "a\x1bb", "step": 3}
    (one / "logs/member-0.jsonl").write_text(json.dumps(entry) + "\nnot one\n[1]\n")
    assert list(member_lines(one, 0, raw=False)) == [
        "01:00:00 INFO task: a?b (step 3)", "not one", "[1]",
    ]  # fmt: skip
    assert next(iter(member_lines(one, 0, raw=True))) == json.dumps(entry)
    with pytest.raises(RunDirectoryError) as refused:
        list(member_lines(one, 1, raw=False))
    assert refused.value.hint == "members that have: 0"


def test_list_of_runs() -> None:
    full = Listed(
        id="raysubmit_1",
        place="10.0.0.1",
        card=RunStatus(
            **{
                **{name: getattr(CARD, name) for name in ("run", "job", "status", "t", "step")},
                "steps": 30,
                "loss": 1.5,
                "samples_per_s": 80.0,
                "left_s": 24.0,
                "workers": 2,
                "members": (0, 3),
                "shares": (3, 1),
                "generation": 4,
                "recoveries": 1,
                "resumed": 1,
                "checkpoint_step": 4,
                "checkpoint_t": 990.0,
                "cost": 0.5,
                "directory": "/runs/one",
            }
        ),
    )
    text = listed_text([full, Listed(id="runs/one", card=CARD)], "http://head:8265", 1002.0)
    lines = text.splitlines()
    assert lines[0] == "http://head:8265"
    assert lines[3].split() == [
        *("raysubmit_1", "(one)", "running", "6/30", "1.5", "80", "24.0", "s", "2", "1", "resumed"),
        *("4,", "12", "s", "ago", "0.5"),
    ]
    assert lines[4].split() == ["runs/one", "running", "6/30", "-", "-", "-", "2", "none", "-", "-"]
    assert listed_text([], "here", 0.0) == "here: no runs"

    page = run_text(full, 1002.0)
    assert page.splitlines()[0] == "raysubmit_1 running: step 6/30"
    for row in (
        "  speed          80 samples/s · 24.0 s left",
        "  workers        2 (members 0 3, shares 3 1) · generation 4",
        "  recoveries     1 resumed",
        "  checkpoint     after step 4, 12 s ago",
        "  cost so far    0.5",
        "  run directory  /runs/one on 10.0.0.1",
        "  as of          2 s ago",
    ):
        assert row in page.splitlines()

    record = record_of([full], "http://head:8265")
    assert (record["format"], record["place"]) == (1, "http://head:8265")
    assert json.loads(json.dumps(record))["runs"][0]["id"] == "raysubmit_1"
    assert record["runs"][0]["members"] == [0, 3]


def test_lists_are_printable() -> None:
    card = RunStatus(run="a\x1b[2J", job="b\n", status="failed", t=0.0, error="x\x07y")
    run = Listed(id="a\x1b[2J", card=card)
    for text in (listed_text([run], "\x1b", 1.0), run_text(run, 1.0)):
        assert all(char.isprintable() or char == "\n" for char in text)
