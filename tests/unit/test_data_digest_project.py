"""The digest of code that lies in several modules: the project's own, and what is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raycloud.data.digest import code_digest

HEAD = "from raycloud.task import Task\n"
TASK = "class Mine(Task):\n    def preprocess(self, rows):\n        {}\n"
NEAR = "def near(x):\n    return x\n\ndef other(x):\n    return 1\n"

Modules = dict[str, str]  # source by dotted name


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """The digest of `here.tasks:Mine`, its packages `here` and `there` in a folder so named."""
    number = 0

    def of(modules: Modules, folder: str = "project") -> str:
        nonlocal number
        number += 1
        root = tmp_path / str(number) / folder
        for name, source in modules.items():
            path = root / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(source)
        forget()
        monkeypatch.syspath_prepend(root)
        mine = importlib.import_module("here.tasks").Mine
        mine.__abstractmethods__ = frozenset()
        first = code_digest(mine())
        assert code_digest(mine()) == first  # whatever the first has imported
        return first

    yield of
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in {"here", "there"}]:
        del sys.modules[name]


def changed(
    modules: Modules, name: str, before: str = "return x", after: str = "return -x"
) -> Modules:
    assert before in modules[name]
    return {**modules, name: modules[name].replace(before, after)}


@pytest.mark.parametrize(
    ("top", "inside"),
    [
        pytest.param("from here.near import near", "return near(rows)", id="a name"),
        pytest.param("import here.near", "return here.near.near(rows)", id="a path"),
        pytest.param("from here import near as n", "return n.near(rows)", id="a module"),
        pytest.param("", "from here.near import near; return near(rows)", id="inside"),
        pytest.param("", "from .near import near; return near(rows)", id="relative"),
    ],
)
def test_another_module_of_the_project_counts(
    digest: Callable[..., str], top: str, inside: str
) -> None:
    modules = {"here.tasks": f"{HEAD}{top}\n{TASK.format(inside)}", "here.near": NEAR}
    assert digest(modules) == digest(modules)
    assert digest(changed(modules, "here.near")) != digest(modules)
    assert digest(changed(modules, "here.near", "return 1", "return 2")) == digest(modules)


def test_what_is_installed_counts_by_name(digest: Callable[..., str]) -> None:
    """But a task that is installed itself, and what lies in its package, counts by its code."""
    modules = {
        "here.tasks": (
            "from here.near import near\nfrom there.far import Far, far\n"
            "class Mine(Far):\n"
            "    def preprocess(self, rows):\n"
            "        return near(far(self.base(rows)))\n"
        ),
        "here.near": NEAR,
        "there.far": (
            f"{HEAD}def far(x):\n    return x\n"
            "class Far(Task):\n    def base(self, x):\n        return x + 1\n"
        ),
    }
    for name in modules:
        assert digest(changed(modules, name, "return ", "return 1 + ")) != digest(modules)
    site = "site-packages"
    assert digest(modules, site) == digest(modules, site)
    for name, counts in (("here.tasks", True), ("here.near", True), ("there.far", False)):
        other = digest(changed(modules, name, "return ", "return 1 + "), site)
        assert (other != digest(modules, site)) == counts, name
    renamed = {name: source.replace("far(", "afar(") for name, source in modules.items()}
    renamed["here.tasks"] = renamed["here.tasks"].replace("Far, far", "Far, afar")
    assert digest(renamed, site) != digest(modules, site)
