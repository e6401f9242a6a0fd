"""Contract: settings that a constructor does not take or lacks; global generators are seeded."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycloud.errors import SpecError
from raycloud.on_ray.attach import hash_seeded
from raycloud.on_ray.tasks import code_of, resolve
from raycloud.spec import Job
from raycloud.step.contract import check_settings, construct
from raycloud.worker.dataset import task_splits
from tests.lockstep import NetTask, job


class Needy(NetTask):
    def __init__(self, *, rows: int, width: int = 3, **_: Any) -> None:
        super().__init__()


class Strict(NetTask):
    def __init__(self, *, samples: int = 4) -> None:
        super().__init__(samples=samples)


class Plain(NetTask):
    def __init__(self) -> None:
        super().__init__()


def asked(**settings: Any) -> Job:
    return Job(task="m:T", steps=1, settings=settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message", "hint"),
    [
        (
            Strict,
            {"sample": 3},
            r"settings.sample = 3: Strict.__init__ has none",
            "did you mean samples",
        ),
        (Strict, {"zebra": 3}, r"settings.zebra = 3", "it takes samples"),
        (Plain, {"samples": 3}, r"settings.samples = 3", "it takes none"),
        (Needy, {"width": 3}, r"settings.rows = \(not set\): Needy.__init__ needs it", "--set"),
    ],
)
def test_refused(kind: type, settings: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        check_settings(kind, asked(**settings))
    assert hint in caught.value.hint


def test_taken() -> None:
    check_settings(Strict, asked())
    check_settings(Strict, asked(samples=3))
    check_settings(Needy, asked(rows=1, anything=2))


DRAWS = """
import random
import numpy, torch
from raycloud import Splits, Task
{top}

class Draws(Task):
    def model(self): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...
    def data(self, path):
        xs = list(range(20))
        random.shuffle(xs)
        return Splits(train=[xs, numpy.random.permutation(20), torch.randperm(20)])
"""


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        yield
        sys.modules.pop("draws", None)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def drawn(kind: Any, asked_for: Job) -> str:
    """What `Task.data` draws, in a process that has drawn who knows what before."""
    random.seed()
    np.random.seed()
    torch.default_generator.seed()
    train: Any = task_splits(construct(kind, asked_for), asked_for).train
    return str([np.asarray(some).tolist() for some in train])


class Drawing(NetTask):
    def data(self, path: str | None) -> Any:
        from raycloud import Splits

        xs = list(range(20))
        random.shuffle(xs)
        return Splits(train=[xs, np.random.permutation(20), torch.randperm(20)])


def test_the_same_in_every_worker() -> None:
    one = job(task=Drawing)
    assert drawn(Drawing, one) == drawn(Drawing, one)
    assert drawn(Drawing, one) != drawn(Drawing, job(task=Drawing, seed=4))


@pytest.mark.parametrize("top", ["", "numpy.random.rand(3), random.random(), torch.rand(2)"])
def test_the_same_whether_its_file_is_imported_just_then(tmp_path: Path, top: str) -> None:
    (tmp_path / "draws.py").write_text(DRAWS.format(top=top))
    one = Job(task=f"{tmp_path}/draws.py:Draws", steps=1, seed=3)
    code = code_of(one, resolve(one))
    del sys.modules["draws"]
    here = [drawn(code, one), drawn(code, one)]
    del sys.modules["draws"]
    assert {*here, drawn(pickle.loads(pickle.dumps(code)), one)} == {here[0]}


def test_a_seed_that_its_file_sets_holds(tmp_path: Path) -> None:
    seeds = "random.seed(1), numpy.random.seed(1), torch.manual_seed(1)"
    (tmp_path / "draws.py").write_text(DRAWS.format(top=seeds))
    asked_for = [Job(task=f"{tmp_path}/draws.py:Draws", steps=1, seed=seed) for seed in (0, 1)]
    found = []
    for one in asked_for:
        code = code_of(one, resolve(one))
        del sys.modules["draws"]
        found.append(drawn(code, one))
    assert found[0] == found[1]


def test_strings_are_hashed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert hash_seeded() == {"runtime_env": {"env_vars": {"PYTHONHASHSEED": "0"}}}
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_seeded() == {}
    assert hash_seeded(always=True)["runtime_env"]["env_vars"] == {"PYTHONHASHSEED": "7"}
