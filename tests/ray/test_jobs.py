"""The jobs of this repository on real data, through the whole of raycloud."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raycloud
from raycloud import Run, Splits, Task
from raycloud.on_ray.tasks import resolve
from tests.live import ROOT, exact_steps

CPUS = 2
DATA = ROOT.parent / "shared/data"
IMAGES = DATA / "images"
CLICKS = DATA / "clicks/online_shoppers_intention.csv"
LABEL = "MadePurchase"

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]


def there(path: Path) -> pytest.MarkDecorator:
    name = f"../{path.relative_to(ROOT.parent)}"
    return pytest.mark.skipif(not path.exists(), reason=f"real data is absent: {name}")


def trained(name: str, folder: Path, **changes: Any) -> Run:
    """A run of `jobs/<name>.yaml`, cached below `folder`; `__` in a field's name is a dot."""
    overrides = [f"{field.replace('__', '.')}={value}" for field, value in changes.items()]
    job = raycloud.load_job(
        ROOT / f"jobs/{name}.yaml", overrides=[*overrides, f"data.cache.path={folder / 'cache'}"]
    )
    run = raycloud.train(job, run_dir=folder / "run")
    assert run.status == "finished"
    assert exact_steps(run.directory) == run.summary["steps"]
    return run


@pytest.mark.full
def test_gpt_on_a_text_of_ones_own(tmp_path: Path) -> None:
    """On its own tests/ray/test_cli_real.py trains it, and tests/ray/test_sweep.py down to 4.9."""
    file = tmp_path / "book.txt"
    file.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(5000)))
    run = trained("gpt", tmp_path, steps=20, data__path=file, evaluate__max_samples=64)
    assert 0 < run.metrics["loss"] < 3  # nats per byte; a guess is 5.5


@pytest.mark.full(only="the job of CIFAR-10 learns")
@there(IMAGES)
def test_cifar_starts_to_learn(tmp_path: Path) -> None:
    """A file of each kind is enough."""
    files = IMAGES / "cifar10-*-0.parquet"
    run = trained(
        "cifar", tmp_path, data__path=files, epochs="null", steps=60, evaluate__max_samples=1000
    )
    assert run.metrics["accuracy"] > 0.15  # a guess is 0.1
    assert run.metrics["loss"] < 2.4


@pytest.mark.full(only="the job of BERT learns what is made up")
def test_bert_learns_what_is_made_up(tmp_path: Path) -> None:
    """A guess is right in 0.25 of the cases.

    By tests/unit/test_jobs_models.py this one, ResNet and both together learn a batch.
    """
    run = trained("bert", tmp_path)
    assert run.metrics["accuracy"] > 0.6


@pytest.mark.full(only="the job of clicks ranks as boosted trees do")
@there(CLICKS)
def test_clicks_ranks_buyers_as_well_as_boosted_trees(tmp_path: Path) -> None:
    run = trained("clicks", tmp_path, data__path=CLICKS)
    job = raycloud.load_job(run.directory / "job.yaml")
    reference = boosted_trees(resolve(job)(**job.settings))
    assert 0.9 < reference < 0.97
    assert run.metrics["auc"] >= reference - 0.02
    rows = trained("clicks", tmp_path / "rows", data__path=CLICKS, settings__rows="true", servers=1)
    assert rows.metrics["auc"] >= reference - 0.02


@pytest.mark.full
def test_recommend_finds_what_was_planted(tmp_path: Path) -> None:
    """At least 0.8 of the way from biases alone to the true probabilities."""
    run = trained("recommend", tmp_path)
    job = raycloud.load_job(run.directory / "job.yaml")
    task = resolve(job)(**job.settings)
    biases, truth = biases_and_truth(task.data(None))
    assert 0.6 < biases < truth - 0.1 < 0.9
    assert run.metrics["auc"] >= biases + 0.8 * (truth - biases)


def biases_and_truth(splits: Splits) -> tuple[float, float]:
    """The AUC of logistic regression on users, items and hours, and of the true probabilities."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import OneHotEncoder

    def columns(split: Any) -> tuple[np.ndarray, np.ndarray]:
        table = split.dataset
        given = [table[name].to_numpy() for name in ("user", "item", "hour")]
        return np.stack([one.astype(np.int64) for one in given], 1), table["clicked"].to_numpy()

    (x, y), (x_test, y_test) = columns(splits.train), columns(splits.held_out)
    encoder = OneHotEncoder(handle_unknown="ignore").fit(x)
    model = LogisticRegression(max_iter=200).fit(encoder.transform(x), y)
    guessed = model.decision_function(encoder.transform(x_test))
    known: Any = splits.held_out
    truth = known.dataset["probability"].to_numpy()
    return float(roc_auc_score(y_test, guessed)), float(roc_auc_score(y_test, truth))


def boosted_trees(task: Task) -> float:
    """The AUC that scikit-learn's histogram gradient boosting reaches on the same split."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import roc_auc_score

    clicks, splits = sys.modules[type(task).__module__], task.data(str(CLICKS))

    def columns(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        numbers = [table[name].cast("float64").to_numpy() for name in clicks.NUMBERS]
        codes = [
            [known.index(value) for value in table[name].to_pylist()]
            for name, known in clicks.CATEGORIES.items()
        ]
        bought = [value == "TRUE" for value in table[LABEL].to_pylist()]
        return np.array([*numbers, *codes]).T, np.array(bought)

    (x, y), (x_test, y_test) = columns(splits.train.dataset), columns(splits.held_out.dataset)
    assert len(y_test) == round(0.2 * (len(y) + len(y_test)))
    assert y_test.mean() == pytest.approx(y.mean(), abs=1 / len(y_test))
    categories = list(range(len(clicks.NUMBERS), x.shape[1]))
    model = HistGradientBoostingClassifier(categorical_features=categories, random_state=0)
    return float(roc_auc_score(y_test, model.fit(x, y).predict_proba(x_test)[:, 1]))
