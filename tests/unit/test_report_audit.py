"""`raycloud audit`: a run's ledger held against its log, what is told, and the exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raycloud import cli
from raycloud.cli import runs
from raycloud.events import (
    Event,
    GenerationFormed,
    MemberFailed,
    MemberLost,
    Recovered,
    RunFinished,
    RunStarted,
)
from raycloud.order import (
    ERROR,
    NAN,
    Position,
    Skip,
    Steps,
    commit_record,
    header_record,
    ledger_line,
    skip_record,
)
from raycloud.order.commits import lockstep_commits
from raycloud.report.audit import audit, audited_text
from tests.logs import STARTED_T, commit, entries, run_directory, text

STEPS = Steps(samples=1000, global_batch=8, micro_batch=4)


def records(steps: int, first: int = 0) -> list[dict[str, Any]]:
    """Those of reports of a step each."""
    return [
        commit_record(found)
        for step in range(first, steps)
        for found in lockstep_commits(
            STEPS, at=Position(offset=8 * step), first_step=step, last_step=step + 1, generation=0
        )
    ]


def run_with(path: Path, told: list[tuple[float, Event]], ledger: Sequence[Any]) -> Path:
    run_directory(path, "steps: 10\n", told)
    lines = map(ledger_line, (header_record(1000), *ledger))
    (path / "ledger").write_text("".join(lines))
    return path


def faulty() -> list[tuple[float, Event]]:
    """A member is lost on the way, the other goes on; then the run is resumed."""
    told = [entry for entry in entries(status="failed") if not isinstance(entry[1], RunFinished)]
    t = STARTED_T + 20
    again: list[Event] = [
        MemberLost(member=1, reason="its node died"),
        GenerationFormed(generation=1, members=(0,), shares=(2,), first_step=10),
        commit(0, 10, 14),
        Recovered(generation=1, lost=(1,), cause="its node died", detected_s=3.5, resumed_s=4.25),
        RunFinished(status="failed", steps=14, error="no"),
        RunStarted(job="gpt", version="0.1.0", resumed_from_step=12),
    ]
    return told + [(t + n, event) for n, event in enumerate(again)]


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["audit", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_an_exact_run(tmp_path: Path) -> None:
    run = run_with(tmp_path / "gpt-1", entries(), records(10))
    code, out, err = call(run)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{run}: exact: each sample counted once, as far as epoch 0, sample 80",
        "  steps         10",
        "  samples       80 counted",
        "  ledger        10 records, 1 start",
        "  run           finished, 1 generation",
        "  recoveries    none",
    ]


def test_a_lost_record_is_named(tmp_path: Path) -> None:
    ledger = records(10)
    del ledger[3]
    run = run_with(tmp_path / "gpt-1", entries(), ledger)
    code, out, _ = call(run)
    assert code == 1
    assert "NOT EXACT" in out.splitlines()[0]
    assert "  missing       1\n" in out
    assert "epoch 0 [24, 32), steps [3, 4), seen in line 5: in no record" in out
    code, out, _ = call(run, "--json")
    record = json.loads(out)
    assert (code, record["format"], record["exact"]) == (1, 2, False)
    assert record["missing"] == [
        {"epoch": 0, "start": 24, "stop": 32, "epochs": 1,
         "first_step": 3, "last_step": 4, "line": 5}
    ]  # fmt: skip
    assert record["doubled"] == record["misplaced"] == []


def test_the_last_record_is_missed_once_the_run_is_over(tmp_path: Path) -> None:
    over = run_with(tmp_path / "over", entries(), records(9))
    assert "epoch 0 [72, 80), steps [9, 10): in no record" in call(over)[1]
    killed = run_with(tmp_path / "killed", entries(status=""), records(9))
    code, out, _ = call(killed)
    assert code == 0
    assert "  steps         9, and 10 by the log\n" in out
    assert "epoch 0, sample 72" in out


def test_what_befell_the_run_stands_beside_it(tmp_path: Path) -> None:
    run = run_with(tmp_path / "gpt-1", faulty(), records(14))
    code, out, _ = call(run)
    assert code == 0
    assert "  run           unfinished, 2 generations\n" in out
    assert "  recoveries    1 lost, 1 resumed\n" in out
    assert (
        "member 1 at step 10, 0.75 s until training went on; generation 1, detected at 3.50 s, "
        "resumed at 4.25 s: its node died\n"
    ) in out
    assert "at step 12, 2 steps computed again" in out
    record = json.loads(call(run, "--json")[1])
    assert record["generations"] == 2
    (lost,) = record["members_lost"]
    assert (lost["member"], lost["step"], lost["reason"]) == (1, 10, "its node died")
    recovery, resumed = record["recoveries"]
    assert (recovery, resumed) == (lost, record["resumes"][0])
    assert recovery["cause"] == "its node died"
    assert (recovery["detected_s"], recovery["resumed_s"], recovery["lost_steps"]) == (3.5, 4.25, 0)
    assert record["resumes"][0]["steps_again"] == 2


def test_a_start_that_wrote_nothing_is_not_held_against_the_ledger(tmp_path: Path) -> None:
    """It was to go on from step 12, and found no room: the ledger still ends where it did."""
    told = [*faulty(), (STARTED_T + 40, RunFinished(status="failed", steps=12, error="no room"))]
    assert call(run_with(tmp_path / "gpt-1", told, records(14)))[0] == 0


def test_a_run_that_never_began(tmp_path: Path) -> None:
    told: list[tuple[float, Event]] = [
        (STARTED_T, RunStarted(job="gpt", version="0.1.0")),
        (STARTED_T + 9, RunFinished(status="failed", steps=0, error="no room")),
    ]
    run = run_with(tmp_path / "gpt-1", told, [])
    (run / "ledger").write_text("")
    code, out, _ = call(run)
    assert (code, "0 counted" in out) == (0, True)
    (run / "events.jsonl").write_text(text(entries()))
    code, _, err = call(run)
    assert (code, "no header line" in err) == (2, True)


def test_long_lists_are_cut_for_people(tmp_path: Path) -> None:
    run = run_with(tmp_path / "gpt-1", entries(status=""), records(100)[::2])
    found = audit(run)
    lines = audited_text(found).splitlines()
    assert "  missing       49" in lines
    assert sum("in no record" in line for line in lines) == 20
    assert any("and 29 more, which --json names" in line for line in lines)
    assert len(found.to_record()["missing"]) == 49


def test_nothing_of_a_log_reaches_the_terminal_raw(tmp_path: Path) -> None:
    told = faulty()
    told.insert(-1, (STARTED_T + 24, MemberLost(member=0, reason="\x1b[31mred\nrow " + "x" * 900)))
    code, out, _ = call(run_with(tmp_path / "gpt-1", told, records(14)))
    assert code == 0
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 400


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    told = faulty()
    odd = Recovered(generation=2, lost=(), cause="x", detected_s=float("nan"), resumed_s=1.0)
    told.insert(-1, (STARTED_T + 24, odd))
    run = run_with(tmp_path / "gpt-1", told, records(14))
    assert json.loads(call(run, "--json")[1])["recoveries"][1]["detected_s"] is None
    assert call(run)[0] == 0


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("job.yaml", None, "holds no run: there is no job.yaml"),
        ("job.yaml", b"[", "job.yaml"),
        ("events.jsonl", None, "cannot read the event log"),
        ("events.jsonl", b"{}\n\n", "line 1 cannot be read"),
        ("ledger", None, "cannot read the ledger"),
        ("ledger", b"{}\n", "line 1 of the ledger is damaged"),
        ("ledger", os.mkfifo, "no regular file"),
    ],
)
def test_a_file_that_lacks_or_is_damaged(
    tmp_path: Path, file: str, content: Any, says: str
) -> None:
    run = run_with(tmp_path / "gpt-1", entries(), records(10))
    (run / file).unlink()
    if callable(content):
        content(run / file)
    elif content is not None:
        (run / file).write_bytes(content)
    for more in ((), ("--json",)):
        code, out, err = call(run, *more)
        assert (code, out) == (2, "")
        assert says in err
        assert "hint: " in err


def test_exit_codes_are_told_where_they_are_looked_for() -> None:
    pages = Path(__file__).parents[2] / "docs"
    assert "1 not exact" in runs.AUDIT_EXIT_CODES
    for page in ("operations.md", "command-line.md"):
        assert "`raycloud audit` ends with 1" in " ".join((pages / page).read_text().split())


def test_what_was_skipped_is_named_and_is_no_fault(tmp_path: Path) -> None:
    some = Skip(step=3, epoch=0, start=28, stop=32, why=ERROR)
    whole = Skip(step=4, epoch=0, start=32, stop=40, why=NAN)
    ledger = [*records(10), skip_record(some), skip_record(whole)]
    found = audit(run_with(tmp_path, entries(), ledger))
    assert found.ledger.exact
    assert found.ledger.committed_samples == 80 - 4 - 8
    assert found.to_record()["skipped"] == [some.to_record(), whole.to_record()]
    told = audited_text(found)
    assert "each sample counted once, but for those that were skipped" in told
    assert "epoch 0 [28, 32), step 3, error: it failed each time" in told
    assert "epoch 0 [32, 40), step 4, nan: the loss or gradient was not finite" in told


def test_what_members_have_misread_is_not_exact_though_the_ledger_has_it(tmp_path: Path) -> None:
    told = [entry for entry in entries() if not isinstance(entry[1], RunFinished)]
    misread = "for steps 0 to 9 members have read other samples than these steps take"
    told += [
        (STARTED_T + 20, MemberFailed(member=1, error="DealingError", message=misread)),
        (STARTED_T + 21, RunFinished(status="failed", steps=10, error=f"member 1: {misread}")),
    ]
    run = run_with(tmp_path / "gpt-1", told, records(10))
    code, out, _ = call(run)
    assert code == 1
    assert out.startswith(f"{run}: NOT EXACT: not every sample counted exactly once")
    assert f"\n  misread       1\n                {misread}\n" in out
    record = json.loads(call(run, "--json")[1])
    assert (record["exact"], record["misread"]) == (False, misread)
    resumed = [*told, (STARTED_T + 30, RunStarted(job="gpt", version="0.1.0"))]
    assert audit(run_with(tmp_path / "gpt-2", resumed, records(10))).misread is None


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    told = [entry for entry in entries() if not isinstance(entry[1], RunFinished)]
    told.append((STARTED_T + 20, RunFinished(status="failed", steps=10, error="no more room")))
    run = run_with(tmp_path / "gpt-1", told, records(10))
    code, out, _ = call(run)
    assert code == 0
    assert out.endswith(
        "failed, 1 generation\n                no more room\n  recoveries    none\n"
    )
    assert json.loads(call(run, "--json")[1])["error"] == "no more room"
