"""Reports of several members in one line of the log: what comes back, and who writes it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.clock import VirtualClock
from raycloud.errors import RunDirectoryError
from raycloud.events import (
    Event,
    GenerationFormed,
    MemberLost,
    Noticed,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.report.log import (
    MOST_MERGED,
    Entry,
    Tail,
    entries_of,
    read_events,
    to_line,
    to_merged_line,
)
from raycloud.report.recorder import Recorder
from raycloud.report.state import RunState
from raycloud.report.summary import summarize
from raycloud.spec.rundir import RunDirectory
from tests.logs import commit, from_line

GOLDEN = Path(__file__).parent / "golden" / "events-merged.jsonl"
T = 1_800_000_000.0
FORMED = GenerationFormed(generation=0, members=(0, 1), shares=(3, 1), first_step=0)
REPORTS = (
    Entry(T + 0.000001, replace(commit(0, 0, 4, loss=math.nan), compute_s=0.91234), (0, 7)),
    Entry(T + 0.5, replace(commit(1, 0, 4, loss=math.nan), grad_norm=math.inf), (1, 9)),
    Entry(T + 0.5, replace(commit(2, 0, 3), skips=({"step": 1, "why": "nan"},)), None),
)


def recorder(path: Path, clock: VirtualClock) -> Recorder:
    return Recorder(RunDirectory(path), clock)


def kinds(path: Path) -> list[tuple[str, int]]:
    """Of each line its event, and of how many members it is."""
    lines = (path / "events.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["event"], len(record.get("members", [0]))) for record in records]


def test_golden_line_and_back() -> None:
    assert to_merged_line(REPORTS) == GOLDEN.read_text().rstrip("\n")
    assert repr(tuple(entries_of(GOLDEN.read_text()))) == repr(REPORTS)
    json.loads(GOLDEN.read_text(), parse_constant=pytest.fail)


def test_a_line_of_eight_members_is_a_fourth_of_theirs() -> None:
    each = [
        replace(commit(m, 0, 9), wall_s=1.00201 + m, compute_s=0.7 + m / 1e5, cpu_s=0.61 + m / 1e4)
        for m in range(8)
    ]
    reports = [Entry(T + m / 1e6, event, (m, 100)) for m, event in enumerate(each)]
    alone = sum(len(to_line(*one)) for one in reports)
    assert len(to_merged_line(reports)) < alone / 4


def test_secrets_are_taken_out_of_what_may_hold_a_text() -> None:
    bad = replace(commit(0, 0, 1), skips=({"why": "https://a:hunter22@h/"},))
    for line in (to_line(T, bad), to_merged_line([Entry(T, bad), Entry(T, commit(1, 0, 1))])):
        assert "hunter22" not in line
        assert "[redacted]" in line


@pytest.mark.parametrize(
    "change",
    [
        {"members": []},
        {"members": [0, 1]},
        {"members": [0, 1, "2"]},
        {"members": list(range(MOST_MERGED + 1))},
        {"late_us": 5},
        {"late_us": [1, 2, math.inf]},
        {"words": [1, 2]},
        {"words": [1, 2, "3"]},
        {"same": []},
        {"each": {"samples": [1, 2, 3.5]}},
        {"each": {"samples": 3}},
        {"event": "RunStarted"},
        {"format": 3},
        {"format": True},
    ],
)
def test_a_line_that_lies_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    record = json.loads(GOLDEN.read_text()) | change
    (tmp_path / "events.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(RunDirectoryError, match="line 1 cannot be read"):
        list(read_events(tmp_path / "events.jsonl"))
    with pytest.raises(RunDirectoryError, match="line 1 cannot be read"):
        Tail(tmp_path / "events.jsonl").read()


def test_a_report_of_each_member_is_one_line(tmp_path: Path) -> None:
    clock = VirtualClock(T)
    with recorder(tmp_path, clock) as made:
        made.record(RunStarted(job="gpt", version="1"))
        made.record(FORMED)
        made.record(commit(0, 0, 2), (0, 1))
        assert made.written == {}  # it waits, and is told again if this driver dies
        clock.advance(0.25)
        made.record(commit(1, 0, 2), (1, 1))
        assert made.written == {0: 1, 1: 1}
    assert kinds(tmp_path)[2:] == [("StepsCommitted", 2)]
    told = list(Tail(tmp_path / "events.jsonl").rest())[2:]
    assert told == [Entry(T, commit(0, 0, 2), (0, 1)), Entry(T + 0.25, commit(1, 0, 2), (1, 1))]


def test_a_report_waits_a_second_and_no_event_overtakes_it(tmp_path: Path) -> None:
    clock = VirtualClock(T)
    with recorder(tmp_path, clock) as made:
        made.record(FORMED)
        made.record(commit(0, 0, 2))
        clock.advance(0.5)
        made.keep_up()
        assert len(kinds(tmp_path)) == 1
        clock.advance(0.5)
        made.keep_up()
        assert kinds(tmp_path)[1:] == [("StepsCommitted", 1)]
        made.record(commit(1, 0, 2))
        made.record(MemberLost(member=0, reason="x"))
        made.record(commit(1, 2, 3))
        made.publish_summary()
    told = [type(event) for _, event in read_events(tmp_path / "events.jsonl")]
    assert told[1:] == [StepsCommitted, StepsCommitted, MemberLost, StepsCommitted]


def test_what_the_recorder_knows_is_what_its_log_comes_to(tmp_path: Path) -> None:
    clock = VirtualClock(T + 0.123456789)
    with recorder(tmp_path, clock) as made:
        made.record(RunStarted(job="gpt", version="1"))
        made.record(FORMED)
        for step in range(0, 40, 2):
            for member in (0, 1):
                clock.advance(0.4999997 / (1 + member))
                made.record(commit(member, step, step + 2), (member, 1 + step // 2))
        made.record(RunFinished(status="finished", steps=40))
        own = summarize(made.tally)
    fold = RunState()
    for entry in Tail(tmp_path / "events.jsonl").rest():
        fold.apply(*entry)
    assert summarize(fold.tally) == own
    assert fold.words == {0: 20, 1: 20}
    assert own.goodput["whole_s"] > 0


def test_a_text_in_an_event_of_one_member() -> None:
    notice: Event = Noticed(what="at s3://me:hunter22@h/a", detail={"password": "abcd1234"})
    line = to_line(T, notice, (3, 4))
    assert "hunter22" not in line
    assert "abcd1234" not in line
    assert from_line(line)[1] == Noticed(
        what="at s3://[redacted]@h/a", detail={"password": "[redacted]"}
    )
