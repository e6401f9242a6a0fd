"""From the name of a task to its class, and to the code of it that goes to workers."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import secrets
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycloud.errors import TaskError
from raycloud.packing.code import ModuleSource, TaskCode, importing
from raycloud.task import Task

if TYPE_CHECKING:
    from types import ModuleType

    from raycloud.spec import Job

_DIGEST_BYTES = 16
_HINT = "`task` names it: correct the file, and have installed what it imports"
_WITHIN = re.compile(rb"^[ \t]+(?:import|from)[ \t]", re.MULTILINE)  # what is loaded later


def resolve(job: Job) -> type[Task]:
    """The class that `job.task` names.

    Raises:
        TaskError: Its file or module cannot be imported, or has no such task.
    """
    if isinstance(job.task, type):
        return _checked(job.task, job.task.__qualname__)
    where, _, name = str(job.task).rpartition(":")
    hint = "name a file (`path/to/file.py:Class`) or an installed module"
    with _defaults_kept():
        if where.endswith(".py"):
            module = _from_file(Path(where))
        else:
            with importing(where, [where], hint=hint):
                module = importlib.import_module(where)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        tasks = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task)]
        raise TaskError(
            f"task = {job.task!r}: {where} has no {name!r}",
            hint=f"it has: {', '.join(sorted(set(tasks) - {'Task'})) or 'no task at all'}",
        )
    return _checked(found, str(job.task))


def code_of(job: Job, kind: type[Task]) -> TaskCode:
    """What goes to workers of the task: its sources, as they are now.

    A class that the caller has made or given goes as it is, with what was set on it; its module is
    imported before. A node needs raycloud and the task's libraries installed, not the user's files.

    Raises:
        TaskError: The class has to go as it is, and holds what cannot.
    """
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    name = "" if module is None or module.__name__ == "__main__" else module.__name__
    own = _Own(module) if module is not None and file and name and _is_own(name, file) else None
    sources = [] if own is None else own.sources()
    as_it_is = isinstance(job.task, type) or "<locals>" in kind.__qualname__ or not name
    return TaskCode(
        module=name,
        qualname=kind.__qualname__,
        sources=tuple(sources),
        folder="" if own is None else str(own.folder),
        pickled=_pickled(kind, [one.name for one in sources]) if as_it_is else None,
        digest=_digest(kind, sources, file),
    )


def _pickled(kind: type[Task], modules: list[str]) -> bytes:
    import ray

    by_value = [sys.modules[name] for name in modules if name in sys.modules]
    for module in by_value:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        pickled: bytes = ray.cloudpickle.dumps(kind)
    except Exception as error:
        raise TaskError(
            f"the task {kind.__qualname__} cannot be sent to workers: {error}",
            hint="name it in the job as `path/to/file.py:Class`: then workers import that file; or "
            "make locks, connections and the like inside of methods, or import them there",
        ) from error
    finally:
        for module in by_value:
            ray.cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _digest(kind: type[Task], sources: list[ModuleSource], file: str | None) -> str:
    """Of the files that the task is made of; another each time if it is in none."""
    total = blake2b(kind.__qualname__.encode(), digest_size=_DIGEST_BYTES)
    texts = {one.name: one.source for one in sources}
    if not texts:
        if file is None or not Path(file).is_file():
            return secrets.token_hex(_DIGEST_BYTES)
        texts = {kind.__module__: Path(file).read_bytes()}
    for name, text in sorted(texts.items()):
        for part in (name.encode(), text):
            total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


class _Own:
    """The user's modules: those below one folder, loaded by now or imported by one that is."""

    def __init__(self, module: ModuleType) -> None:
        name, file = module.__name__, Path(str(module.__file__))
        above = name.count(".") + (file.name == "__init__.py")
        self.folder = Path(*file.parts[: len(file.parts) - 1 - above])
        self._found: dict[str, ModuleSource] = {}

    def sources(self) -> list[ModuleSource]:
        roots = (f"{self.folder}/", f"{self.folder.resolve()}/")
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and file.startswith(roots):
                self._add(name, Path(file))
        for one in list(self._found.values()):
            if _WITHIN.search(one.source):
                self._follow(one)
        for name in list(self._found):  # a folder without __init__.py is a package too
            self._add_above(name)
        return list(self._found.values())

    def _add(self, name: str, file: Path) -> ModuleSource | None:
        if name in self._found or not _is_own(name, str(file)) or not file.is_file():
            return None
        package = file.name == "__init__.py"
        one = ModuleSource(name=name, path=str(file), source=file.read_bytes(), package=package)
        self._found[name] = one
        return one

    def _follow(self, one: ModuleSource) -> None:
        """What it imports, be it inside of a function, and is not loaded yet."""
        for name in _imported(one):
            if name in sys.modules or name.partition(".")[0] in sys.stdlib_module_names:
                continue
            place = self.folder.joinpath(*name.split("."))
            added = self._add(name, place / "__init__.py") or self._add(
                name, place.with_suffix(".py")
            )
            if added is not None:
                self._follow(added)

    def _add_above(self, name: str) -> None:
        parts = name.split(".")[:-1]
        for count in range(1, len(parts) + 1):
            above, file = ".".join(parts[:count]), self.folder.joinpath(*parts[:count])
            if self._add(above, file / "__init__.py") is None and above not in self._found:
                self._found[above] = ModuleSource(
                    name=above, path=str(file / "__init__.py"), source=b"", package=True
                )


