"""A sweep's points, its log, what is best in it, and who gets which seats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.errors import RunDirectoryError
from raycloud.report.sweep import best_of, importance, page
from raycloud.spec.sweep import Parameter, Sweep
from raycloud.tuning.deal import Want, deal
from raycloud.tuning.population import Population
from raycloud.tuning.results import Measured, Results, Trial, finalist, front, objectives
from raycloud.tuning.rungs import Rungs, SpentRungs
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
    results.add(1, again=0)
    again = Results.open(tmp_path / "sweep.jsonl")
    assert [trial.again for trial in again.trials.values()] == [None, 0]
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


def test_who_has_spent_what_another_needed_cannot_be_the_best(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "sweep.jsonl")
    for number, (status, seconds) in enumerate((("reached", 50.0), ("stopped", 9.0))):
        results.add(number, point={}, status="running")
        results.add(number, measured=replace(AT, seconds=seconds))
        results.add(number, status=status)
    spent = {"measure": 9.0, "seconds": 49.9, "samples": 10**9, "bytes": 0, "money": None}
    assert not results.overtaken(spent, ("seconds",), 1.0)
    assert results.overtaken({**spent, "seconds": 50.0}, ("seconds",), 1.0)
    assert not results.overtaken({**spent, "seconds": 50.0}, ("seconds", "bytes"), 1.0)
    assert results.overtaken({**spent, "seconds": 50.0, "bytes": 10**12}, ("seconds", "bytes"), 1.0)
    assert not results.overtaken({**spent, "seconds": 99.0}, ("seconds", "measure"), 1.0)
    assert not results.overtaken({**spent, "seconds": 99.0}, ("seconds", "money"), 1.0)


def test_the_front_is_who_nobody_beats_in_all() -> None:
    values = [(1.0, 9.0), (2.0, 3.0), (3.0, 3.0), (9.0, 1.0), (2.0, 3.0)]
    scored = [(trial(number), value) for number, value in enumerate(values)]
    assert [one.number for one in front(scored)] == [0, 1, 4, 3]


def test_who_of_the_best_is_trained_once_more() -> None:
    scored = [(trial(number), (value,)) for number, value in enumerate((3.0, 1.0, 2.0, 1.5))]
    begun: list[int | None] = [None]
    while (one := finalist(scored, begun, 2)) is not None:
        begun.append(one.number)
    assert begun == [None, 1, 3]
    again = [(replace(trial(4), again=1), (2.5,)), (replace(trial(5), again=3), (1.6,))]
    assert finalist([*scored, *again], [1, 3], 2) is None
    to_target = swept(target=2.5, minimize=("seconds",), finalists=2)
    assert [one.number for one in best_of(scored, to_target)] == [1]
    assert [one.number for one in best_of([*scored, *again], to_target)] == [5]
    assert finalist([*scored, (replace(trial(4), again=1), (0.5,))], [1], 2) == trial(3)


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
    assert text.count("<polyline") == 3 * 8 + 1  # and the front of bytes; money is not known
    assert text.count("<svg") == 5
    assert "8 trials: 6 finished, 2 stopped. Least measure: 0." in text
    assert page("empty", [], sweep).count("<svg") == 0
    more = sweep.model_copy(update={"space": {**sweep.space, "sync.ratio": Parameter(choice=[2])}})
    assert "sync.ratio" in page("a field that no trial was given", trials, more)


def test_what_a_field_explains() -> None:
    scored = [
        (replace(trial(n), point={"a": n % 2, "b": n // 2 % 2, "c": n / 7}), float(n % 2))
        for n in range(8)
    ]
    assert importance(scored, "a") == 1.0
    assert importance(scored, "b") == 0.0
    assert importance(scored, "missing") is None
    assert importance(scored[:2], "a") is None


POPULATION = {
    "settings.learning_rate": {"log": [1e-4, 1e-1]},
    "micro_batch": {"choice": [1, 2, 4]},
}


def population(results: Results, trials: int = 4, refuses: Any = lambda _: False) -> Population:
    told: Any = {"space": POPULATION, "searcher": "pbt", "trials": trials, "seed": 3}
    return Population(Sweep(**told), 30, 10, results, refuses)


def stand(results: Results, number: int, step: int, measure: float) -> None:
    at = Measured(step=step, measure=measure, seconds=1.0, samples=step, bytes=0)
    results.add(number, measured=at, status="finished" if step == 30 else "running")


def founded(path: Path, trials: int = 4) -> Results:
    results = Results(path / "sweep.jsonl")
    for number in range(trials):
        point = {"settings.learning_rate": 1e-3, "micro_batch": 2}
        results.add(number, point=point, status="running")
    return results


def test_a_generation_ends_before_the_next_begins(tmp_path: Path) -> None:
    results = founded(tmp_path)
    one = population(results)
    assert [one.next(busy).number for busy in ((), (0,), (0, 1))] == [0, 1, 2]  # type: ignore[union-attr] # there are
    assert one.until == 10
    for number in range(3):
        stand(results, number, 10, float(number))
    assert one.next((3,)) is None
    assert not list(one.forks())
    stand(results, 3, 10, 3.0)
    assert len(list(one.forks())) == 1
    assert one.until == 20


def test_the_worst_begins_again_as_the_best_and_it_is_the_same_after_a_kill(tmp_path: Path) -> None:
    results = founded(tmp_path, 8)
    for number in range(8):
        stand(results, number, 10, float(-number))
    one = population(results, 8)
    whole = list(one.forks())
    assert {fork.replaces for fork, _ in whole} == {0, 1}
    assert {fork.parent for fork, _ in whole} <= {6, 7}
    assert {fork.step for fork, _ in whole} == {10}
    (first, point), left = whole[0], whole[1:]
    donor = results.trials[first.parent].last
    results.add(8, point=point, status="running", fork=first, measured=donor)
    again = Results.open(results.path)
    assert list(population(again, 8).forks()) == left
    assert 8 in {trial.number for trial in population(again, 8).living}
    assert first.replaces not in {trial.number for trial in population(again, 8).living}


def test_what_fails_or_comes_to_no_number_is_replaced(tmp_path: Path) -> None:
    results = founded(tmp_path)
    for number, measure in enumerate((1.0, math.nan, 2.0)):
        stand(results, number, 10, measure)
    results.add(3, status="failed", why="out of memory")
    forks = [fork for fork, _ in population(results).forks()]
    assert {fork.replaces for fork in forks} == {1, 3}
    assert {fork.parent for fork in forks} == {0}


def test_a_population_that_has_failed_as_a_whole_is_over(tmp_path: Path) -> None:
    results = founded(tmp_path, 2)
    for number in range(2):
        results.add(number, status="failed")
    one = population(results, 2)
    assert not list(one.forks())
    assert one.next(()) is None


def test_changed_values_stay_in_the_space_and_the_job_takes_them(tmp_path: Path) -> None:
    results = founded(tmp_path, 8)
    space = Sweep(space=POPULATION).space  # type: ignore[arg-type] # read as from a file
    seen = set()
    for generation in (10, 20):
        one = population(results, 8, lambda point: point["micro_batch"] == 4)
        for trial in one.living:
            stand(results, trial.number, generation, float(trial.number))
        for fork, point in one.forks():
            assert all(space[path].may_be(value) for path, value in point.items())
            assert point["micro_batch"] != 4
            seen.add(point["settings.learning_rate"])
            new = max(results.trials) + 1
            donor = results.trials[fork.parent].last
            results.add(new, point=point, status="running", fork=fork, measured=donor)
    assert len(seen) >= 3
    assert 1e-3 not in seen


def test_the_last_generation_has_no_forks(tmp_path: Path) -> None:
    results = founded(tmp_path, 4)
    for number in range(4):
        stand(results, number, 30, 1.0)
    assert not list(population(results).forks())
    assert population(results).next(()) is None


# ---- rungs of several objectives


def test_of_several_objectives_those_that_nobody_beats_go_on() -> None:
    rungs = Rungs(10, 4)
    front = [(float(n), float(8 - n)) for n in range(8)]
    assert all(rungs.goes_on(f"f{n}", 10, one) for n, one in enumerate(front))
    assert not rungs.goes_on("worse", 12, (9.0, 9.0))  # eight are before it, of nine
    assert not rungs.goes_on("near", 10, (4.0, 4.5))
    assert rungs.goes_on("best", 10, (-1.0, -1.0))
    assert rungs.goes_on("early", 9, (99.0, 99.0))
    assert rungs.goes_on("f0", 39, (99.0, 99.0))  # it has come through
    assert rungs.goes_on("f0", 40, (1.0, 1.0))
    assert not rungs.goes_on("f1", 41, (2.0, 1.0))


# ---- rungs on the way to a target


def raced(rungs: SpentRungs, trial: str, seconds: float, losses: list[float]) -> int:
    """How many looks a trial has come to, one each so many seconds."""
    for look, loss in enumerate(losses, start=1):
        if not rungs.goes_on(trial, look * seconds, loss, graced=look > 1):
            return look
    return len(losses)


def test_to_a_target_who_is_quicker_goes_on_though_it_learns_less_a_sample() -> None:
    rungs = SpentRungs(4)
    slow, quick = [3.0 - 0.1 * n for n in range(9)], [3.05 - 0.1 * n for n in range(9)]
    assert raced(rungs, "slow", 8.0, slow) == 9
    assert raced(rungs, "quick", 2.0, quick) == 9
    assert raced(rungs, "slow too", 8.0, slow) == 2  # its first look is for its grace
    assert raced(rungs, "quicker", 1.0, quick) == 9


def test_who_has_come_through_a_rung_is_asked_again_at_the_next() -> None:
    rungs = SpentRungs(2)
    assert rungs.goes_on("a", 4.0, 1.0, graced=True)
    assert rungs.goes_on("a", 5.0, 9.0, graced=True)
    assert rungs.goes_on("b", 8.5, 1.0, graced=True)
    assert not rungs.goes_on("a", 12.0, 9.0, graced=True)


def test_a_sweep_says_what_its_target_is_to_take_the_least_of() -> None:
    assert swept(target=1.0, minimize=["seconds"]).spends == "seconds"
    assert swept(target=1.0, minimize=["seconds", "bytes"]).spends is None
    assert swept(target=1.0).spends is None
    assert swept(minimize=["seconds"]).spends is None
