"""A run whose workers outlived their driver, as its log tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raycloud.events import (
    Event,
    GenerationFormed,
    MemberLost,
    MemberReady,
    MemberSpawned,
    Noticed,
    Recovered,
    RunFinished,
    RunStarted,
)
from raycloud.report.log import entries_of, to_line
from raycloud.report.notes import note
from raycloud.report.state import RunState, Tally
from raycloud.report.summary import summarize
from tests.logs import commit, fold, from_line, ready, tally_of


def before() -> list[tuple[float, Event]]:
    """Two members, of which one has told more, when the driver is killed."""
    return [
        (100.0, RunStarted(job="gpt", version="0.1.0")),
        (100.1, MemberSpawned(member=0)),
        (100.1, MemberSpawned(member=1)),
        (101.0, ready(0)),
        (101.0, ready(1)),
        (102.0, GenerationFormed(generation=0, members=(0, 1), shares=(1, 1), first_step=0)),
        (103.0, commit(0, 0, 4)),
        (103.0, commit(1, 0, 4)),
        (104.0, commit(0, 4, 7)),
    ]


def taken_over(*members: int) -> list[tuple[float, Event]]:
    started = RunStarted(job="gpt", version="0.1.0", taken_over=members)
    return [(110.0, started)]


def after() -> list[tuple[float, Event]]:
    """Both tell what they have not told, and go on."""
    cause = "the driver was gone"
    return [
        (114.0, commit(1, 4, 12)),
        (114.0, commit(0, 7, 12)),
        (114.5, GenerationFormed(generation=1, members=(0, 1), shares=(1, 1), first_step=12)),
        (115.0, commit(0, 12, 14)),
        (
            115.0,
            Recovered(generation=1, lost=(), cause=cause, detected_s=0.0, resumed_s=5.0),
        ),
        (115.0, commit(1, 12, 14)),
        (116.0, RunFinished(status="finished", steps=14)),
    ]


def test_nothing_is_taken_back_and_nothing_counts_twice() -> None:
    found = fold([*before(), *taken_over(0, 1), *after()])
    assert (found.status, found.steps, found.samples) == ("finished", 14, 14 * 8)
    assert (found.sessions, found.generations, found.workers) == (2, 2, 2)
    assert [step for step, _ in found.loss_curve] == [4, 7, 12, 14]
    assert found.recoveries == [
        {
            "kind": "taken over",
            "t": 110.0,
            "step": 4,
            "seconds": 5.0,
            "members": [0, 1],
            "generation": 1,
            "cause": "the driver was gone",
            "detected_s": 0.0,
            "resumed_s": 5.0,
            "lost_steps": 0,
        }
    ]
    assert found.bytes_sent == 2 * 14 * 100


def test_who_was_lost_with_the_driver_is_told_beside_it() -> None:
    lost = (110.1, MemberLost(member=1, reason="it did not outlive its driver"))
    form = GenerationFormed(generation=1, members=(0,), shares=(2,), first_step=7)
    told = Recovered(generation=1, lost=(1,), cause="x", detected_s=0.0, resumed_s=3.0)
    rest = [(112.0, form), (113.0, commit(0, 7, 9)), (113.0, told)]
    found = fold([*before(), *taken_over(0), lost, *rest])
    assert [(r["kind"], r["seconds"]) for r in found.recoveries] == [
        ("taken over", 3.0),
        ("member lost", 3.0),
    ]
    assert found.steps == 9


def test_a_loss_that_was_under_way_is_over_once_they_have_met() -> None:
    lost = (104.5, MemberLost(member=1, reason="killed"))
    form = GenerationFormed(generation=1, members=(0,), shares=(2,), first_step=7)
    told = Recovered(generation=1, lost=(), cause="x", detected_s=0.0, resumed_s=3.0)
    rest = [(112.0, form), (113.0, commit(0, 7, 9)), (113.0, told)]
    found = fold([*before(), lost, *taken_over(0), *rest])
    assert [(r["kind"], r["seconds"], r.get("ended_run")) for r in found.recoveries] == [
        ("member lost", 112.0 - 104.5, None),
        ("taken over", 3.0, None),
    ]


def test_a_takeover_that_was_killed_itself_ended_nothing() -> None:
    found = fold([*before(), *taken_over(0, 1), *taken_over(0, 1), *after()])
    assert [(r["kind"], r["seconds"]) for r in found.recoveries] == [
        ("taken over", 4.5),
        ("taken over", 5.0),
    ]
    ended = fold([*before(), *taken_over(0, 1), (120.0, RunFinished(status="failed", steps=4))])
    assert ended.recoveries[0]["ended_run"]


def test_who_takes_over_lets_spares_go() -> None:
    spare = (104.0, MemberSpawned(member=2))
    tally = tally_of(*before(), spare, *taken_over(0, 1), *after())
    assert tally.goodput.parts().starting_s == pytest.approx(2 * 0.9 + 6.0)


def test_the_loss_curve_is_of_one_that_has_the_state() -> None:
    """Member 2 follows; it reports nothing before it has caught up."""
    following = GenerationFormed(generation=1, members=(0, 1, 2), shares=(1, 1, 0), first_step=4)
    shared = GenerationFormed(generation=2, members=(0, 1, 2), shares=(1, 1, 1), first_step=9)
    tally = tally_of(*before()[:8])
    tally.apply(104.0, following)
    assert tally.lead == 0
    tally.apply(105.0, commit(0, 4, 8))
    tally.apply(105.0, commit(1, 4, 8))
    assert (tally.steps, tally.samples) == (8, 64)  # it is not waited for
    tally.apply(106.0, commit(2, 6, 9))  # it has caught up, and waits for a share
    assert tally.steps == 8
    tally.apply(106.0, commit(0, 8, 9))
    tally.apply(106.0, commit(1, 8, 9))
    assert (tally.steps, tally.samples) == (9, 72)
    tally.apply(107.0, shared)
    tally.apply(108.0, commit(0, 9, 12))
    tally.apply(108.0, commit(1, 9, 12))
    assert tally.steps == 9  # from now on it is
    tally.apply(108.0, commit(2, 9, 12))
    assert (tally.steps, tally.samples) == (12, 96)
    assert [point.step for point in tally.points] == [4, 8, 9, 12]


def test_where_only_one_that_follows_is_left_to_report_it_leads() -> None:
    tally = Tally()
    tally.apply(100.0, RunStarted(job="gpt", version="0.1.0"))
    tally.apply(101.0, GenerationFormed(generation=0, members=(0, 5), shares=(2, 0), first_step=0))
    assert tally.lead == 0
    tally.apply(102.0, commit(5, 0, 3))
    assert (tally.lead, tally.steps) == (0, 0)
    tally.apply(103.0, GenerationFormed(generation=1, members=(5,), shares=(2,), first_step=3))
    tally.apply(104.0, commit(5, 3, 4))
    assert (tally.lead, tally.steps, tally.samples) == (5, 4, 32)


def test_a_later_meeting_is_not_the_takeover() -> None:
    again = Recovered(generation=2, lost=(), cause="closed", detected_s=8.0, resumed_s=9.0)
    found = fold([*before(), *taken_over(0, 1), *after()[:-1], (120.0, again)])
    assert [(r["kind"], r["seconds"]) for r in found.recoveries] == [
        ("taken over", 5.0),
        ("met anew", 1.0),
    ]


def test_nodes_are_priced_on() -> None:
    priced = MemberReady(
        member=0, samples=1, parameters=1, state_bytes=1, gradient_bytes=1, fixed_s=0.0,
        micro_batch_s=1.0, node="a", price_per_hour=3600.0,
    )  # fmt: skip
    started = (100.0, RunStarted(job="gpt", version="0.1.0"))
    found = fold([started, (101.0, priced), (103.0, commit(0, 0, 2)), *taken_over(0), *after()[:1]])
    assert found.cost == pytest.approx(2.0 + 4.0)


def test_what_members_have_reported_outlives_the_driver() -> None:
    tally = tally_of(*before(), *taken_over(0, 1))
    assert tally.reported == {0: 7, 1: 4}
    assert summarize(tally).status == "unfinished"
    tally.apply(200.0, RunStarted(job="gpt", version="0.1.0", resumed_from_step=4))
    assert tally.reported == {}


def test_people_are_told() -> None:
    ((_, started),) = taken_over(0, 1)
    assert note(started) == "going on with 2 workers that outlived their driver"


def test_the_number_of_a_word_is_no_part_of_its_event() -> None:
    line = to_line(5.0, Noticed(what="x", member=3), (3, 17))
    assert '"word":[3,17]' in line
    assert from_line(line) == (5.0, Noticed(what="x", member=3))


def test_the_newest_word_of_each_member_and_what_it_skipped(tmp_path: Path) -> None:
    skips = [{"step": n} for n in range(3)]
    said: list[tuple[Event, tuple[int, int] | None]] = [
        (replace(commit(0, 0, 1), skips=(skips[0],)), (0, 1)),
        (replace(commit(1, 0, 2), skips=(skips[0], skips[1])), (1, 1)),
        (Noticed(what="said by nobody"), None),
        (replace(commit(1, 2, 3), skips=(skips[2],)), (1, 2)),
        (Noticed(what="c", member=0), (0, 2)),
    ]
    fold = RunState()
    for n, (event, word) in enumerate(said):
        (entry,) = entries_of(to_line(float(n), event, word))
        fold.apply(*entry)
    assert fold.words == {0: 2, 1: 2}
    assert fold.skips == {0: [skips[0]], 1: skips}
    fold.apply(9.0, RunStarted(job="gpt", version="1", taken_over=(0, 1)))
    assert fold.skips[1] == skips
    fold.apply(9.0, RunStarted(job="gpt", version="1", resumed_from_step=0))
    assert (fold.skips, fold.words) == ({}, {0: 2, 1: 2})
