"""The fold of a log into a summary, against numbers computed by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from raycloud.errors import RunDirectoryError
from raycloud.events import (
    CheckpointPublished,
    Evaluated,
    Event,
    GenerationFormed,
    MemberFailed,
    MemberLost,
    MemberReady,
    MemberSpawned,
    Noticed,
    PartWritten,
    Recovered,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.report.log import to_line
from raycloud.report.summary import Summary, final_loss, of_run, recent, write_summary
from tests import logs
from tests.logs import fold, read_summary, tally_of

GOLDEN = Path(__file__).parent / "golden" / "summary.json"


def commit(
    member: int, first: int, last: int, *, loss: float = 2.0, generation: int = 0
) -> StepsCommitted:
    """Steps of 8 samples; each takes a member 0.5 s and 100 bytes of a dense exchange's 200."""
    report = logs.commit(member, first, last, loss=loss, generation=generation)
    return replace(report, compute_s=(0.25 + 0.05 * member) * (last - first))


def ready(member: int) -> MemberReady:
    return logs.ready(member, node="")


def formed(generation: int = 0, first_step: int = 0, shares: tuple[int, ...] = (1, 1)) -> Event:
    members = tuple(range(len(shares)))
    return GenerationFormed(
        generation=generation, members=members, shares=shares, first_step=first_step
    )


def start() -> list[tuple[float, Event]]:
    return [
        (100.0, RunStarted(job="gpt", version="0.1.0")),
        (103.0, MemberSpawned(member=0)),
        (103.0, MemberSpawned(member=1)),
        (105.0, ready(0)),
        (105.5, ready(1)),
        (106.0, formed()),
        (106.5, commit(0, 0, 1, loss=4.0)),
        (107.0, commit(1, 0, 1, loss=4.0)),
        (109.0, commit(0, 1, 6, loss=3.0)),
        (109.5, commit(1, 1, 5, loss=3.0)),
    ]


WHOLE: list[tuple[float, Event]] = [
    *start(),
    (111.0, PartWritten(member=0, step=10, part={}, blocked_s=0.01, write_s=0.2)),
    (111.0, PartWritten(member=1, step=10, part={}, blocked_s=0.02, write_s=0.3)),
    (111.5, commit(0, 6, 10, loss=2.0)),
    (112.0, commit(1, 5, 10, loss=2.2)),
    (112.5, CheckpointPublished(step=10, path="checkpoints/10", state_bytes=768, write_s=0.5)),
    (114.0, Evaluated(step=10, metrics={"loss": 2.5, "broken": math.inf}, sample="def f():\n")),
    (114.0, Noticed(what="shares were measured on a busy machine", member=1)),
    (115.0, RunFinished(status="finished", steps=10)),
]


def test_a_whole_run() -> None:
    summary = fold(WHOLE, predicted={"step_s": 0.5, "bytes_per_step": 100})
    assert (summary.status, summary.steps, summary.samples) == ("finished", 10, 80)
    assert summary.first_step_s == 7.0  # the slowest member's first report
    assert summary.train_s == 5.0  # 107 to 112
    assert summary.samples_per_s == (80 - 8) / 5.0
    assert summary.step_s == 5.0 / 9
    assert summary.wall_s == 15.0
    # the lead's reports [6, 10), [1, 6), [0, 1) hold ten steps
    assert summary.final_loss == pytest.approx((4 * 2.0 + 5 * 3.0 + 1 * 4.0) / 10)
    assert (summary.workers, summary.shares, summary.generations) == (2, [1, 1], 1)
    assert (summary.bytes_sent, summary.bytes_dense) == (2000, 4000)
    assert summary.cpu_s == pytest.approx(6.0)
    assert summary.compute_share == pytest.approx((2.5 + 3.0) / 10)
    assert summary.data_share == pytest.approx(0.1)
    assert summary.exchange_share == pytest.approx(0.2)
    assert summary.measured["compute_s"] == pytest.approx(0.3)  # member 1 takes longest
    assert summary.measured["bytes_per_step"] == 100
    assert (summary.checkpoints, summary.checkpoint_step) == (1, 10)
    assert summary.checkpoint_blocked_s == pytest.approx(0.03)
    assert summary.sample == "def f():\n"
    assert summary.eval["loss"] == 2.5
    assert summary.recoveries == []
    assert [notice["member"] for notice in summary.notices] == [1]


