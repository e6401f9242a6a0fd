"""A sweep's points, its log, what is best in it, and who gets which seats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.errors import RunDirectoryError
from raycloud.report.sweep import importance, page
from raycloud.spec.sweep import Sweep
from raycloud.tuning.deal import Want, deal
from raycloud.tuning.results import Measured, Results, Trial, front, objectives
from raycloud.tuning.search import Grid, Random, search

SPACE: dict[str, Any] = {
    "global_batch": {"choice": [16, 32]},
    "sync.codec": {"choice": ["none", "int4"]},
    "sync.period": {"choice": [8, 16], "when": {"sync.codec": "int4"}},
}


def swept(space: Any = SPACE, **more: Any) -> Sweep:
    return Sweep(space=space, **more)


def test_a_grid_has_each_point_once_and_conditions_hold() -> None:
    grid = Grid(swept().space)
    found = [asked[1] for asked in iter(grid.ask, None)]
    assert len(found) == 2 * (1 + 2)
    assert [point for point in found if point["sync.codec"] == "none"] == [
        {"global_batch": size, "sync.codec": "none"} for size in (16, 32)
    ]
    assert len({json.dumps(point) for point in found}) == len(found)


def test_what_is_known_is_not_asked_again() -> None:
    grid = Grid(swept().space)
    grid.remember({"global_batch": 16, "sync.codec": "none"}, (1.0,))
    assert len([*iter(grid.ask, None)]) == 5
    drawn = Random(swept().space, 7)
    points = [drawn.ask() for _ in range(6)]
    assert len({json.dumps(asked[1]) for asked in points if asked}) == 6  # all there are
    assert drawn.ask() is None


def test_the_same_seed_draws_the_same_points() -> None:
    space = {"clip_norm": {"log": [0.01, 10.0]}, "seed": {"range": [0, 3]}}

    def points(seed: int) -> list[Any]:
        drawn = Random(swept(space).space, seed)
        return [drawn.ask() for _ in range(40)]

    assert points(1) == points(1) != points(2)
    found = [asked[1] for asked in points(1)]
    assert {point["seed"] for point in found} == {0, 1, 2, 3}
    assert all(0.01 <= point["clip_norm"] <= 10.0 for point in found)
    assert 10 <= sum(point["clip_norm"] < 0.3 for point in found) <= 30  # half of the logarithms


@pytest.mark.parametrize(
    ("searcher", "minimize"), [("tpe", ("measure",)), ("nsga2", ("seconds", "bytes"))]
)
def test_optuna_is_asked_and_told(searcher: str, minimize: Any) -> None:
    looks = search(swept(searcher=searcher, minimize=minimize))
    looks.remember({"global_batch": 16, "sync.codec": "none"}, [1.0] * len(minimize))
    for number in range(12):
        asked = looks.ask()
        assert asked is not None
        key, point = asked
        assert ("sync.period" in point) == (point["sync.codec"] == "int4")
        looks.tell(key, None if number == 3 else [float(point["global_batch"])] * len(minimize))


def test_tpe_learns_what_is_better() -> None:
    looks = search(swept({"clip_norm": {"range": [0.0, 1.0]}}, searcher="tpe", trials=60))
    found = []
    for _ in range(60):
        asked = looks.ask()
        assert asked is not None
        key, point = asked
        found.append(abs(point["clip_norm"] - 0.7))
        looks.tell(key, [found[-1]])
    assert sum(found[40:]) < 0.85 * sum(found[:20])


# ---- the log

AT = Measured(step=10, measure=2.0, seconds=1.5, samples=320, bytes=99)


def test_a_log_is_read_back(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "sweep.jsonl")
    results.add(0, point={"global_batch": 16}, status="running")
    results.add(1, point={"global_batch": 32}, status="running")
    results.add(0, measured=AT)
    results.add(0, measured=replace(AT, step=20, measure=1.5))
    results.add(0, status="finished")
    again = Results.open(tmp_path / "sweep.jsonl")
    assert again.trials == results.trials
    assert [trial.number for trial in again.whole] == [0]
    assert [trial.number for trial in again.unfinished] == [1]
    last = again.trials[0].last
    assert last is not None
    assert last.measure == 1.5


def test_a_word_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    results = Results.open(path)
    results.add(0, point={"a": 1}, status="running")
    with path.open("a") as file:
        file.write('{"format": 1, "tri')
    again = Results.open(path, writes=True)
    assert again.trials == results.trials
    again.add(0, status="finished")
    assert Results.open(path).trials[0].status == "finished"


@pytest.mark.parametrize(
    ("line", "why"),
    [('{"format": 2, "trial": 0}', "format 2"), ("nonsense", "Expecting"), ("[]", "damaged")],
)
def test_a_damaged_log_is_refused_by_its_line(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RunDirectoryError, match=rf"sweep.jsonl:1 .*{why}"):
        Results.open(path)


def test_the_log_has_one_form(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    Results.open(path).add(3, point={"sync.codec": "int4"}, status="running", measured=AT)
    assert path.read_text() == (
        '{"format": 1, "trial": 3, "point": {"sync.codec": "int4"}, "status": "running", '
        '"measured": {"step": 10, "measure": 2.0, "seconds": 1.5, "samples": 320, "bytes": 99, '
        '"money": null}}\n'
    )


# ---- what is best


def trial(number: int, status: str = "finished", **at: Any) -> Trial:
    return Trial(number=number, point={}, status=status, measured=(replace(AT, **at),))  # type: ignore[arg-type]


def test_only_what_came_to_something_has_objectives() -> None:
    asked: dict[str, Any] = {"mode": "min", "target": None}
    assert objectives(trial(0), ["measure"], **asked) == (2.0,)
    assert objectives(trial(0), ["measure"], mode="max", target=None) == (-2.0,)
    assert objectives(trial(0, "stopped"), ["measure"], **asked) is None
    assert objectives(trial(0), ["money"], **asked) is None
    assert objectives(trial(0, measure=float("nan")), ["measure"], **asked) is None
    to_target: dict[str, Any] = {"mode": "min", "target": 2.5}
    assert objectives(trial(0), ["seconds"], **to_target) is None
    assert objectives(trial(0, "reached"), ["seconds", "bytes"], **to_target) == (1.5, 99)


def test_the_front_is_who_nobody_beats_in_all() -> None:
    values = [(1.0, 9.0), (2.0, 3.0), (3.0, 3.0), (9.0, 1.0), (2.0, 3.0)]
    scored = [(trial(number), value) for number, value in enumerate(values)]
    assert [one.number for one in front(scored)] == [0, 1, 4, 3]


# ---- seats


def test_all_have_their_fewest_before_any_has_more() -> None:
    assert deal(4, [Want(1, 4)]) == [4]
    assert deal(4, [Want(1, 4), Want(1, 4)]) == [2, 2]
    assert deal(4, [Want(1, 4), Want(1, 1)]) == [3, 1]
    assert deal(4, [Want(1, 4)], expected=2) == [2]
    assert deal(2, [Want(1, 2), Want(1, 2), Want(1, 2)]) == [1, 1, 0]
    assert deal(0, [Want(1, 2)]) == [0]
    assert deal(5, []) == []


# ---- its page


def test_the_page_has_what_each_trial_came_to() -> None:
    sweep = swept({"global_batch": {"choice": [16, 32]}, "clip_norm": {"log": [0.1, 10.0]}})
    trials = [
        Trial(
            number=number,
            point={"global_batch": 16 * (1 + number % 2), "clip_norm": 0.1 * (1 + number)},
            status="finished" if number < 6 else "stopped",
            measured=(AT, replace(AT, step=20, measure=1.0 + number % 2, seconds=3.0 + number)),
        )
        for number in range(8)
    ]
    text = page("gpt<b>", trials, sweep)
    assert "gpt&lt;b&gt;" in text
    assert text.count("<polyline") == 3 * 8  # money is not known
    assert text.count("<svg") == 5
    assert "8 trials: 6 finished, 2 stopped. Least measure: 0." in text
    assert page("empty", [], sweep).count("<svg") == 0


def test_what_a_field_explains() -> None:
    scored = [
        (replace(trial(n), point={"a": n % 2, "b": n // 2 % 2, "c": n / 7}), float(n % 2))
        for n in range(8)
    ]
    assert importance(scored, "a") == 1.0
    assert importance(scored, "b") == 0.0
    assert importance(scored, "missing") is None
    assert importance(scored[:2], "a") is None
