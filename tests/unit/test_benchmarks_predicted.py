"""Predictions held against the steps that followed them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.predicted import Held, beside, main, meets, of_log, summed
from raycloud.events import Event, MemberLost, Predicted
from raycloud.report.log import to_line
from tests.logs import commit

SAID = Predicted(
    generation=0, step=0, left=99, step_s=1.0, low_s=0.9, high_s=1.2, sent_bytes=1
)  # fmt: skip


def steps(first: int, last: int, typical_s: float, generation: int = 0) -> list[Event]:
    """Reports of two members, five steps each."""
    return [
        replace(commit(member, at, at + 5, generation=generation), typical_s=typical_s)
        for at in range(first, last, 5)
        for member in (0, 1)
    ]


RUN = (
    replace(SAID, step_s=0.5),  # without the exchange
    SAID,
    *steps(0, 5, 9.0),  # the start
    *steps(5, 15, 1.1),
    replace(SAID, generation=1, step=15),
    *steps(15, 30, 1.1, 1),
    replace(SAID, generation=1, step=30, step_s=1.12, low_s=1.1, high_s=1.15, seen=True),
    *steps(30, 45, 1.05, 1),
    MemberLost(member=1, reason="killed"),
    replace(SAID, generation=2, step=45),
    *steps(45, 90, 3.0, 2),
)


def test_the_start_s_prediction_is_held_against_all_steps_until_one_rests_on_them() -> None:
    before, after = beside(RUN)
    assert (before.step_s, before.seen, before.measured_s, before.steps) == (1.0, False, 1.1, 40)
    assert before.error == pytest.approx(-1 / 11)
    assert before.covered
    assert (after.step_s, after.seen, after.measured_s, after.covered) == (1.12, True, 1.05, False)


def test_who_is_lost_ends_what_is_held_against_the_start() -> None:
    run = (SAID, *steps(0, 15, 1.0), MemberLost(member=1, reason="killed"), *steps(15, 90, 5.0))
    [before] = beside(run)
    assert (before.measured_s, before.steps) == (1.0, 20)
    assert [*beside((SAID, *steps(0, 5, 1.0)))] == []


def test_a_log_and_a_row_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "S1-0-raycloud" / "run"
    folder.mkdir(parents=True)
    log = folder / "events.jsonl"
    log.write_text("".join(to_line(1.0 + n, event) + "\n" for n, event in enumerate(RUN)))
    held = of_log(log)
    assert held == [asdict(one) for one in beside(RUN)]
    assert of_log(tmp_path / "none") == []
    row = {"scenario": "S1", "repeat": 0, "contestant": "raycloud", "predictions": held}
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps({"format": 1, "rows": [row, {**row, "contestant": "torchrun"}]}))
    told = tmp_path / "told.json"
    assert main([str(rows), str(tmp_path / "S1-0-raycloud"), "--json", str(told)]) == 1
    found = json.loads(told.read_text())
    assert [one["run"] for one in found["runs"]] == ["S1 raycloud repeat 0", "S1-0-raycloud/run"]
    assert found["runs"][0]["predictions"] == found["runs"][1]["predictions"]
    assert found["covered"] == 0.5
    assert "before the start 9.1%" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere")]) == 2


def test_floors() -> None:
    def held(error: float, *, seen: bool) -> Held:
        return Held(
            generation=0, step=0, seen=seen, step_s=1.0 + error, low_s=0.5, high_s=2.0,
            measured_s=1.0, steps=20,
        )  # fmt: skip

    def of(*some: Held) -> bool:
        return meets(summed([("S1", some)]))

    assert of(held(0.19, seen=False), held(-0.06, seen=True))
    assert not of(held(0.21, seen=False))
    assert not of(held(0.1, seen=False), held(0.08, seen=True))
    assert not of(held(0.01, seen=True))  # nothing was said before the start
