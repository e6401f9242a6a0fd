"""Tasks that cannot be taken along, or found, are the task's errors and say what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycloud.errors import TaskError
from raycloud.on_ray.tasks import code_of, resolve
from raycloud.spec import Job

TASK = """
import threading

import torch

from raycloud import Splits, Task

{here}


class Guarded(Task):
    def model(self):
        return torch.nn.Linear(1, 1)

    def data(self, path):
        {there}
        with guard:
            return Splits(train=[])

    def loss(self, model, batch):
        return model(batch).mean()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(autouse=True)
def no_module_is_kept() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        known = set(sys.modules)
        yield
        for name in set(sys.modules) - known:
            if name.startswith("guarded"):
                del sys.modules[name]


def written(folder: Path, name: str, *, here: str = "", there: str = "") -> Job:
    (folder / f"{name}.py").write_text(TASK.format(here=here, there=there))
    return Job(task=f"{folder / name}.py:Guarded", steps=1)


_HOOKED = """
import os, sys, threading
found, register = [], os.register_at_fork

def noted(**hooks):
    if threading.current_thread() is not threading.main_thread():
        found.extend(hooks.keys() & {"before", "after_in_parent"})
    register(**hooks)

os.register_at_fork = noted
from raycloud.on_ray.run import imported
from raycloud.spec import Job

with imported(Job(task=sys.argv[1], steps=1)) as ready:
    ready()
print(found)
"""


def test_what_is_imported_while_ray_forks_takes_no_part_in_it(tmp_path: Path) -> None:
    task = written(tmp_path, "guarded_d", here="from contextlib import nullcontext as guard").task
    told = subprocess.run(
        [sys.executable, "-c", _HOOKED, str(task)], capture_output=True, check=True
    )
    assert told.stdout.decode() == "[]\n"


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    kind = resolve(written(tmp_path, "guarded_a", here="guard = threading.Lock()"))
    job = Job(task=kind, steps=1)
    with pytest.raises(TaskError, match=r"the task Guarded cannot be sent to workers: .*lock") as e:
        code_of(job, kind)
    assert "inside of methods" in str(e.value.hint)


def test_the_hint_helps(tmp_path: Path) -> None:
    job = written(tmp_path, "guarded_b", here="guard = threading.Lock()")
    code_of(job, resolve(job))
    kind = resolve(written(tmp_path, "guarded_d", there="guard = threading.Lock()"))
    code_of(Job(task=kind, steps=1), kind)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:Guarded", r"the file .*nowhere.py' is not there"),
        ("guarded_c.py:Other", r"has no 'Other'"),
        ("guarded_c.py:Splits", r"is no raycloud.Task"),
    ],
)
def test_what_is_no_task_is_named(tmp_path: Path, name: str, says: str) -> None:
    written(tmp_path, "guarded_c")
    with pytest.raises(TaskError, match=says):
        resolve(Job(task=f"{tmp_path}/{name}", steps=1))