def test_golden_summary(tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", fold(WHOLE, predicted={"step_s": 0.5}))
    written = (tmp_path / "summary.json").read_text()
    assert written == GOLDEN.read_text()
    assert json.loads(written)["eval"]["broken"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    again = read_summary(tmp_path / "summary.json")
    assert again.to_record() == json.loads(written)


def test_a_step_counts_when_the_slowest_member_has_it() -> None:
    summary = fold(start())
    assert (summary.status, summary.steps, summary.samples) == ("unfinished", 5, 40)


def test_no_step_counts_before_all_members_reported() -> None:
    summary = fold(start()[:7])
    assert (summary.steps, summary.first_step_s, summary.samples_per_s) == (0, None, 8 / 0.5)


def test_a_resume_takes_steps_back() -> None:
    killed = [
        *start(),
        (110.0, CheckpointPublished(step=4, path="c/4", state_bytes=1, write_s=0.1)),
    ]
    resumed = [
        *killed,
        (200.0, RunStarted(job="gpt", version="0.1.0", resumed_from_step=4)),
        (205.0, formed(first_step=4)),
        (206.0, commit(0, 4, 5, loss=2.9)),
        (206.5, commit(1, 4, 5, loss=2.9)),
        (210.5, commit(1, 5, 12, loss=1.0)),
        (210.5, commit(0, 5, 12, loss=1.0)),
        (211.0, RunFinished(status="stopped", steps=12)),
    ]
    summary = fold(resumed)
    assert (summary.status, summary.steps, summary.samples) == ("stopped", 12, 96)
    assert summary.first_step_s == 6.5  # of the command that resumed
    assert summary.train_s == (109.5 - 107.0) + (210.5 - 206.5)
    assert summary.samples_per_s == (8 * 4 + 8 * 7) / summary.train_s
    assert summary.wall_s == 10.0 + 11.0  # not the time in between
    assert summary.generations == 2
    (resumed,) = summary.recoveries
    assert (resumed["kind"], resumed["t"], resumed["step"]) == ("resumed", 200.0, 4)
    assert (resumed["seconds"], resumed["steps_again"], resumed["lost_steps"]) == (5.0, 1, 1)
    assert summary.bytes_sent == 100 * (6 + 5 + 8 + 8)  # what was spent, also on steps taken back
    assert [step for step, _ in summary.loss_curve] == [1, 5, 12]
    assert summary.sessions == 2


def test_numbers_go_on_after_a_session_that_never_began() -> None:
    resumed = RunStarted(job="gpt", version="0.1.0", resumed_from_step=4)
    tally = tally_of(*start(), (200.0, resumed), (300.0, resumed))
    assert (tally.generation, tally.spawned, tally.awaited) == (0, {0, 1}, set())
    tally.apply(301.0, formed(1, 4))
    assert (tally.generation, tally.generations) == (1, 2)


def test_a_resume_from_beyond_the_log_goes_on_counting() -> None:
    entries = [
        *start(),  # the log ends at step 5, the checkpoint of step 7 was published
        (200.0, RunStarted(job="gpt", version="0.1.0", resumed_from_step=7)),
    ]
    assert (fold(entries).steps, fold(entries).samples) == (7, 56)


def test_an_evaluation_that_was_taken_back_is_forgotten() -> None:
    entries = [
        *start(),
        (110.0, Evaluated(step=5, metrics={"loss": 1.0}, sample="x")),
        (200.0, RunStarted(job="gpt", version="0.1.0", resumed_from_step=4)),
    ]
    assert (fold(entries).eval, fold(entries).sample) == ({}, None)


def test_a_reshare_is_one_generation_whatever_is_seen_first() -> None:
    reports = [
        (110.0, commit(0, 6, 8, generation=1)),  # switched before the other, and before the word
        (110.1, formed(1, 6, (2, 1))),
        (110.2, commit(1, 5, 6)),
        (110.3, commit(1, 6, 8, generation=1)),
    ]
    summary = fold([*start(), *reports])
    assert (summary.steps, summary.samples) == (8, 64)
    assert (summary.generations, summary.shares) == (2, [2, 1])


def test_a_newcomer_starts_at_the_step_its_generation_starts_at() -> None:
    entries = [
        *start(),
        (110.0, commit(1, 5, 6)),
        (110.1, formed(1, 6, (1, 1, 1))),
        (110.2, commit(0, 6, 7, generation=1)),
        (110.3, commit(1, 6, 7, generation=1)),
    ]
    assert fold(entries).steps == 6
    summary = fold([*entries, (110.4, commit(2, 6, 7, generation=1))])
    assert (summary.steps, summary.samples, summary.workers) == (7, 56, 3)


def test_a_lost_member_that_ends_the_run() -> None:
    lost = [
        *start(),
        (110.0, MemberLost(member=1, reason="its process died")),
        (110.5, RunFinished(status="failed", steps=5, error="member 1 died")),
    ]
    summary = fold(lost)
    assert (summary.status, summary.error) == ("failed", "member 1 died")
    (recovery,) = summary.recoveries
    assert (recovery["kind"], recovery["member"], recovery["seconds"]) == ("member lost", 1, None)
    resumed = [
        *lost,
        (200.0, RunStarted(job="gpt", version="0.1.0", resumed_from_step=4)),
        (203.0, formed(first_step=4)),
    ]
    assert [r["seconds"] for r in fold(resumed).recoveries] == [None, 3.0]
    assert fold(resumed).error is None


def test_a_lost_member_that_a_new_generation_replaces() -> None:
    entries = [
        *start(),
        (110.0, MemberLost(member=1, reason="its process died")),
        (110.5, formed(1, 5, (2,))),
    ]
    summary = fold(entries)
    assert (summary.recoveries[0]["seconds"], summary.workers) == (0.5, 1)
    told = Recovered(generation=1, lost=(1,), cause="died", detected_s=10.0, resumed_s=10.75)
    (again,) = fold([*entries, (110.8, told)]).recoveries
    assert (again["seconds"], again["lost_steps"], again["detected_s"]) == (0.75, 0, 10.0)


def test_a_failed_member_is_the_error() -> None:
    failed = MemberFailed(member=0, error="TaskError", message="loss() raised")
    entries = [*start(), (110.0, failed), (110.5, RunFinished(status="failed", steps=5))]
    assert fold(entries).error == "member 0: TaskError: loss() raised"


def test_a_run_with_one_report() -> None:
    entries = [(0.0, RunStarted(job="x", version="1")), (3.0, formed(shares=(1,)))]
    summary = fold([*entries, (5.0, commit(0, 0, 4))])
    assert (summary.train_s, summary.samples_per_s, summary.step_s) == (0.0, 32 / 2.0, None)


def test_an_unknown_first_loss_is_left_out() -> None:
    tally = tally_of(*start()[:6], (106.5, commit(0, 0, 1, loss=math.nan)))
    assert final_loss(tally) is None
    tally.apply(107.0, commit(0, 1, 2, loss=3.0))
    assert final_loss(tally) == 3.0


def test_nothing_happened() -> None:
    summary = fold([])
    assert (summary.status, summary.steps, summary.final_loss) == ("unfinished", 0, None)
    json.dumps(summary.to_record(), allow_nan=False)


def test_a_long_run_keeps_few_points_and_its_counts() -> None:
    steps = [(float(step), commit(0, step, step + 1, loss=1.0)) for step in range(10_000)]
    tally = tally_of((0.0, formed(shares=(1,))), *steps)
    assert (tally.steps, tally.samples) == (10_000, 80_000)
    assert len(tally.points) <= 4096
    assert sum(point.steps for point in tally.points) == 10_000
    assert abs(tally.samples_at(3001) - 8 * 3001) <= 8
    assert recent(tally) is None  # no session was started


def test_recent_rate() -> None:
    steps = [(2.0 + step, commit(0, step, step + 1)) for step in range(100)]
    started = RunStarted(job="x", version="1")
    assert recent(tally_of((0.0, started), (1.0, formed(shares=(1,))), *steps)) == (1.0, 8.0)


def test_of_run_reads_the_log_and_the_plan(tmp_path: Path) -> None:
    lines = [to_line(t, event) for t, event in WHOLE]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "plan.json").write_text('{"format": 1, "predicted": {"step_s": 0.5}}')
    summary = of_run(tmp_path)
    assert (summary.steps, summary.predicted) == (10, {"step_s": 0.5})
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        of_run(tmp_path)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="cannot read the event log"):
        of_run(tmp_path)


def test_summary_has_the_promised_names() -> None:
    promised = (
        "status steps samples first_step_s train_s samples_per_s final_loss eval workers "
        "generations recoveries bytes_sent bytes_dense predicted"
    )
    assert set(promised.split()) <= set(Summary.__dataclass_fields__)
