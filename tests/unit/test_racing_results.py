"""Rows in a file: written as each is done, the same file whatever came first."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.racing.results import (
    Results,
    ResultsError,
    best_peer,
    by_contestant,
    disturbed,
    load,
    load_all,
    machine_use,
    paired,
    values,
    with_ratios,
)


def row(contestant: str, repeat: int = 0, *, scenario: str = "S1", **more: object) -> dict:
    return {"scenario": scenario, "repeat": repeat, "contestant": contestant, **more}


def test_a_row_is_in_the_file_as_soon_as_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "S1.json"
    results = Results(path)
    results.add(row("raycloud", samples_per_s=1.0))
    assert json.loads(path.read_text()) == {
        "format": 1,
        "rows": [row("raycloud", samples_per_s=1.0)],
    }
    assert sorted(p.name for p in path.parent.iterdir()) == ["S1.json"], "no draft is left"
    again = Results(path)
    assert again.find("S1", 0, "raycloud") == row("raycloud", samples_per_s=1.0)
    assert again.find("S1", 1, "raycloud") is None
    again.add(row("raycloud", samples_per_s=2.0))
    assert [r["samples_per_s"] for r in load(path)] == [2.0]


keys = st.tuples(
    st.sampled_from(["raycloud", "ray-train", "limit"]), st.integers(0, 3), st.sampled_from("ab")
)


@given(
    st.lists(keys, unique=True, max_size=8).flatmap(
        lambda k: st.tuples(st.just(k), st.permutations(k))
    )
)
def test_a_run_that_was_broken_off_and_went_on_leaves_the_same_file(
    orders: tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]],
) -> None:
    """Each row is added by a process of its own to the second file, in another order."""
    with tempfile.TemporaryDirectory() as place:
        first, second = Path(place) / "S1.json", Path(place) / "S2.json"
        results = Results(first)
        for name, repeat, scenario in orders[0]:
            results.add(row(name, repeat, scenario=scenario))
        for name, repeat, scenario in orders[1]:
            Results(second).add(row(name, repeat, scenario=scenario))
        assert first.exists() == second.exists() == bool(orders[0])
        if orders[0]:
            assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read"),
        ("[]", "format is list, expected 1"),
        ('{"format": 2}', "format is 2, expected 1"),
        ('{"format": 1, "rows": [{"scenario": "S1"}]}', "must each hold scenario, repeat"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "S1.json"
    path.write_text(content)
    with pytest.raises(ResultsError, match=why):
        Results(path)


def test_a_number_that_json_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        Results(tmp_path / "S1.json").add(row("raycloud", samples_per_s=float("nan")))
    assert not (tmp_path / "S1.json").exists()


def test_a_directory_is_read_scenario_by_scenario(tmp_path: Path) -> None:
    Results(tmp_path / "S2.json").add(row("raycloud", scenario="S2"))
    Results(tmp_path / "S1.json").add(row("raycloud", scenario="S1"))
    (tmp_path / "reference.json").write_text("{}")
    assert [r["scenario"] for r in load_all(tmp_path)] == ["S1", "S2"]


def test_rows_are_told_apart() -> None:
    rows = [
        row("torchrun", samples_per_s=4.0),
        row("ray-train", samples_per_s=5.0),
        row("ray-train", 1, samples_per_s=None),
        row("torchrun", 1, samples_per_s=3.0),
        row("raycloud-equal", samples_per_s=99.0),
        row("raycloud", 1, samples_per_s=6.0),
        row("limit", samples_per_s=50.0),
    ]
    assert list(by_contestant(rows)) == [
        *("limit", "raycloud", "raycloud-equal"),
        *("ray-train", "torchrun"),
    ]
    assert best_peer(rows) == {0: 5.0, 1: 3.0}
    assert best_peer(rows, frozenset({"torchrun"})) == {0: 4.0, 1: 3.0}
    assert paired(values(by_contestant(rows)["raycloud"], "samples_per_s"), best_peer(rows)) == [
        2.0
    ]


def test_a_ratio_is_made_of_the_limit_of_the_same_repeat_and_machine() -> None:
    rows = [
        row("limit", samples_per_s=50.0, machine={"cpu": "a"}),
        row("limit", 1, samples_per_s=20.0, machine={"cpu": "a"}),
        row("raycloud", samples_per_s=10.0, machine={"cpu": "a"}),
        row("raycloud", 1, samples_per_s=10.0, machine={"cpu": "b"}),
        row("raycloud", 2, samples_per_s=10.0),
        row("torchrun", samples_per_s=10.0, ratio_to_limit=0.75),
        row("torchrun", 1, samples_per_s=None),
    ]
    found = with_ratios(rows)
    ratios = [one.get("ratio_to_limit") for one in found]
    assert ratios == [1.0, 1.0, 0.2, None, None, 0.75, None]
    assert found[2]["limit_samples_per_s"] == 50
    assert "ratio_to_limit" not in rows[2], "the rows stay as they are"


def test_what_others_used_is_read_by_both_of_its_names() -> None:
    new = row("raycloud", machine_use={"steal": 0.0, "outside": 0.031})
    old = row("raycloud", steal={"steal": 0.0, "outside": 0.03})
    assert (machine_use(new)["outside"], machine_use(old)["outside"]) == (0.031, 0.03)
    assert (disturbed(new), disturbed(old), disturbed(row("limit", steal=None))) == (
        *(True, False),
        False,
    )


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"cannot be written.*--json"):
        Results(tmp_path / "file" / "rows.json").check_writable()
    Results(tmp_path / "new" / "rows.json").check_writable()
    assert not [*(tmp_path / "new").iterdir()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to write to")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / ".rows.json.draft").symlink_to("/dev/full")
    with pytest.raises(ResultsError, match=r"rows\.json: cannot be written.*No space"):
        Results(tmp_path / "rows.json").add(row("raycloud"))
