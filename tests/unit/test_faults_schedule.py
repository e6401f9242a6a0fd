"""Schedules of faults: read, refused, drawn, and written so that they read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.errors import SpecError
from raycloud.faults import Action, Fault, check, drawn, load_schedule, schedule_text


def written(path: Path, text: str) -> Path:
    file = path / "faults.yaml"
    file.write_text(text)
    return file


def test_a_schedule_is_read(tmp_path: Path) -> None:
    text = """
format: 1
faults:
- {at_step: 20, action: kill}
- {at_s: 2.5, action: freeze, seconds: 4, rank: 2}
- {at_step: 60, action: terminate, many: 2}
- {at_step: 60, action: cut, recovering: true}
"""
    assert load_schedule(written(tmp_path, text)) == (
        Fault(action=Action.KILL, at_step=20),
        Fault(action=Action.FREEZE, at_s=2.5, seconds=4.0, rank=2),
        Fault(action=Action.TERMINATE, at_step=60, many=2),
        Fault(action=Action.CUT, at_step=60, recovering=True),
    )


def test_json_is_read_too(tmp_path: Path) -> None:
    text = '{"format": 1, "faults": [{"at_step": 3, "action": "kill"}]}'
    assert load_schedule(written(tmp_path, text)) == (Fault(action=Action.KILL, at_step=3),)


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        ("", "schedule", "format: 1"),
        ("faults: [", "schedule", ""),
        ("- 1", "schedule", "format: 1"),
        ("format: 1\nfaults: []\nmore: 1", "schedule", "format: 1"),
        ("faults: [{at_step: 1, action: kill}]", "format", "`format:` with 1"),
        ("format: 2\nfaults: [{at_step: 1, action: kill}]", "format", "must be 1"),
        ("format: 1", "faults", "`faults:` with a list"),
        ("format: 1\nfaults: []", "faults", "action: kill"),
        ("format: 1\nfaults: [kill]", "faults[0]", "indented below it: action"),
        ("format: 1\nfaults: [{at_step: 1}]", "faults[0].action", "freeze"),
        ("format: 1\nfaults: [{at_step: 1, action: burn}]", "faults[0].action", "freeze"),
        ("format: 1\nfaults: [{at_step: 1, action: [1]}]", "faults[0].action", "freeze"),
        ("format: 1\nfaults: [{action: kill}]", "faults[0].at_step", "at_step: 20"),
        ("format: 1\nfaults: [{at_step: 1, at_s: 1, action: kill}]", "faults[0].at_step", "at_st"),
        ("format: 1\nfaults: [{at_step: 0, action: kill}]", "faults[0].at_step", "at least 1"),
        ("format: 1\nfaults: [{at_step: yes, action: kill}]", "faults[0].at_step", "at least 1"),
        ("format: 1\nfaults: [{at_s: -1, action: kill}]", "faults[0].at_s", "from 0 to 3600"),
        ("format: 1\nfaults: [{at_s: .nan, action: kill}]", "faults[0].at_s", "from 0 to 3600"),
        ("format: 1\nfaults: [{at_step: 1, action: freeze}]", "faults[0].seconds", "seconds: 4"),
        (
            "format: 1\nfaults: [{at_step: 1, action: kill, seconds: 2}]",
            "faults[0].seconds",
            "leave it out",
        ),
        ("format: 1\nfaults: [{at_step: 1, action: kill, many: 0}]", "faults[0].many", "least 1"),
        ("format: 1\nfaults: [{at_step: 1, action: kill, rank: -1}]", "faults[0].rank", "least 0"),
        (
            "format: 1\nfaults: [{at_step: 1, action: kill, recovering: 1}]",
            "faults[0].recovering",
            "true or false",
        ),
        ("format: 1\nfaults: [{at_step: 1, action: kill, node: a}]", "faults[0].node", "at_step"),
    ],
)
def test_what_is_wrong_is_named(text: str, field: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_schedule(written(tmp_path, text))
    assert caught.value.field == field
    assert remedy in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nowhere.yaml.*No such file") as caught:
        load_schedule(tmp_path / "nowhere.yaml")
    assert "--seed" in caught.value.hint


def test_what_is_drawn_reads_back_and_is_the_same_again(tmp_path: Path) -> None:
    for seed in range(20):
        faults = drawn(seed, faults=10, steps=200, workers=3)
        assert faults == drawn(seed, faults=10, steps=200, workers=3)
        assert load_schedule(written(tmp_path, schedule_text(faults))) == faults
        check(faults, workers=3, steps=200)
        steps = [fault.at_step or 0 for fault in faults]
        assert steps == sorted(steps)
        assert 10 <= steps[0] <= steps[-1] < 180
    assert drawn(1, faults=10, steps=200, workers=3) != drawn(2, faults=10, steps=200, workers=3)


def test_all_kinds_are_drawn_and_pairs_only_where_a_third_is_left() -> None:
    faults = [f for seed in range(20) for f in drawn(seed, faults=10, steps=200, workers=3)]
    assert {fault.action for fault in faults} == set(Action)
    assert {fault.many for fault in faults} == {1, 2}
    assert {fault.many for fault in faults if fault.recovering} == {1}  # or it might never come
    two = [f for seed in range(20) for f in drawn(seed, faults=10, steps=200, workers=2)]
    assert {fault.many for fault in two} == {1}


def test_few_steps_are_enough_for_many_faults() -> None:
    check(drawn(3, faults=10, steps=4, workers=2), workers=2, steps=4)


def test_what_never_comes_is_refused() -> None:
    with pytest.raises(SpecError, match=r"faults\[0\].at_step = 50: the run ends") as caught:
        check([Fault(action=Action.KILL, at_step=50)], workers=3, steps=50)
    assert "before 50" in caught.value.hint
    with pytest.raises(SpecError, match=r"faults\[0\].many = 2: .* one has to be left") as caught:
        check([Fault(action=Action.KILL, at_step=5, many=2)], workers=2, steps=50)
    assert "elastic.max_workers=3" in caught.value.hint
    check([Fault(action=Action.KILL, at_step=50)], workers=3, steps=None)
