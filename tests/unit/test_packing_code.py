"""A task's code in another process: imported there as here, though no file of it is there."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.errors import TaskError
from raycloud.on_ray.tasks import code_of, resolve
from raycloud.packing.code import TaskCode
from raycloud.spec import Job
from raycloud.task import Task

TASK = """
import threading
from raycloud import Task
{top}

class Shipped(Task):
    width = 1

    def model(self): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...
    def data(self, path):
        {data}
"""
ELSEWHERE = """
import pickle, sys
config = pickle.load(sys.stdin.buffer)
kind = config["code"].load()
print(eval(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        known = set(sys.modules)
        yield
        for name in set(sys.modules) - known:
            if name.partition(".")[0] in {"shipped", "beside", "later", "parts", "above"}:
                del sys.modules[name]


def written(folder: Path, *, top: str = "", data: str = "return None") -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shipped.py").write_text(TASK.format(top=top, data=data))
    return Job(task=f"{folder}/shipped.py:Shipped", steps=1)


def code(job: Job) -> TaskCode:
    return code_of(job, resolve(job))


def elsewhere(config: Any, expression: str, *, says: str = "") -> str:
    """What an expression about `kind` is in a process of its own; `says`: the error there."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, expression],
        input=pickle.dumps(config),
        capture_output=True,
        cwd="/",
        check=False,
    )
    error = done.stderr.decode()
    assert says in error if says else done.returncode == 0, error
    return done.stdout.decode().strip()


def sent(folder: Path, job: Job, expression: str, *, says: str = "") -> str:
    """The same of a job whose files are gone by then."""
    config = {"code": code(job)}
    shutil.rmtree(folder)
    return elsewhere(config, expression, says=says)


def test_what_its_file_does_when_it_is_imported(tmp_path: Path) -> None:
    here = tmp_path / "here"
    job = written(here, top="import os\nos.environ['SHIPPED'] = 'yes'\nguard = threading.Lock()")
    assert sent(here, job, "__import__('os').environ['SHIPPED']") == "yes"


@pytest.mark.parametrize(
    ("top", "data"),
    [
        ("import beside", "return beside.name"),
        ("from beside import name", "return name"),
        ("", "import later; return later.name"),
        ("import parts.first", "return parts.first.name"),
        ("", "from parts import first; return first.name"),
        ("", "from above.below import inner; return inner.name"),
    ],
    ids=["a module", "a name", "inside of a method", "a package", "of a package", "no __init__"],
)
def test_modules_beside_it(tmp_path: Path, top: str, data: str) -> None:
    here = tmp_path / "here"
    job = written(here, top=top, data=data)
    (here / "beside.py").write_text("name = 'found'")
    (here / "later.py").write_text("def f():\n    import beside\nfrom beside import name")
    (here / "parts").mkdir()
    (here / "parts" / "__init__.py").write_text("")
    (here / "parts" / "first.py").write_text("from .second import name")
    (here / "parts" / "second.py").write_text("name = 'found'")
    (here / "above" / "below").mkdir(parents=True)
    (here / "above" / "below" / "inner.py").write_text("from beside import name")
    assert sent(here, job, "kind().data(None)") == "found"


def test_a_file_of_a_package(tmp_path: Path) -> None:
    here = tmp_path / "parts"
    job = written(here, top="from .second import name", data="return name, __name__")
    (here / "__init__.py").write_text("")
    (here / "second.py").write_text("name = 'found'")
    assert sent(here, job, "kind().data(None)") == "('found', 'parts.shipped')"


def test_a_module_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "parts"
    written(here, top="import beside", data="return beside.name")
    (here / "__init__.py").write_text("")
    (tmp_path / "beside.py").write_text("name = 'found'")
    monkeypatch.syspath_prepend(str(tmp_path))
    job = Job(task="parts.shipped:Shipped", steps=1)
    assert sent(tmp_path, job, "kind().data(None)") == "found"


def test_an_installed_one_stays_where_it_is() -> None:
    job = Job(task="tests.lockstep:NetTask", steps=1)
    assert any(one.name == "tests.lockstep" for one in code(job).sources)
    installed = code_of(job, type("Installed", (Task,), {"__module__": "torch.nn"}))
    assert installed.sources == ()
    assert installed.module == "torch.nn"


def test_where_it_says_it_is(tmp_path: Path) -> None:
    here = tmp_path / "here"
    job = written(here, data="import inspect; return __file__, inspect.getsource(type(self))[:5]")
    assert sent(here, job, "kind().data(None)") == str((f"{here}/shipped.py", "class"))


def test_a_class_goes_as_it_is_and_its_module_is_imported(tmp_path: Path) -> None:
    here = tmp_path / "here"
    kind: Any = resolve(written(here, top="import os\nos.environ['SHIPPED'] = 'yes'"))
    kind.width = 7
    job = Job(task=kind, steps=1)
    seen = "kind.width, __import__('os').environ['SHIPPED']"
    assert sent(here, job, seen) == "(7, 'yes')"
    assert code(job).named_in(job).task == "shipped:Shipped"


def test_what_comes_behind_it_may_be_of_its_modules(tmp_path: Path) -> None:
    here = tmp_path / "here"
    job = written(here, top="class Width:\n    many = 3")
    config = {"code": code(job), "settings": sys.modules["shipped"].Width()}
    shutil.rmtree(here)
    assert elsewhere(config, "config['settings'].many") == "3"


def test_what_is_missing_there_is_told(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "parts.py").write_text("")
    sys.path.insert(0, str(tmp_path / "absent"))
    job = written(here, top="import parts")
    says = "importing shipped.py in a worker raised ModuleNotFoundError: No module named 'parts'"
    sent(here, job, "kind", says=says)


def test_another_file_of_the_same_name(tmp_path: Path) -> None:
    codes = []
    for name in ("a", "b"):
        here = tmp_path / name
        here.mkdir()
        (here / "beside.py").write_text(f"name = '{name}'")
        codes.append(code(written(here, top="import beside", data="return beside.name")))
        del sys.modules["shipped"], sys.modules["beside"]
        sys.path.remove(str(here))
        shutil.rmtree(here)
    names = ("code", "other", "code")
    seen = ", ".join(f"config['{name}'].load()().data(None)" for name in names)
    assert elsewhere({"code": codes[0], "other": codes[1]}, seen) == "('a', 'b', 'a')"


def test_its_digest_is_that_of_all_its_files(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "beside.py").write_text("name = 1")
    job = written(here, top="import beside")
    first = code(job).digest
    assert code(job).digest == first
    (here / "beside.py").write_text("name = 2")
    assert code(job).digest != first


READS_ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", {required})
args = parser.parse_args()
"""


def test_a_command_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["raycloud", "train", "job.yaml", "--lr", "0.5"])
    top = READS_ARGUMENTS.format(required="default='none was given'")
    here = tmp_path / "here"
    job = written(here, top=top, data="return args.lr")
    assert resolve(job)().data(None) == "none was given"
    assert sys.argv[0] == "raycloud"
    assert sent(here, job, "kind().data(None)") == "none was given"


@pytest.mark.parametrize(
    "top", [READS_ARGUMENTS.format(required="required=True"), "import sys\nsys.exit(3)"]
)
def test_a_file_that_ends_the_process(tmp_path: Path, top: str) -> None:
    with pytest.raises(TaskError, match=r"importing shipped.py ended the process \(it read") as e:
        resolve(written(tmp_path / "here", top=top))
    assert "below `if __name__ == '__main__':`" in str(e.value.hint)


def test_ctrl_c_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        resolve(written(tmp_path / "here", top="raise KeyboardInterrupt"))


def test_what_it_sets_for_torch_is_not_set_here(tmp_path: Path) -> None:
    resolve(written(tmp_path, top="import torch\ntorch.set_default_dtype(torch.float64)"))
    assert torch.get_default_dtype() is torch.float32
