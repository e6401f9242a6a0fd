"""What people ask of a run while it goes on: written, taken once, and never trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raycloud.errors import MachineError, SpecError
from raycloud.spec.rundir import ask_range, parse_range, take_range

WHY = "a step has 8 micro-batches"


@pytest.mark.parametrize(
    ("text", "fewest", "most"), [("4", 4, 4), ("2:6", 2, 6), ("1:8", 1, 8), ("3:", 3, 3)]
)
def test_a_range_is_a_number_or_two(text: str, fewest: int, most: int) -> None:
    assert parse_range(text, 8, WHY) == {"min_workers": fewest, "max_workers": most}


@pytest.mark.parametrize("text", ["", "a", "0", "4:2", "0:2", "-1", "2:6:8", "1.5", ":4"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="no range of workers") as refused:
        parse_range(text, 8, WHY)
    assert "2:6" in refused.value.hint


def test_more_workers_than_micro_batches_are_refused() -> None:
    with pytest.raises(SpecError, match="8 micro-batches") as refused:
        parse_range("2:9", 8, WHY)
    assert "at most 8" in refused.value.hint


def test_a_wish_is_taken_once_and_the_last_one_counts(tmp_path: Path) -> None:
    assert take_range(tmp_path) is None
    ask_range(tmp_path, {"min_workers": 1, "max_workers": 2})
    ask_range(tmp_path, {"min_workers": 2, "max_workers": 6})
    assert take_range(tmp_path) == {"min_workers": 2, "max_workers": 6}
    assert take_range(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


GOOD = {"format": 1, "min_workers": 1, "max_workers": 2}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        "{",
        json.dumps({**GOOD, "format": 2}),
        json.dumps({"format": 1, "min_workers": 1}),
        json.dumps({**GOOD, "min_workers": 3}),
        json.dumps({**GOOD, "min_workers": 0}),
        json.dumps({**GOOD, "min_workers": True}),
        json.dumps({**GOOD, "max_workers": "2"}),
        json.dumps({**GOOD, "more": "x" * 20_000}),
        "[" * 5_000,
    ],
)
def test_a_wish_that_lies_is_passed_over_once(tmp_path: Path, content: str) -> None:
    (tmp_path / "range.request").write_text(content)
    with pytest.raises(ValueError):  # noqa: PT011 - each says something else
        take_range(tmp_path)
    assert take_range(tmp_path) is None


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "range.request")
    with pytest.raises(ValueError, match="cannot be taken"):
        take_range(tmp_path)
    assert take_range(tmp_path) is None


def test_where_it_cannot_be_left_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot leave a wish"):
        ask_range(tmp_path / "gone", {"min_workers": 1, "max_workers": 1})
