"""The `sweep` section of a job file: what it takes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycloud.errors import SpecError
from raycloud.spec.load import load_job, with_values
from raycloud.spec.sweep import Parameter, dump_sweep, load_sweep, trial_job
from raycloud.spec.yaml_text import write
from raycloud.tuning.search import Grid

JOBS = Path(__file__).parents[2] / "jobs"
GOOD: dict[str, Any] = {
    "space": {
        "global_batch": {"choice": [16, 32]},
        "sync.codec": {"choice": ["none", "int4"]},
        "sync.period": {"choice": [8, 16], "when": {"sync.codec": "int4"}},
        "clip_norm": {"log": [0.1, 10.0]},
    },
    "trials": 8,
}


def file_of(tmp_path: Path, sweep: Any, **job: Any) -> Path:
    (tmp_path / "task.py").touch()
    path = tmp_path / "job.yaml"
    path.write_text(write({"task": "task.py:Task", "steps": 100, **job, "sweep": sweep}))
    return path


def test_a_sweep_is_read_and_read_back(tmp_path: Path) -> None:
    job, sweep = load_sweep(file_of(tmp_path, GOOD), ["global_batch=8", "sweep.trials=3"])
    assert (job.global_batch, sweep.trials) == (8, 3)
    assert sweep.space["clip_norm"].at(0.5) == 1.0
    again = tmp_path / "again.yaml"
    again.write_text(dump_sweep(job, sweep))
    assert load_sweep(again) == (job.resolved(), sweep)


def test_the_job_of_a_sweep_is_a_job(tmp_path: Path) -> None:
    assert load_job(file_of(tmp_path, GOOD)).steps == 100
    job, sweep = load_sweep(JOBS / "gpt_sweep.yaml")
    assert sweep.trials == 16
    assert sweep.space["sync.period"].choice == [16, 8]
    points = [asked[1] for asked in iter(Grid(sweep.space).ask, None)]
    assert len(points) == 16 == sweep.trials
    assert all(trial_job(job, sweep, point) for point in points)
    assert with_values(job, {"sync.codec": "int4", "settings.width": 8}).settings["width"] == 8


def test_values_of_a_range() -> None:
    whole = Parameter(range=[2, 4])
    assert [whole.at(part) for part in (0.0, 0.34, 0.99)] == [2, 3, 4]
    assert Parameter(log=[1, 100]).at(0.5) == 10
    assert Parameter(range=[0.0, 2.0]).at(0.25) == 0.5
    assert whole.may_be(3)
    assert not whole.may_be(5)
    assert not Parameter(choice=[1, 2]).may_be(True)


BAD = [
    ({"space": {}}, "sweep.space", "names with values"),
    ({"space": {"global_bach": {"choice": [8]}}}, "global_bach", "global_batch"),
    ({"space": {"global_batch": {"choice": [10]}}}, "global_batch", "micro"),
    ({"space": {"clip_norm": {"range": [2.0, 1.0]}}}, "sweep.space.clip_norm", "empty"),
    ({"space": {"clip_norm": {"range": [1.0, 1.0]}}}, "sweep.space.clip_norm", "empty"),
    ({"space": {"clip_norm": {"log": [0.0, 1.0]}}}, "sweep.space.clip_norm", "above 0"),
    ({"space": {"clip_norm": {}}}, "sweep.space.clip_norm", "says no values"),
    ({"space": {"seed": {"choice": [1], "range": [1, 2]}}}, "sweep.space.seed", "choice and range"),
    ({"space": {"seed": {"choice": [1, 1]}}}, "sweep.space.seed", "twice"),
    ({"space": {"seed": {"choice": []}}}, "sweep.space.seed.choice", "must be a list"),
    (
        {"space": {"seed": {"choice": [1], "when": {"steps": 5}}}},
        "sweep",
        "seed is varied only for values of steps, which is not",
    ),
    (
        {"space": {"steps": {"choice": [9]}, "seed": {"choice": [1], "when": {"steps": 5}}}},
        "sweep",
        "seed is varied for steps = 5, which it never is",
    ),
    (
        {"space": {"seed": {"choice": [1], "when": {"steps": 5}}, "steps": {"choice": [5]}}},
        "sweep",
        "swap",
    ),
    ({"trials": 0}, "sweep.trials", "at least 1"),
    (
        {"space": {"elastic.min_workers": {"choice": [1, 2]}}},
        "sweep.space.elastic.min_workers",
        "the same for all trials",
    ),
    ({"seconds": 0}, "sweep.seconds", "above 0"),
    ({"searcher": "grid"}, "sweep", "clip_norm is a range"),
    ({"searcher": "nsga2"}, "sweep", "several objectives"),
    ({"searcher": "pbt", "target": 2.0}, "sweep", "best measure at the last step"),
    ({"searcher": "pbt", "minimize": ["seconds"]}, "sweep", "best measure at the last step"),
    ({"searcher": "pbt", "scheduler": "asha"}, "sweep", "does not go together"),
    ({"searcher": "pbt", "trials": 1}, "sweep", "nobody to learn from"),
    ({"searcher": "pbt"}, "evaluate.every_steps", "searcher pbt needs measurements"),
    ({"generation_steps": 5}, "sweep", "generation_steps is of searcher pbt"),
    (
        {"searcher": "pbt", "space": {"seed": {"choice": [1, 2]}}},
        "sweep.space.seed",
        "cannot change while a model trains",
    ),
    ({"searcher": "bayes"}, "sweep.searcher", "random, grid, tpe"),
    ({"scheduler": "median", "minimize": ["seconds", "bytes"]}, "sweep", "several objectives"),
    ({"scheduler": "asha"}, "evaluate.every_steps", "measurements on the way"),
    ({"target": 2.0}, "evaluate.every_steps", "measurements on the way"),
    ({"minimize": ["seconds", "seconds"]}, "sweep", "twice"),
    ({"finalists": 2}, "sweep", "neither seconds nor money decide"),
    ({"finalists": 2, "target": 2.0, "minimize": ["bytes"]}, "sweep", "neither seconds nor money"),
    ({"finalists": 2, "minimize": ["seconds"]}, "sweep", "write a `target`"),
    ({"colour": 1}, "sweep.colour", "no such field"),
]


@pytest.mark.parametrize(("change", "field", "said"), BAD)
def test_bad_spaces_are_refused(change: Any, field: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        load_sweep(file_of(tmp_path, GOOD | change))
    assert refused.value.field == field
    assert said in str(refused.value)


def test_a_job_without_a_sweep_has_none() -> None:
    with pytest.raises(SpecError, match="has no section sweep"):
        load_sweep(JOBS / "gpt.yaml")


def test_the_rate_follows_the_batch_of_a_trial(tmp_path: Path) -> None:
    job, sweep = load_sweep(file_of(tmp_path, GOOD, global_batch=32))
    assert trial_job(job, sweep, {"global_batch": 8}).rate_factor == 0.5
    assert trial_job(job, sweep, {"global_batch": 32}).rate_factor == 1.0
    assert trial_job(job, sweep, {"clip_norm": 1.0}) == with_values(job, {"clip_norm": 1.0})
    linear = sweep.model_copy(update={"rate_scaling": "linear"})
    assert trial_job(job, linear, {"global_batch": 8}).rate_factor == 0.25
    own = with_values(job, {"base_batch": 16, "rate_scaling": "none"})
    assert trial_job(own, sweep, {"global_batch": 8}).rate_factor == 1.0
