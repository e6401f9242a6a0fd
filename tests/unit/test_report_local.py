"""A run directory here: who drives it, how it stands, what it says; and lists of runs."""

from __future__ import annotations

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
from raycloud.errors import JobError, RunDirectoryError
from raycloud.events import Noticed, RunFinished, RunStarted
from raycloud.report.card import parse_line
from raycloud.report.listed import Listed, listed_text, record_of, standing_text
from raycloud.report.local import (
    driver_of,
    is_run,
    log_lines,
    runs_below,
    standing_of,
    standing_or_why,
    stop_driver,
)
from raycloud.report.log import to_line
from raycloud.report.said import member_lines
from raycloud.report.standing import Card
from raycloud.spec import RunDirectory
from tests.lockstep import job

HOLDS = """
import fcntl, signal, sys
log = open(sys.argv[1], "a")
fcntl.flock(log, fcntl.LOCK_EX)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("held", flush=True)
signal.sigwait({signal.SIGTERM})
"""
CARD = Card(run="one", job="gpt", status="running", t=1000.0, step=6, steps=30, workers=2)


def started(directory: Path, *more: object) -> Path:
    directory.mkdir(parents=True)
    run = RunDirectory(directory)
    run.write_job(job(steps=30))
    events = [RunStarted(job="gpt", version="1"), *more]
    lines = [to_line(100.0 + at, event) for at, event in enumerate(events)]
    run.events_jsonl.write_text("".join(line + "\n" for line in lines))
    return directory


@contextmanager
def driven(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run's log as a driver does, and ends at SIGTERM."""
    log = directory / "events.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, log], stdout=subprocess.PIPE, text=True
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


def test_a_reader_of_the_log_is_no_driver(tmp_path: Path) -> None:
    one = started(tmp_path / "one")
    with (one / "events.jsonl").open():
        assert driver_of(one) is None


def test_no_run_has_no_driver(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        driver_of(tmp_path)
    with pytest.raises(RunDirectoryError):
        standing_of(tmp_path, VirtualClock())
    with pytest.raises(RunDirectoryError):
        list(log_lines(tmp_path, VirtualClock(), follow=False))


def test_standing_of_a_run_that_goes_on_was_killed_or_has_ended(tmp_path: Path) -> None:
    one, clock = started(tmp_path / "one"), VirtualClock(200.0)
    with driven(one):
        card = standing_of(one, clock)
        assert (card.status, card.t, card.steps, card.run) == ("starting", 200.0, 30, "one")
        assert card.directory == str(one)
    card = standing_of(one, clock)
    assert (card.status, card.t) == ("killed", 100.0)
    other = started(tmp_path / "other", RunFinished(status="finished", steps=0))
    assert standing_of(other, clock).status == "finished"
    (other / "events.jsonl").write_text("{}\n")
    with pytest.raises(RunDirectoryError):
        standing_of(other, clock)
    assert standing_or_why(other, clock).status == "unreadable"
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
        card=Card(
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
        *("raysubmit_1", "(one)", "running", "6/30", "1.5", "80", "24.0", "s", "2", "1"),
        *("4,", "12", "s", "ago", "0.5"),
    ]
    assert lines[4].split() == ["runs/one", "running", "6/30", "-", "-", "-", "2", "0", "-", "-"]
    assert listed_text([], "here", 0.0) == "here: no runs"

    page = standing_text(full, 1002.0)
    assert page.splitlines()[0] == "raysubmit_1 running: step 6/30"
    for row in (
        "  speed          80 samples/s · 24.0 s left",
        "  workers        2 (members 0 3, shares 3 1) · generation 4",
        "  recoveries     1",
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
    card = Card(run="a\x1b[2J", job="b\n", status="failed", t=0.0, error="x\x07y")
    run = Listed(id="a\x1b[2J", card=card)
    for text in (listed_text([run], "\x1b", 1.0), standing_text(run, 1.0)):
        assert all(char.isprintable() or char == "\n" for char in text)
