"""The measures of a race, from journals whose results are worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.journal import Note, WorkerJournal
from benchmarks.racing.capacity import Change, first_rate, mean_rate
from benchmarks.racing.measures import (
    Commit,
    Fault,
    Observation,
    node_rates,
    row,
    samples_between,
    time_to_target_s,
    work,
)


def journal(
    notes: Sequence[tuple[float, int]], *, node: str = "n1", pid: int = 1, started_s: float = 0.0
) -> WorkerJournal:
    """A process that noted (second, update), 64 samples each."""
    return WorkerJournal(
        node=node,
        pid=pid,
        started_s=started_s,
        notes=tuple(Note(t_s=t, update=u, samples=64, cpu_s=0.0) for t, u in notes),
    )


def every_second(first: int, last: int, *, late_s: float = 0.0) -> list[tuple[float, int]]:
    return [(float(t) + late_s, t) for t in range(first, last + 1)]


def updates(commits: Sequence[Commit]) -> list[tuple[float, int]]:
    return [(commit.t_s, commit.update) for commit in commits]


def test_an_update_is_committed_when_the_first_worker_notes_it() -> None:
    done = work([journal([(1.5, 1), (2.0, 2)]), journal([(1.0, 1), (2.5, 2)], node="n2")])
    assert updates(done.kept) == updates(done.noted) == [(1.0, 1), (2.0, 2)]
    assert done.lost_steps == 0


def test_a_restart_loses_what_is_computed_again_and_all_that_followed_it() -> None:
    """Updates 1 to 6, then back to 3, and the race ends at 4: 3 to 6 are lost, 3 and 4 are new."""
    first = [journal(every_second(1, 6), pid=1), journal(every_second(1, 6, late_s=0.1), pid=2)]
    second = [journal([(20.0, 3), (21.0, 4)], pid=p, started_s=15.0) for p in (3, 4)]
    done = work([*first, *second])
    assert updates(done.kept) == [(1.0, 1), (2.0, 2), (20.0, 3), (21.0, 4)]
    assert (len(done.noted), done.lost_steps) == (8, 4)


def test_a_survivor_that_goes_back_loses_the_same() -> None:
    done = work([journal([(1.0, 1), (2.0, 2), (3.0, 3), (9.0, 2), (10.0, 3)])])
    assert updates(done.kept) == [(1.0, 1), (9.0, 2), (10.0, 3)]
    assert done.lost_steps == 2


def test_samples_of_each_worker_are_summed_where_they_are_its_own() -> None:
    both = [journal([(1.0, 1), (2.0, 2)]), journal([(1.5, 1)], node="n2", pid=2)]
    assert [commit.samples for commit in work(both, summed=True).kept] == [128, 64]
    assert [commit.samples for commit in work(both).kept] == [64, 64]


def test_who_joins_later_and_who_is_late_lose_nothing() -> None:
    survivor = journal(every_second(1, 5))
    joined = journal([(3.5, 4), (4.5, 5)], node="n2", started_s=2.5)
    frozen = journal([(1.0, 1), (30.0, 2)], node="n3")
    done = work([survivor, joined, frozen])
    assert updates(done.kept) == [(1.0, 1), (2.0, 2), (3.0, 3), (3.5, 4), (4.5, 5)]
    assert done.lost_steps == 0


def test_a_cut_step_counts_by_the_fraction_of_its_time() -> None:
    steps = [Commit(t_s=t, update=i, samples=60) for i, t in enumerate((0.0, 10.0, 20.0, 26.0))]
    assert samples_between(steps, 5.0, 23.0) == 30 + 60 + 30
    assert samples_between(steps, 12.0, 14.0) == pytest.approx(12)
    assert samples_between(steps, 26.0, 90.0) == 0, "nothing was committed after 26"
    assert samples_between(steps[:1], 0.0, 1.0) == 60, "the first as a whole, at its second"


def test_the_target_lies_on_the_line_between_two_snapshots() -> None:
    kept = [Commit(t_s=100.0 + 2 * u, update=u, samples=1) for u in range(1, 21)]
    losses = [(15, 2.0), (5, 4.0), (10, 3.0), (99, 0.0)]
    assert time_to_target_s(kept, losses, 2.5, t0_s=90.0) == 100 + 25 - 90
    assert time_to_target_s(kept, losses, 4.0, t0_s=90.0) == 100 + 10 - 90
    assert time_to_target_s(kept, losses, 1.0, t0_s=90.0) is None, "99 was never committed"


def test_the_limit_is_each_nodes_own_training() -> None:
    fast = journal([(float(t) / 2, t) for t in range(1, 60)], node="n1")
    slow = journal(every_second(1, 30), node="n2", pid=2)
    assert node_rates([fast, slow], 5.0, 15.0) == pytest.approx({"n1": 128.0, "n2": 64.0})


def test_the_limit_follows_the_nodes() -> None:
    speeds = {"n1": 8.0, "n2": 4.0}
    changes = [
        Change(t_s=0.0, node="n1", part=1.0),
        Change(t_s=10.0, node="n1", part=0.25),
        Change(t_s=20.0, node="n1", part=1.0),
        Change(t_s=15.0, node="n2", part=1.0),
        Change(t_s=25.0, node="n2", part=0.0),
    ]
    assert mean_rate(speeds, changes, 0.0, 30.0) == (8 * 22.5 + 4 * 10) / 30
    assert first_rate(speeds, changes, 0.0) == 8, "n2 comes later, n1 is slowed later"
    with pytest.raises(ValueError, match="n3 was not measured"):
        mean_rate(speeds, [Change(t_s=0.0, node="n3", part=1.0)], 0.0, 1.0)
    with pytest.raises(ValueError, match="no time"):
        mean_rate(speeds, changes, 1.0, 1.0)


def seen_once() -> Observation:
    """Steps of 1 s from 11 to 30; a fault at 20.5; back at 26 from update 8 on: 8, 9, 10 lost."""
    first = journal([(10.0 + u, u) for u in range(1, 11)])
    second = journal([(18.0 + u, u) for u in range(8, 14)], pid=2, started_s=22.0)
    return Observation(
        t0_s=5.0,
        window=(15.0, 30.0),
        journals=[first, second],
        faults=[Fault(t_s=20.5, what="kill-process n1")],
        changes=[Change(t_s=15.0, node="n1", part=1.0)],
        sent_bytes=67_200,
        trunk_bytes=4_480,
        losses=[(5, 4.0), (10, 3.0)],
        target_loss=3.5,
    )


def test_a_row_worked_out_by_hand() -> None:
    found = row(seen_once(), {"n1": 70.0})
    # Updates 6 and 7 in the window, then 8 from 17 to 26, and 9 to 12 a second each.
    assert found["samples_per_s"] == 64 * 7 / 15
    # As noted: 6 to 10, then 8 again from 20 to 26, and 9 to 12 again.
    assert found["noted_samples_per_s"] == pytest.approx(64 * 10 / 15)
    assert found["limit_samples_per_s"] == found["present_samples_per_s"] == 70
    assert found["ratio_to_limit"] == found["goodput"] == pytest.approx(64 * 7 / 15 / 70)
    assert found["pauses_s"] == [6 - 1]
    assert found["faults"] == [{"at_s": 5.5, "what": "kill-process n1", "no_pause_because": None}]
    assert (found["lost_steps"], found["updates"], found["first_step_s"]) == (3, 13, 6.0)
    assert (found["wire_bytes"], found["wire_bytes_total"]) == (150.0, 67_200)
    assert found["trunk_bytes"] == 10.0
    assert found["time_to_target_s"] == (15 + 28) / 2 - 5
    assert (found["final_loss"], found["final_s"]) == (3.0, 23.0)
    assert found["failed"] is None


def test_the_ratio_is_to_the_nodes_of_the_start_and_goodput_to_those_that_were_there() -> None:
    """n2 is there from the middle on, n1 at half speed in the last third, and n3 never."""
    seen = Observation(
        t0_s=0.0,
        window=(10.0, 40.0),
        journals=[journal(every_second(1, 50))],
        changes=[
            Change(t_s=10.0, node="n1", part=1.0),
            Change(t_s=25.0, node="n2", part=1.0),
            Change(t_s=30.0, node="n1", part=0.5),
        ],
    )
    found = row(seen, {"n1": 80.0, "n2": 60.0, "n3": 9.0})
    assert found["limit_samples_per_s"] == 80
    assert found["ratio_to_limit"] == pytest.approx(64 / 80)
    could = 80 * 20 + 40 * 10 + 60 * 15
    assert found["present_samples_per_s"] == pytest.approx(could / 30)
    assert found["goodput"] == pytest.approx(64 * 30 / could)


def test_a_row_tells_a_relief_from_a_fault() -> None:
    """Held up from 9 to 21 by the freeze at 10, which the thaw at 20 ends; then by nothing."""
    steps = [*every_second(1, 9), *((float(t), t - 11) for t in range(21, 41))]
    seen = Observation(
        t0_s=0.0,
        window=(5.0, 40.0),
        journals=[journal(steps)],
        faults=[Fault(t_s=10.0, what="freeze n2"), Fault(t_s=20.0, what="thaw n2")],
    )
    found = row(seen, None)
    assert found["pauses_s"] == [11.0, 0.0]
    assert [fault["what"] for fault in found["faults"]] == ["freeze n2", "thaw n2"]


def test_who_never_started_has_a_row_all_the_same() -> None:
    found = row(Observation(t0_s=0.0, failed="no such program"), {"n1": 1.0})
    assert found["failed"] == "no such program"
    assert found["updates"] == 0
    assert found["pauses_s"] == []
    nothing = ("samples_per_s", "ratio_to_limit", "goodput", "first_step_s", "lost_steps")
    assert all(found[name] is None for name in (*nothing, "wire_bytes", "time_to_target_s"))


def test_who_ends_in_the_window_did_nothing_in_the_rest_of_it() -> None:
    seen = Observation(t0_s=0.0, window=(10.0, 20.0), journals=[journal(every_second(1, 15))])
    assert row(seen, None)["samples_per_s"] == 64 * 5 / 10
    assert row(seen, None)["ratio_to_limit"] is None


times = st.floats(0, 100, allow_nan=False)
journals = st.lists(
    st.builds(
        journal,
        st.lists(st.tuples(times, st.integers(1, 12)), max_size=20).map(sorted),
        pid=st.integers(1, 4),
        started_s=times,
    ),
    max_size=4,
)


@given(journals, times, times)
def test_what_is_kept_was_noted_and_a_window_holds_no_more_than_all(
    found: list[WorkerJournal], a: float, b: float
) -> None:
    done = work(found)
    assert set(done.kept) <= set(done.noted)
    assert len({c.update for c in done.kept}) == len(done.kept)
    assert {c.update for c in done.noted} == {n.update for j in found for n in j.notes}
    inside = samples_between(done.kept, min(a, b), max(a, b))
    assert -1e-6 <= inside <= sum(c.samples for c in done.kept) + 1e-6
    assert done.lost_steps >= 0
