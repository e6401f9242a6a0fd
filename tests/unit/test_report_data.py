"""What is told of data: prepared once, waited for cold and warm, stored at a cost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from raycloud.events import DataPrepared, Event, GenerationFormed, MemberReady, RunStarted
from raycloud.report.data import storage_efficiency
from raycloud.report.notes import note
from raycloud.report.summary import Summary
from raycloud.report.summary_text import summary_text
from tests.logs import fold, read_summary
from tests.unit.test_report_summary import GOLDEN, commit

EPOCH = 40  # samples: five steps


def prepared(member: int = 0, split: str = "train", **changes: Any) -> DataPrepared:
    values: dict[str, Any] = {
        "rows": EPOCH,
        "bytes": 2_000_000_000,
        "blocks": 10,
        "cached_blocks": 3,
        "partitions": 16,
        "bad_rows": 0,
        "bad": (),
        "inputs": (),
        "seconds": 4.25,
        "read_s": 7.0,
        "files": 2,
    }
    return DataPrepared(member=member, split=split, **(values | changes))


def start(**changes: Any) -> list[tuple[float, Event]]:
    ready = MemberReady(
        member=0,
        samples=EPOCH,
        parameters=1,
        state_bytes=1,
        gradient_bytes=1,
        fixed_s=0.0,
        micro_batch_s=1.0,
    )
    formed = GenerationFormed(generation=0, members=(0, 1), shares=(1, 1), first_step=0)
    held_out = prepared(1, "held_out", rows=8, bytes=500_000_000, blocks=1, cached_blocks=1)
    held_out = replace(held_out, price_per_gb_month=changes.get("price_per_gb_month"))
    return [
        (0.0, RunStarted(job="x", version="1")),
        *((1.0, prepared(member, **changes)) for member in (0, 1)),
        (1.5, held_out),
        (2.0, ready),
        (2.0, replace(ready, member=1)),
        (3.0, formed),
    ]


def steps(first: int, last: int, data_s: float, **changes: Any) -> list[tuple[float, Event]]:
    """Both members' reports of steps of 8 samples and 1 s each; `data_s` of each step is waited."""
    epoch, offset = divmod(8 * last, EPOCH)
    values = {"epoch": epoch, "offset": offset, "wall_s": 1.0 * (last - first)}
    made = replace(commit(0, first, last), **values, data_s=data_s * (last - first), **changes)
    return [(10.0 + last, made), (10.0 + last, replace(made, member=1))]


def test_what_every_member_tells_counts_once() -> None:
    data = fold(start()).data
    assert data["splits"]["train"] == {
        "rows": EPOCH,
        "bytes": 2_000_000_000,
        "blocks": 10,
        "cached_blocks": 3,
        "made_blocks": 7,
        "partitions": 16,
        "files": 2,
        "bad_rows": 0,
        "bad": [],
        "seconds": 4.25,
        "read_s": 7.0,
        "version": 0,
    }
    assert data["splits"]["held_out"]["made_blocks"] == 0
    assert data["bytes"] == 2_500_000_000
    assert (data["access_s"], data["cost_per_month"], data["efficiency"]) == (None, None, None)


def test_a_run_without_prepared_data_has_none() -> None:
    entries = [entry for entry in start() if not isinstance(entry[1], DataPrepared)]
    summary = fold([*entries, *steps(0, 1, 0.5)])
    assert summary.data == {}
    assert "storage" not in summary_text(summary)


def test_growth_adds_to_what_was_made() -> None:
    more = prepared(rows=60, blocks=14, cached_blocks=10, seconds=1.0, read_s=0.5, version=1)
    data = fold([*start(), (20.0, more), (20.1, replace(more, member=1)), (21.0, prepared(1))]).data
    train = data["splits"]["train"]
    assert (train["rows"], train["blocks"], train["version"]) == (60, 14, 1)
    assert (train["cached_blocks"], train["made_blocks"]) == (3, 11)
    assert (train["seconds"], train["read_s"]) == (5.25, 7.5)


def test_a_resumed_run_prepares_anew() -> None:
    again = (100.0, RunStarted(job="x", version="1", resumed_from_step=0))
    data = fold([*start(), again, (101.0, prepared(2, cached_blocks=10, seconds=0.25))]).data
    assert list(data["splits"]) == ["train"]
    assert (data["splits"]["train"]["made_blocks"], data["splits"]["train"]["seconds"]) == (0, 0.25)


def test_waiting_is_told_apart_by_the_first_epoch() -> None:
    entries = [*start(), *steps(0, 1, 0.5), *steps(1, 5, 0.25), *steps(5, 10, 0.0)]
    summary = fold(entries)
    assert summary.cold_data_share == pytest.approx((0.5 + 4 * 0.25) / 5)
    assert summary.warm_data_share == 0.0
    assert summary.data_share == pytest.approx((0.5 + 4 * 0.25) / 10)


