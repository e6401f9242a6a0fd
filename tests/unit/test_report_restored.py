"""A run that has gone back to a checkpoint by itself, as its log tells it."""

from __future__ import annotations

import pytest

from raycloud.events import (
    CheckpointPublished,
    Evaluated,
    Event,
    MemberLost,
    MemberSpawned,
    Recovered,
    RolledBack,
    RunFinished,
    RunStarted,
)
from raycloud.on_ray.launch import for_the_log
from raycloud.report.log import to_line
from raycloud.report.notes import note
from raycloud.report.state import Tally
from raycloud.report.summary_text import summary_text
from tests.logs import commit, fold, formed, from_line, ready

CAUSE = "its process died"


def entries() -> list[tuple[float, Event]]:
    """Members 0 and 1 have done ten steps when both are lost; there is a checkpoint of step 6."""
    told: list[tuple[float, Event]] = [
        (100.0, RunStarted(job="gpt", version="0.1.0")),
        *((100.1, MemberSpawned(member=m)) for m in (0, 1)),
        *((101.0, ready(m)) for m in (0, 1)),
        (102.0, formed(0, 0, 1, first=0)),
        *((103.0 + m / 10, commit(m, 0, 6)) for m in (0, 1)),
        (103.5, CheckpointPublished(step=6, path="c", state_bytes=8, write_s=0.1)),
        *((105.0 + m / 10, commit(m, 6, 10)) for m in (0, 1)),
        (105.2, Evaluated(step=10, metrics={"loss": 1.0})),
        *((106.0 + m / 10, MemberLost(member=m, reason=CAUSE)) for m in (0, 1)),
        (106.2, RolledBack(step=6)),
        *((108.0, MemberSpawned(member=m)) for m in (2, 3)),
        *((112.0, ready(m)) for m in (2, 3)),
        (112.5, formed(2, 2, 3, first=6)),
        *((113.0 + m / 10, commit(m, 6, 8, generation=2)) for m in (2, 3)),
    ]
    recovered = Recovered(
        generation=2, lost=(0, 1), cause=CAUSE, detected_s=6.0, resumed_s=13.2, lost_steps=4
    )
    told += [
        (113.3, recovered),
        *((114.0 + m / 10, commit(m, 8, 12, generation=2)) for m in (2, 3)),
        (115.0, RunFinished(status="finished", steps=12)),
    ]
    return told


def test_reports_of_what_was_taken_back_may_come_after_it() -> None:
    late = [(106.3, commit(0, 6, 10)), (106.3, commit(1, 6, 10))]
    found, told = Tally(), entries()
    at = next(i for i, (_, event) in enumerate(told) if isinstance(event, RolledBack))
    for t, event in [*told[: at + 1], *late]:
        found.apply(t, event)
    assert (found.steps, [point.step for point in found.points]) == (6, [6])
    assert fold([*told[: at + 1], *late, *told[at + 1 :]]).steps == 12


def test_steps_after_the_checkpoint_count_once() -> None:
    found = fold(entries())
    assert (found.status, found.steps, found.samples) == ("finished", 12, 12 * 8)
    assert [step for step, _ in found.loss_curve] == [6, 8, 12]
    assert (found.sessions, found.workers) == (1, 2)
    assert [r["kind"] for r in found.recoveries] == ["member lost"] * 2
    assert {r["lost_steps"] for r in found.recoveries} == {4}
    assert [r["seconds"] for r in found.recoveries] == [pytest.approx(7.2)] * 2
    assert found.eval == {}  # they were of parameters that are no more
    text = summary_text(found)
    assert "member 0 at step 10, 7.2 s until training went on, 4 steps computed again" in text


def test_while_nobody_is_there_the_run_stands_where_the_checkpoint_does() -> None:
    tally = Tally()
    for t, event in entries():
        tally.apply(t, event)
        if isinstance(event, RolledBack):
            break
    assert (tally.steps, tally.members, tally.reported) == (6, (), {})
    assert tally.samples == 6 * 8


def test_what_was_computed_for_nothing_is_lost() -> None:
    told = entries()
    without = [(t, event) for t, event in told if not isinstance(event, RolledBack)]
    lost_s = fold(told).goodput["lost_s"] - fold(without).goodput["lost_s"]
    assert lost_s > 0.0
    assert fold(told).goodput["whole_s"] == pytest.approx(fold(without).goodput["whole_s"])


def test_it_is_said_where_the_run_goes_on() -> None:
    assert note(RolledBack(step=6)) == (
        "no sound state is left: going back to the checkpoint of step 6"
    )
    assert (note(RolledBack(step=0)) or "").endswith("going back to the beginning")


def test_the_log_does_without_the_ledger() -> None:
    event = for_the_log(RolledBack(step=6, ledger={"next_step": 6}))
    assert event == RolledBack(step=6)
    assert from_line(to_line(1.0, event))[1] == event


def test_rates_are_those_of_steps_that_count_after_a_beginning_anew() -> None:
    told = [(t, e) for t, e in entries() if not isinstance(e, CheckpointPublished)]
    at = next(i for i, (_, e) in enumerate(told) if isinstance(e, RolledBack))
    told[at] = (told[at][0], RolledBack(step=0))
    told[at + 5 :] = [
        (112.5, formed(2, 2, 3, first=0)),
        *((113.0 + m / 10, commit(m, 0, 1, generation=2)) for m in (2, 3)),
        *((115.0 + m / 10, commit(m, 1, 5, generation=2)) for m in (2, 3)),
        (116.0, RunFinished(status="stopped", steps=5)),
    ]
    found = fold(told)
    assert found.steps == 5
    assert found.samples_per_s is not None
    assert found.samples_per_s > 0.0
