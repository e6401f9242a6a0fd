"""From the name of a task to its class, and on to workers on other nodes."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from raycloud.errors import TaskError
from raycloud.task import Task

if TYPE_CHECKING:
    from types import ModuleType

    from raycloud.spec import Job


def resolve(job: Job) -> type[Task]:
    """The class that `job.task` names.

    Raises:
        TaskError: Its file or module cannot be imported, or has no such task.
    """
    if isinstance(job.task, type):
        return _checked(job.task, job.task.__qualname__)
    where, _, name = str(job.task).rpartition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    found = getattr(module, name, None)
    if found is None:
        tasks = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task)]
        raise TaskError(
            f"task = {job.task!r}: {where} has no {name!r}",
            hint=f"it has: {', '.join(sorted(set(tasks) - {'Task'})) or 'no task at all'}",
        )
    return _checked(found, str(job.task))


def by_value(kind: type[Task]) -> None:
    """Let Ray carry the task's source along, with the modules beside it that it imported.

    So a node needs raycloud and the task's libraries installed, not the user's own files.

    Raises:
        TaskError: Something that the task uses cannot be carried.
    """
    _register(kind)
    import ray

    try:
        ray.cloudpickle.dumps(kind)
    except Exception as error:
        raise TaskError(
            f"the task {kind.__qualname__} cannot be sent to workers: {error}",
            hint="it takes along what it uses of its own file and of those beside it: make locks, "
            "connections and the like inside of methods, or import them there",
        ) from error


def code_digest(kind: type[Task]) -> str:
    """A digest of the user's files that the task is made of; another each time if it is in none."""
    module = sys.modules.get(kind.__module__)
    own = {str(other.__file__) for other in _own(kind)} | {str(getattr(module, "__file__", ""))}
    digest = hashlib.sha256(kind.__qualname__.encode())
    for path in sorted(own):
        if not Path(path).is_file():
            return secrets.token_hex(16)
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


def _register(kind: type[Task]) -> None:
    import ray

    for module in _own(kind):
        ray.cloudpickle.register_pickle_by_value(module)


def _own(kind: type[Task]) -> list[ModuleType]:
    """The user's modules that have to travel along."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return []  # a notebook's or a script's classes travel by value anyway
    root = Path(file).resolve().parent
    if "site-packages" in root.parts or module.__name__.partition(".")[0] == "raycloud":
        return []
    return [
        other
        for other in list(sys.modules.values())
        if (path := getattr(other, "__file__", None))
        and Path(path).resolve().is_relative_to(root)
        and _is_own(other)
    ]


def _is_own(module: ModuleType) -> bool:
    path = Path(str(module.__file__)).resolve()
    return (
        path.suffix == ".py"
        and not {"site-packages", ".venv"}.intersection(path.parts)
        and module.__name__ != "__main__"
        and module.__name__.partition(".")[0] != "raycloud"
    )


def _from_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    if not resolved.is_file():
        raise TaskError(f"task: the file {str(path)!r} is not there", hint="check `task`")
    name = resolved.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(resolved):
        return known
    if known is not None:  # a library of the same name is loaded: keep both
        name = f"raycloud_task_{name}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise TaskError(f"task: {str(path)!r} is no Python file", hint="check `task`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(resolved.parent) not in sys.path:
        sys.path.insert(0, str(resolved.parent))  # modules beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(name, None)
        raise TaskError(
            f"task: importing {str(path)!r} raised {type(error).__name__}: {error}"
        ) from error
    return module


def _from_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise TaskError(
            f"task: importing {name!r} raised {type(error).__name__}: {error}",
            hint="name a file (`path/to/file.py:Class`) or an installed module",
        ) from error


def _checked(kind: object, name: str) -> type[Task]:
    if not isinstance(kind, type) or not issubclass(kind, Task):
        raise TaskError(f"task = {name!r} is no raycloud.Task", hint="subclass raycloud.Task")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise TaskError(
            f"task = {name!r} does not define {', '.join(missing)}",
            hint="model, data, loss and optimizer are needed",
        )
    return kind
