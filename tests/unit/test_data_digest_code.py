"""The digest of code: what changes it, and what does not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raycloud.data.digest import code_digest

TASK = '''
"""A task."""
import functools
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import numpy as np

from raycloud.rows import Rows
from raycloud.task import Task

MEAN = (0.5, 0.25)
WORDS = frozenset({"a", "b", "c", "d"})
TABLE = {"x": [1, 2], "y": {"z": 3.0}}
UNUSED = 1


class Mode(Enum):
    FAST = 1
    SLOW = 2


@dataclass(frozen=True)
class Crop:
    size: int = 4

    def __call__(self, x):
        return x[: self.size]


def wrapped(function):
    @functools.wraps(function)
    def outer(*args):
        return function(*args)

    return outer


@wrapped
def helper(x):
    """Of a helper."""
    return deeper(x) + MEAN[0]


@functools.lru_cache
def deeper(x):
    with around():
        return x * 2


@contextmanager
def around():
    yield 0


def other(x):
    return x * 3


class Base(Task):
    def preprocess(self, rows):
        return {"w": rows["w"], "inherited": np.zeros(len(rows))}

    def scale(self):
        return self.factor

    model = data = loss = optimizer = None


class Mine(Base):
    def __init__(self, factor=2, width=8, crop=4):
        self.factor = factor
        self.width = width
        self.crop = Crop(crop)
        self.table = np.arange(3)
        self.mode = Mode.FAST
        self.again = self

    @property
    def half(self):
        return self.factor / 2

    def preprocess(self, rows):
        """Of preprocess."""
        rows = super().preprocess(rows)
        inner = [word for word in rows["w"] if word in WORDS and TABLE["y"]]
        x = helper(self.crop(inner))
        return {"x": x * self.scale() * self.half, "t": self.table, "m": self.mode}

    def model(self):
        return self.width

    def loss(self, model, batch):
        return 1
'''


def load(path: Path) -> Any:
    """The task of a file, as a module that nobody else has."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    module.Mine.__abstractmethods__ = frozenset()
    return module


@pytest.fixture
def digest(tmp_path: Path) -> Callable[..., str]:
    """The digest of a task's source, with settings."""
    number = 0

    def of(source: str, **settings: Any) -> str:
        nonlocal number
        number += 1
        path = tmp_path / f"task_{number}_for_digests.py"
        path.write_text(source)
        return code_digest(load(path).Mine(**settings))

    return of


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("inner))", "inner[1:]))", id="preprocess"),
        pytest.param('{"x": x *', '{"X": x *', id="a constant in it"),
        pytest.param("return x * 2", "return x * 4", id="a helper's helper"),
        pytest.param("yield 0", "yield 1", id="what a library has decorated"),
        pytest.param("(0.5, 0.25)", "(0.5, 0.5)", id="a constant of the module"),
        pytest.param('"c", "d"}', '"c", "e"}', id="a set of the module"),
        pytest.param('{"z": 3.0}', '{"z": 4.0}', id="deep in a dict"),
        pytest.param("function(*args)", "function(*args, 1)", id="a decorator"),
        pytest.param("return self.factor\n", "return -self.factor\n", id="a method it calls"),
        pytest.param("self.factor / 2", "self.factor / 3", id="a property it reads"),
        pytest.param("factor=2", "factor=3", id="an attribute that a method reads"),
        pytest.param("np.arange(3)", "np.arange(4)", id="an array"),
        pytest.param("np.arange(3)", "np.arange(3.0)", id="an array's type"),
        pytest.param("Mode.FAST\n", "Mode.SLOW\n", id="an enum"),
        pytest.param("x[: self.size]", "x[self.size :]", id="the class of an attribute"),
        pytest.param("crop=4", "crop=5", id="an attribute of an attribute"),
        pytest.param("np.zeros", "np.ones", id="the preprocess it extends"),
        pytest.param("word in WORDS", "word not in WORDS", id="inside a comprehension"),
    ],
)
def test_what_changes_the_digest_of_code(
    digest: Callable[..., str], before: str, after: str
) -> None:
    assert TASK.count(before) == 1
    assert digest(TASK.replace(before, after)) != digest(TASK)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param('"""A task."""', '"""A task."""\n\n\n', id="lines"),
        pytest.param("Of preprocess.", "Of it.", id="its docstring"),
        pytest.param("Of a helper.", "Of it.", id="a helper's docstring"),
        pytest.param("rows = super", "# why\n        rows = super", id="a comment"),
        pytest.param("UNUSED = 1", "UNUSED = 2", id="another constant"),
        pytest.param("x * 3", "x * 5", id="another function"),
        pytest.param("return self.width", "return self.width + 1", id="another method"),
        pytest.param("return 1\n", "return 2\n", id="the loss"),
        pytest.param("width=8", "width=9", id="another attribute"),
    ],
)
def test_what_does_not_change_the_digest_of_code(
    digest: Callable[..., str], before: str, after: str
) -> None:
    assert before == "" or TASK.count(before) == 1
    assert digest(TASK.replace(before, after) if before else TASK) == digest(TASK)


def test_settings_count_where_they_are_read(digest: Callable[..., str]) -> None:
    assert digest(TASK, width=100) == digest(TASK)
    assert digest(TASK, factor=100) != digest(TASK)
    assert digest(TASK, crop=100) != digest(TASK)


def test_the_digest_of_code_is_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "task_in_processes.py"
    path.write_text(TASK)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import task_in_processes as module\n"
        "from raycloud.data.digest import code_digest\n"
        "module.Mine.__abstractmethods__ = frozenset()\n"
        "print(code_digest(module.Mine()))"
    )
    found = {code_digest(load(path).Mine())}
    for seed in ("0", "1", "random"):  # the second and third time from a .pyc
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        found.add(result.stdout.strip())
    assert len(found) == 1