def test_a_report_that_reaches_into_the_second_epoch_counts_in_both() -> None:
    summary = fold([*start(), *steps(0, 1, 0.0), *steps(1, 9, 0.5)])
    # 4 of its 8 steps are of the first epoch
    assert summary.cold_data_share == pytest.approx(4 * 0.5 / 5)
    assert summary.warm_data_share == pytest.approx(0.5)


def test_there_is_no_later_epoch_in_the_first() -> None:
    summary = fold([*start(), *steps(0, 1, 0.5)])
    assert (summary.cold_data_share, summary.warm_data_share) == (0.5, None)
    assert "first epoch" not in summary_text(summary)


def test_the_first_epoch_of_each_session_is_cold() -> None:
    resumed = (50.0, RunStarted(job="x", version="1", resumed_from_step=7))
    formed = GenerationFormed(generation=1, members=(2, 3), shares=(1, 1), first_step=7)
    entries = [*start(), *steps(0, 5, 0.5), *steps(5, 7, 0.0), resumed, (51.0, formed)]
    entries += [(t, replace(e, member=e.member + 2)) for t, e in steps(7, 8, 0.25)]  # type: ignore
    summary = fold(entries)
    assert summary.cold_data_share == pytest.approx((5 * 0.5 + 0.25) / 6)


def test_access_and_cost_of_storage() -> None:
    entries = [*start(price_per_gb_month=0.02), *steps(0, 10, 0.0, read_s=3.0, collate_s=1.0)]
    summary = fold(entries)
    # both members read 80 samples in 6 s: an epoch of 40 takes 3 s
    assert (summary.data_read_s, summary.data_collate_s) == (6.0, 2.0)
    assert summary.data["access_s"] == pytest.approx(3.0)
    assert summary.data["access_s_per_gb"] == pytest.approx(1.5)
    assert summary.data["efficiency"] == pytest.approx(2.0 / (3.0 * 0.04))
    assert summary.data["efficiency"] == storage_efficiency(
        data_bytes=2e9, access_s=summary.data["access_s"], cost=0.04
    )


def test_the_price_of_all_splits() -> None:
    entries: list[tuple[float, Event]] = [
        (0.0, RunStarted(job="x", version="1")),
        (1.0, prepared(price_per_gb_month=0.02)),
        (1.0, prepared(split="held_out", bytes=500_000_000, price_per_gb_month=0.02)),
    ]
    assert fold(entries).data["cost_per_month"] == pytest.approx(0.05)


def test_bad_rows_are_a_note_in_plain_words() -> None:
    bad = ("a.csv, row 7: label is missing", "b.csv, row 0: no image")
    summary = fold(start(bad_rows=12, bad=bad))
    (notice,) = summary.notices
    said = "12 bad rows were left out of train, the first: a.csv, row 7: label is missing"
    assert (notice["what"], notice["detail"]) == (said, {"bad": list(bad)})
    assert f"notes        {said}\n" in summary_text(summary) + "\n"
    assert fold(start()).notices == []


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (prepared(), "data: train has 40 rows in 10 blocks (3 from the cache, 7 made in 4.2 s)"),
        (
            prepared(split="held_out", cached_blocks=10),
            "data: held out has 40 rows in 10 blocks (10 from the cache)",
        ),
        (
            prepared(blocks=1, cached_blocks=0, bad_rows=1, bad=("a, row 0: torn",)),
            "data: train has 40 rows in 1 block (1 made in 4.2 s); "
            "1 bad row was left out of train, the first: a, row 0: torn",
        ),
        (
            prepared(version=1, cached_blocks=8, seconds=0.0),
            "data: train has grown to 40 rows in 10 blocks (8 from the cache, 2 made in 0.0 s)",
        ),
    ],
)
def test_the_line_of_prepared_data(event: DataPrepared, text: str) -> None:
    assert note(event) == text


def test_the_terminal_shows_data_storage_and_waiting() -> None:
    entries = [*start(price_per_gb_month=0.02), *steps(0, 5, 0.1, read_s=3.0), *steps(5, 10, 0.02)]
    text = summary_text(fold(entries))
    assert "data           40 rows in 10 blocks: 3 cached, 7 made in 4.2 s · " in text
    assert "8 rows held out in 1 block: 1 cached\n" in text
    assert "storage        2.5 GB on disk · an epoch is read in 3.0 s (1.5 s a GB)" in text
    assert "costs 0.05 a month · efficiency 16.67\n" in text
    assert "waiting for data 6% (first epoch 10%, later 2%)" in text


def test_a_summary_with_data_comes_back() -> None:
    summary = fold([*start(price_per_gb_month=0.02), *steps(0, 10, 0.0, read_s=3.0)])
    assert Summary.from_record(summary.to_record()) == summary


def test_a_summary_from_before_data_was_prepared_is_read() -> None:
    path = GOLDEN.with_name("summary-before-data.json")
    summary = read_summary(path)
    assert (summary.data_share, summary.cold_data_share, summary.data) == (0.1, None, {})
    assert json.loads(path.read_text()).items() <= summary.to_record().items()