def _imported(one: ModuleSource) -> Iterator[str]:
    """Names of modules that a module's code imports, or may."""
    try:
        tree = ast.parse(one.source)
    except (SyntaxError, ValueError):  # it is told where it is imported
        return
    within = one.name if one.package else one.name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = within.split(".")[: len(within.split(".")) - node.level + 1]
            names = [*(base if node.level else []), *([node.module] if node.module else [])]
            name = ".".join(filter(None, names))
            yield from ([name] if name else [])
            yield from (f"{name}.{alias.name}".lstrip(".") for alias in node.names)


@cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(f"{paths[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _is_own(name: str, file: str) -> bool:
    return (
        file.endswith(".py")
        and not file.startswith(_installed())
        and not {"site-packages", "dist-packages", ".venv"}.intersection(Path(file).parts)
        and name.partition(".")[0] not in {"raycloud", "__main__", "__mp_main__"}
    )


@contextlib.contextmanager
def _defaults_kept() -> Iterator[None]:
    """What a task's file sets for all of torch is for its workers: here it only is looked at."""
    torch = sys.modules.get("torch")
    dtype = None if torch is None else torch.get_default_dtype()
    try:
        yield
    finally:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_default_dtype(torch.float32 if dtype is None else dtype)


def _from_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    if not resolved.is_file():
        raise TaskError(f"task: the file {str(path)!r} is not there", hint="check `task`")
    name, folder = _name_of(resolved)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(resolved):
        return known
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))  # modules beside it
    if "." in name:
        with importing(path.name, [str(path)], hint=_HINT):
            return importlib.import_module(name)
    if known is not None:  # a library of the same name is loaded: keep both
        name = f"raycloud_task_{name}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise TaskError(f"task: {str(path)!r} is no Python file", hint="check `task`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with importing(path.name, [str(path)], hint=_HINT):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _name_of(file: Path) -> tuple[str, Path]:
    """What a task's file is called as a module, and the folder that this is looked for in.

    A file that imports relatively is part of a package.
    """
    parts, folder = [file.stem.replace(".", "_")], file.parent
    if _imports_relatively(file):
        while (folder / "__init__.py").is_file():
            parts.insert(0, folder.name)
            folder = folder.parent
    return ".".join(parts), folder


def _imports_relatively(file: Path) -> bool:
    try:
        nodes = ast.walk(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError):  # importing it says so
        return False
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in nodes)


def _checked(kind: object, name: str) -> type[Task]:
    if not isinstance(kind, type) or not issubclass(kind, Task):
        raise TaskError(f"task = {name!r} is no raycloud.Task", hint="subclass raycloud.Task")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise TaskError(
            f"task = {name!r} does not define {', '.join(missing)}",
            hint="model, data, loss and optimizer are needed",
        )
    return kind
