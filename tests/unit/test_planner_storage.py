"""What storage takes: closed forms, and which of keeping and reading again costs less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.planner.plan import from_json
from raycloud.planner.storage import Paid, Reading, Storage, checkpoints_cost, weigh
from raycloud.report.summary_text import plan_text
from raycloud.spec.sections import KeepingPrices, ReadingPrices
from raycloud.spec.sizes import SourceRate
from tests.unit.test_planner_plan import golden_plan

GB = 10**9
RATE = SourceRate(files=1000, bytes=10 * GB, latency_s=0.05, bytes_per_s=20e6, readers=5)


def weighed(paid: Paid, epochs: float = 4.0, job_s: float = 2000.0, nodes: int = 1) -> Reading:
    return weigh("s3://bucket", RATE, paid, epochs=epochs, job_s=job_s, nodes=nodes)


def test_reading_is_opening_files_and_bytes_over_the_rate() -> None:
    assert RATE.seconds() == pytest.approx(1000 * 0.05 / 5 + 10 * GB / 20e6)


def test_reading_again_waits_for_what_computing_does_not_hide() -> None:
    one = weighed(Paid())
    assert one.read_s == 510.0
    assert one.again_s == pytest.approx(510.0 + 3 * (510.0 - 500.0))
    assert weighed(Paid(), job_s=8000.0).again_s == 510.0
    assert (one.read_cost, one.cache_cost, one.again_cost) == (None, None, None)


def test_nodes_with_links_of_their_own_may_take_as_much_less() -> None:
    one, four = weighed(Paid()), weighed(Paid(), nodes=4)
    assert four.low_s == pytest.approx(one.low_s / 4)
    assert four.high_s == one.high_s > one.read_s > one.low_s


def test_where_prices_are_not_all_known_rows_are_kept() -> None:
    free, disk = ReadingPrices(), {"disk_per_gb_month": 0.1}
    hidden = 8000.0  # computing hides all reading but the first
    assert weighed(Paid(**disk), job_s=hidden).keeps
    assert weighed(Paid(reading=free, **disk), job_s=hidden).keeps
    assert weighed(Paid(nodes_per_hour=5.0, **disk), job_s=hidden).keeps
    assert not weighed(Paid(reading=free, nodes_per_hour=0.0, **disk), job_s=hidden).keeps


def test_money_decides_where_it_is_known() -> None:
    reading = ReadingPrices(per_gb=0.1, per_1000_requests=0.5)
    dear = weighed(Paid(reading=reading, disk_per_gb_month=0.1, nodes_per_hour=1.0))
    assert dear.read_cost == pytest.approx(1.5)
    assert dear.again_cost == pytest.approx(6.0)
    assert dear.cache_cost == pytest.approx(10 * 0.1 * 2000 / (730 * 3600))
    assert dear.keeps
    disk = Paid(reading=ReadingPrices(), disk_per_gb_month=9.0, nodes_per_hour=0.1)
    assert not weighed(disk).keeps  # 30 s of waiting cost less than the disk
    waits = Paid(reading=ReadingPrices(), disk_per_gb_month=9.0, nodes_per_hour=50.0)
    assert weighed(waits).keeps


def test_what_checkpoints_cost() -> None:
    prices = KeepingPrices(per_gb_month=0.02, per_1000_requests=5.0)
    assert checkpoints_cost(prices, 3 * GB, 2, 5) == pytest.approx((0.12, 0.025))


def test_a_plan_shows_it_and_keeps_it() -> None:
    paid = Paid(reading=ReadingPrices(per_gb=0.1))
    reading = weighed(paid, epochs=3.0)
    storage = Storage(reading=reading, checkpoints_month=0.12, checkpoint_each=0.025)
    plan = replace(golden_plan(), storage=storage)
    text = plan_text(plan)
    assert "read s3://bucket once, keep blocks" in text
    assert "read it in each of 3 epochs" in text
    assert "checkpoints that stay, a month" in text
    assert from_json(plan.to_json()) == plan
    unread = replace(golden_plan(), storage=Storage(why="it is not there"))
    assert "it is not there" in plan_text(unread)
    assert from_json(unread.to_json()) == unread
    assert from_json(golden_plan().to_json()).storage is None
