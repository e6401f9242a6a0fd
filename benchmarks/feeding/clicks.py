"""`jobs/clicks.yaml` against scikit-learn's histogram gradient boosting, on the same split."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.feeding.contestants import attempt
from benchmarks.feeding.floors import ratio
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.feeding.training import train
from benchmarks.machine import ROOT
from raycloud.on_ray.tasks import resolve
from raycloud.spec import load_job
from raycloud.step.contract import construct

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.task import Task

JOB = ROOT / "jobs" / "clicks.yaml"
LEAST = 0.90

Arrays = tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]


def measure(setting: Setting) -> Outcome:
    """The AUC of both, on the sessions that the task holds out."""
    if setting.clicks is None:
        return Outcome(record={}, text="clicks: no sessions here to measure with", verdicts=[])
    job = load_job(JOB, [f"data.path={setting.clicks}"])
    theirs = boosted_trees(construct(resolve(job), job), str(setting.clicks))
    with attempt() as place:
        done = train(
            place,
            JOB.name,
            [f"data.path={setting.clicks}", f"data.cache.path={place.directory / 'cache'}"],
        )
    ours = done.summary["eval"]["auc"]
    note = f"test AUC {ours:.4f} and {theirs:.4f}"
    return Outcome(
        record={"auc": ours, "boosting_auc": theirs, "summary": done.summary},
        text="",
        verdicts=[
            ratio("clicks.yaml / gradient boosting", [ours], [theirs], at_least=LEAST, note=note)
        ],
    )


def boosted_trees(task: Task, path: str) -> float:
    """The AUC that scikit-learn reaches with its own defaults on the task's own split."""
    # Only this section needs it.
    from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: PLC0415
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415

    splits = task.data(path)
    module = sys.modules[type(task).__module__]
    x, y = _columns(module, splits.train.dataset)
    x_test, y_test = _columns(module, splits.held_out.dataset)
    categories = list(range(len(module.NUMBERS), x.shape[1]))
    model = HistGradientBoostingClassifier(categorical_features=categories, random_state=0)
    return float(roc_auc_score(y_test, model.fit(x, y).predict_proba(x_test)[:, 1]))


def _columns(module: Any, table: pa.Table) -> Arrays:
    """All columns as numbers, and whether the visitor bought."""
    numbers = [table[name].cast("float64").to_numpy() for name in module.NUMBERS]
    codes = [
        [known.index(value) if value in known else len(known) for value in table[name].to_pylist()]
        for name, known in module.CATEGORIES.items()
    ]
    bought = [value == "TRUE" for value in table[module.LABEL].to_pylist()]
    return np.array([*numbers, *codes], np.float64).T, np.array(bought)
