"""What reads a run directory, given files that are damaged or hostile: they end in plain words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.bounded import LARGEST_BYTES
from raycloud.errors import RunDirectoryError
from raycloud.events import Noticed
from raycloud.report.log import Tail
from raycloud.report.runs import entry_text, member_lines
from raycloud.report.tracking import FILE, Trackers
from raycloud.spec import Job
from tests.logs import entries, from_line, pairs, run_directory, text

LINE = '{"format":1,"t":%s,"event":"RunFinished","status":"finished","steps":%s,"error":null}'


def without_end(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 * LARGEST_BYTES)


@pytest.mark.parametrize(
    ("make", "says"), [(os.mkfifo, "no regular file"), (without_end, "line 1 is longer than")]
)
def test_a_log_that_is_none_is_not_tailed(
    tmp_path: Path, make: Callable[[Path], None], says: str
) -> None:
    make(tmp_path / "events.jsonl")
    with pytest.raises(RunDirectoryError, match=says):
        Tail(tmp_path / "events.jsonl").read()
    assert CliRunner().invoke(cli.app, ["watch", str(tmp_path)]).exit_code == 2


def test_a_torn_line_is_read_once_until_the_log_changes(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    long = text([(1.0, Noticed(what="x" * 3_000_000))])  # longer than what is read at a time
    log.write_text(text(entries()[:1]) + long[:-1] + " ")
    tail, found = Tail(log), log.stat()
    assert pairs(tail.read()) == entries()[:1]
    assert tail.read() == []
    log.write_text(text(entries()[:1]) + long)
    os.utime(log, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert tail.read() == []  # it looks the same, and was not read
    os.utime(log, ns=(found.st_atime_ns, found.st_mtime_ns + 1_000_000))
    ((_, event, _),) = tail.read()
    assert isinstance(event, Noticed)


@pytest.mark.parametrize(
    ("t", "steps"),
    [("1e300", "1"), ("-1e12", "1"), ("9" * 400, "1"), ("NaN", "1"), ("1", "9" * 400)],
    ids=["far", "before all", "beyond floats", "none", "many steps"],
)
def test_numbers_that_no_run_has(tmp_path: Path, t: str, steps: str) -> None:
    with pytest.raises(ValueError, match=r"date|or more|wrong kind|not JSON"):
        from_line(LINE % (t, steps))
    run = run_directory(tmp_path / "gpt-1", "steps: 10\n", entries())
    (run / "events.jsonl").write_text(LINE % (t, steps) + "\n")
    told = CliRunner().invoke(cli.app, ["watch", str(run)])
    assert (told.exit_code, "line 1 cannot be read" in told.stderr) == (2, True)


def test_a_members_log_without_end(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    without_end(tmp_path / "logs" / "member-0.jsonl")
    for raw in (False, True):
        with pytest.raises(RunDirectoryError, match=r"member-0\.jsonl cannot be read"):
            list(member_lines(tmp_path, 0, raw=raw))


@pytest.mark.parametrize("line", ["[" * 100_000, "[" + "1," * 2_000_000 + "1]", '{"t":1e300}'])
def test_an_entry_that_is_none_stands_as_it_is(line: str) -> None:
    assert entry_text(line) == line


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b" " * (LARGEST_BYTES + 1), b"{}"])
def test_trackers_begin_anew_where_what_they_kept_is_damaged(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / FILE).write_bytes(content)
    told = Trackers(Job(task="/p/a.py:B", steps=3), tmp_path, version="1")
    assert told.close("finished") == []
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)
    assert Trackers(Job(task="/p/a.py:B", steps=3), tmp_path, version="1").notices() == []


def test_what_trackers_kept_is_known(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "runs": {"mlflow": "abc"}}))
    told = Trackers(Job(task="/p/a.py:B", steps=3), tmp_path, version="1")
    assert told._known == {"mlflow": "abc"}
