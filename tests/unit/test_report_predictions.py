"""What a run was predicted to take, beside what it took: totals, intervals, energy by meters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raycloud.clock import SystemClock, VirtualClock
from raycloud.events import (
    CollatorsStarted,
    Event,
    MemberReady,
    Predicted,
    RunFinished,
    RunStarted,
    StepsCommitted,
)
from raycloud.report.predictions import Compared, compared
from raycloud.report.run_status import parse_line, status_of, to_line
from raycloud.report.summary_text import summary_text
from raycloud.worker.energy import Counter, Meters, Rapl, meter_of, rapl_zones
from tests import logs
from tests.logs import fold, formed, tally_of

TRIED = Predicted(
    generation=0, step=0, left=20, step_s=0.5, low_s=0.4, high_s=0.8, sent_bytes=100,
    price_per_hour=36.0, watts=10.0,
)  # fmt: skip
SEEN = replace(TRIED, step=10, left=10, step_s=1.0, low_s=0.9, high_s=1.1, seen=True)


def committed(first: int, last: int, energy_j: float = 0.0) -> StepsCommitted:
    """Two seconds of a processor a step."""
    steps = last - first
    made = logs.commit(0, first, last)
    return replace(made, bytes_sent=110 * steps, cpu_s=2.0 * steps, energy_j=energy_j)


def ready() -> MemberReady:
    return replace(logs.ready(0), price_per_hour=36.0, core_watts=4.0)


EVENTS: tuple[tuple[float, Event], ...] = (
    (100.0, RunStarted(job="gpt", version="1")),
    (104.0, ready()),
    (105.0, formed(0, 0)),
    (105.0, TRIED),
    (106.0, committed(0, 1)),
    (115.0, committed(1, 10)),
    (115.0, SEEN),
    (126.0, committed(10, 20)),
)


def by_name(*events: tuple[float, Event]) -> dict[str, Compared]:
    tally = tally_of(*events)
    return {one.name: one for one in compared(tally, 1.0, 0.22)}


def test_totals_are_what_was_spent_and_what_is_left() -> None:
    found = by_name(*EVENTS)
    job_s = found["job_s"]
    assert (job_s.predicted, job_s.low, job_s.high) == pytest.approx((25.0, 24.0, 26.0))
    assert job_s.first == pytest.approx(5.0 + 20 * 0.5)
    assert job_s.measured == pytest.approx(26.0)
    assert job_s.off is None  # more is to come
    ended = by_name(*EVENTS, (126.0, RunFinished(status="finished", steps=20)))
    assert ended["job_s"].off == pytest.approx(0.04)
    sent = found["bytes_sent"]
    assert (sent.predicted, sent.measured) == (1100 + 1000, 2200)
    assert found["cost"].predicted == pytest.approx(0.01 * (11.0 + 10 * 1.0))
    assert found["cost"].measured == 0.22
    assert found["step_s"].first == 0.5


def test_energy_without_meters_is_utilization_times_watts() -> None:
    found = by_name(*EVENTS)["energy_j"]
    assert found.measured == pytest.approx(20 * 2.0 * 4.0)
    assert found.estimated
    assert found.predicted == pytest.approx(10 * 8.0 + 10.0 * 10 * 1.0)
    assert "estimate" in found.texts[3]
    metered = by_name(*EVENTS[:4], (106.0, committed(0, 1, 7.0)))["energy_j"]
    assert (metered.measured, metered.estimated) == (7.0, False)


def test_a_gpu_s_meter_does_not_drop_the_processors() -> None:
    told = replace(committed(0, 1, 7.0), gpu_only=True)
    found = by_name(*EVENTS[:4], (106.0, told))["energy_j"]
    assert found.measured == pytest.approx(7.0 + 2.0 * 4.0)
    assert found.estimated


def test_collators_are_in_cost_and_energy() -> None:
    started = CollatorsStarted(node="c", count=3, price_per_hour=3.6, core_watts=10.0)
    unknown = CollatorsStarted(node="d", count=1)
    told = replace(committed(0, 1), read_s=0.5, collate_s=1.5)
    tally = tally_of(*EVENTS[:4], (105.5, started), (105.5, unknown), (106.0, told))
    [found] = [one for one in compared(tally, 1.0, None) if one.name == "energy_j"]
    assert found.measured == pytest.approx(2.0 * 4.0 + 2.0 * 10.0 * 3 / 4)
    assert tally.session is not None
    assert tally.session.nodes["c"] == (105.5, 3.6)


def test_the_last_prediction_before_the_first_step_is_the_first() -> None:
    known = replace(TRIED, step_s=0.75)
    found = by_name(*EVENTS[:4], (105.5, known), *EVENTS[4:])["step_s"]
    assert (found.first, found.predicted) == (0.75, 1.0)


def test_summary_and_status_have_all_of_it() -> None:
    whole = fold((*EVENTS, (127.0, RunFinished(status="finished", steps=20))))
    names = [one["name"] for one in whole.compared]
    assert names == ["step_s", "job_s", "bytes_sent", "cost", "energy_j"]
    text = summary_text(whole)
    assert "from command to last step" in text
    assert "likely 24.0 s to 26.0 s, before the start 15.0 s" in text
    card = status_of(tally_of(*EVENTS), now_t=130.0, steps=20)
    assert parse_line(to_line(card)) == card
    assert {one.name: one.measured for one in card.compared}["job_s"] == 30.0


def test_without_a_prediction_there_is_what_was_measured() -> None:
    found = by_name((100.0, RunStarted(job="a", version="1")), (104.0, logs.ready(0)), *EVENTS[4:5])
    assert found["job_s"].texts[1] == "-"
    assert found["bytes_sent"].measured == 110
    assert "energy_j" not in found  # nobody knows


def machine(folder: Path) -> list[Path]:
    """The files of one that has two processors, the first with a part of its own."""
    for name, most in (("intel-rapl:0", 1000), ("intel-rapl:1", 5000), ("intel-rapl:0:0", 9)):
        (folder / name).mkdir()
        (folder / name / "max_energy_range_uj").write_text(f"{most}\n")
    return rapl_zones(folder)


def test_of_the_processors_energy_a_member_has_its_part_of_their_time(tmp_path: Path) -> None:
    zones, stat = machine(tmp_path), tmp_path / "stat"

    def shows(busy_s: int, *counts: int) -> None:
        stat.write_text(f"cpu {busy_s * 100} 0 0 5 7 0 0 0 0 0\ncpu0 1\n")
        for zone, count in zip(zones, counts, strict=True):
            (zone / "energy_uj").write_text(f"{count}\n")

    shows(10, 900, 100)
    meter = Rapl(zones, stat)
    shows(14, 99, 2100)  # the first has begun anew
    assert meter.joules(1.0) == pytest.approx(1e-6 * (200 + 2000) / 4)
    shows(14, 99, 2500)  # its own are counted sooner than the machine's
    assert meter.joules(1.0) == pytest.approx(1e-6 * 400)
    (zones[0] / "energy_uj").unlink()
    assert meter.joules(1.0) == 0.0


def test_meters_are_added_up() -> None:
    counts = iter([5, 1005, 3005])
    both = Meters([Counter(lambda: next(counts)), Counter(lambda: 7)])
    assert [both.joules(9.0), both.joules(9.0)] == [1.0, 2.0]


def test_virtual_time_has_no_meters() -> None:
    assert meter_of(VirtualClock(), torch.device("cpu")) is None
    meter_of(SystemClock(), torch.device("cpu"))  # whatever this machine has
