"""What a run under faults came to: text, page and record."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from raycloud.checkpoint.payload import Difference
from raycloud.events import Event, GenerationFormed, MemberLost, Recovered, RunFinished
from raycloud.faults import Action, Fault, Hit
from raycloud.order import header_record, ledger_line
from raycloud.report.chaos import (
    RECORD,
    Bound,
    Outcome,
    bound_of,
    keep_outcome,
    outcome_page,
    outcome_text,
    side_of,
)
from tests.logs import STARTED_T, commit, entries, run_directory
from tests.unit.test_report_audit import records

KILL = Fault(action=Action.KILL, at_step=10, rank=1)
CUT = Fault(action=Action.CUT, at_step=10, many=2)


def kept(path: Path, told: list[tuple[float, Event]], steps: int) -> Path:
    run_directory(path, f"steps: {steps}\n", told)
    lines = map(ledger_line, (header_record(1000), *records(steps)))
    (path / "ledger").write_text("".join(lines))
    return path


def disturbed(status: str = "finished") -> list[tuple[float, Event]]:
    """Member 1 is killed 15.5 s after the start, and member 0 goes on 1 s later."""
    told = [entry for entry in entries() if not isinstance(entry[1], RunFinished)]
    again: list[tuple[float, Event]] = [
        (15.6, MemberLost(member=1, reason="<b>its</b> process died")),
        (16.0, GenerationFormed(generation=1, members=(0,), shares=(2,), first_step=10)),
        (16.5, replace(commit(0, 10, 12), generation=1)),
        (
            16.5,
            Recovered(generation=1, lost=(1,), cause="it died", detected_s=2.0, resumed_s=2.9),
        ),
        (18.0, RunFinished(status=status, steps=12, error=None)),
    ]
    return told + [(STARTED_T + t, event) for t, event in again]


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    return Outcome(
        job="rings",
        seed=3,
        workers=2,
        undisturbed=side_of(kept(tmp_path / "undisturbed", entries(steps=12), 12)),
        disturbed=side_of(kept(tmp_path / "disturbed", disturbed(), 12)),
        difference=Difference(
            step=12, tensors=7, largest=4e-15, tensor="model/a", parameters=1e-15,
            precision="float64",
        ),
        bound=bound_of("float64"),
        hits=(
            Hit(fault=KILL, member=1, t=STARTED_T + 15.5, step=10),
            Hit(fault=CUT, member=0, t=STARTED_T + 17.0, step=11, why="Operation not permitted"),
        ),
        left=(Fault(action=Action.FREEZE, at_step=11, seconds=4.0),),
    )  # fmt: skip


def test_what_is_proved_is_told(outcome: Outcome) -> None:
    assert outcome.proved
    lines = outcome_text(outcome).splitlines()
    assert lines[:9] == [
        "rings: the run under faults is the undisturbed run",
        "  parameters    agree: 4e-15 apart at most in model/a, over 7 tensors; at most 1e-09 is "
        "allowed (float64)",
        "  ledger        exact: 96 samples counted in 12 steps, finished",
        "  faults        1 worker was harmed",
        "                  15.5 s, step 10: step 10: kill: member 1: noticed after 0.10 s, went on "
        "after 1.0 s",
        "                  17.0 s, step 11: step 10: cut 2 at once: member 0: could not be done: "
        "Operation not permitted",
        "                step 11: freeze for 4 s: did not happen, the run ended before",
        "  pauses        1, 0.90 s together, the longest 0.90 s",
        "                  15.6 s: 0.90 s, generation 1, without 1: it died",
    ]
    assert lines[10].split() == ["time", "of", "all", "workers", "undisturbed", "under", "faults"]
    assert lines[11].startswith("  computing ")


def test_a_loss_is_of_the_last_that_was_done_to_a_worker(outcome: Outcome) -> None:
    before = Hit(fault=Fault(action=Action.FREEZE, seconds=0.3), member=1, t=STARTED_T + 9, step=4)
    both = replace(outcome, hits=(before, *outcome.hits))
    assert both.pause_of(before) is None
    assert both.pause_of(outcome.hits[0]) is not None


def test_the_record_is_whole(outcome: Outcome, tmp_path: Path) -> None:
    keep_outcome(tmp_path, outcome)
    record = json.loads((tmp_path / RECORD).read_text())
    assert (record["format"], record["proved"], record["seed"]) == (1, True, 3)
    assert record["difference"]["largest"] == 4e-15
    kill, cut = record["faults"]
    assert (kill["action"], kill["at_step"], kill["member"], kill["step"]) == ("kill", 10, 1, 10)
    assert kill["noticed_s"] == pytest.approx(0.1, abs=1e-3)
    assert kill["resumed_s"] == pytest.approx(1.0, abs=1e-3)
    assert (cut["why"], cut["resumed_s"]) == ("Operation not permitted", None)
    [pause] = record["disturbed"]["pauses"]
    assert pause["seconds"] == pytest.approx(0.9, abs=1e-3)
    goodput = record["disturbed"]["goodput"]
    parts = [seconds for name, seconds in goodput.items() if name not in {"whole_s", "goodput"}]
    assert sum(parts) == pytest.approx(goodput["whole_s"])


def test_the_page_needs_nothing_else(outcome: Outcome) -> None:
    page = outcome_page(replace(outcome, job="<script>alert(1)</script>"))
    assert "<script" not in page
    assert "<b>its" not in page
    assert "src=" not in page
    assert "href=" not in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert [ElementTree.fromstring(drawing).get("role") for drawing in drawings] == ["img", "img"]
    assert "member 1" in page


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"bound": Bound(value=1e-16, why="float64")}, "DIFFER: 4e-15"),
        ({"difference": None}, "not compared"),
    ],
)
def test_what_is_not_proved_is_told(change: dict[str, object], word: str, outcome: Outcome) -> None:
    other = replace(outcome, **change)
    assert not other.proved
    text = outcome_text(other)
    assert "rings: NOT PROVED" in text
    assert word in text
    assert "not proved" in outcome_page(other)


def test_a_run_that_failed_is_told(outcome: Outcome, tmp_path: Path) -> None:
    failed = side_of(kept(tmp_path / "failed", disturbed("failed"), 12), "nobody is left")
    other = replace(outcome, disturbed=failed, difference=None, bound=None)
    assert not other.proved
    assert "  error         nobody is left" in outcome_text(other)


def test_a_ledger_that_is_not_exact_proves_nothing(outcome: Outcome, tmp_path: Path) -> None:
    short = side_of(kept(tmp_path / "short", disturbed(), 11))
    assert not replace(outcome, disturbed=short).proved
    (tmp_path / "short" / "ledger").unlink()
    gone = replace(outcome, disturbed=side_of(tmp_path / "short"))
    assert not gone.proved
    assert "NOT READ" in outcome_text(gone)


def test_bounds() -> None:
    assert bound_of("float64").value == 1e-9
    found = bound_of("float32", 2e-5)
    assert found.value == pytest.approx(6e-5)
    assert "float32" in found.why
