"""A task's code on its way to other processes, which import it as a plain loop does.

The sources of the user's modules travel, not what importing them has made: so each process does
what they do at module level (a default dtype, registrations, warning filters), and a node needs the
task's libraries but none of the user's files. What is unpickled is importable from then on; it is
imported by `TaskCode.load` alone, so that what goes wrong there can be told.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import pickle  # noqa: TID251 - for a class that our own driver sends, through Ray
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from raycloud.errors import RaycloudError, TaskError

if TYPE_CHECKING:
    from types import ModuleType

    from raycloud.spec import Job
    from raycloud.task import Task

_HINT = "every node needs what the task's file imports and reads when it is imported"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSource:
    """One module of the user's: what is in its file, and what `__file__` and tracebacks call it."""

    name: str
    path: str
    source: bytes
    package: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskCode:
    """A task's class and the modules that it is made of. To unpickle it makes those importable.

    Attributes:
        module: The module to import first; empty where the class travels alone (a notebook's).
        sources: The user's modules; none where the task is installed.
        folder: Where the modules were found; where a node has it too, it is looked in as well.
        pickled: The class as it is, where the caller gave one; None: it is the module's.
        digest: Of all files that decide what the class does; another each time if there are none.
    """

    module: str
    qualname: str
    sources: tuple[ModuleSource, ...] = ()
    folder: str = ""
    pickled: bytes | None = None
    digest: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """By value; see `_received`."""
        return _received, (dict(vars(self)),)

    def named_in(self, job: Job) -> Job:
        """The job with the class's name where it has the class itself, which does not travel in it.

        It would be imported where the job is unpickled, where nobody could tell what that raises.
        """
        if not isinstance(job.task, type):
            return job
        return job.model_copy(update={"task": f"{self.module or '__main__'}:{self.qualname}"})

    def load(self) -> type[Task]:
        """The class; its module is imported unless it was before.

        Raises:
            TaskError: That ends the process, or raises.
        """
        _SHIPPED.take(self)
        file = next((one.path for one in self.sources if one.name == self.module), self.module)
        found: Any = None
        with importing(f"{Path(file).name} in a worker", [file], hint=_HINT):
            if self.module:
                found = importlib.import_module(self.module)
            if self.pickled is not None:
                return cast("type[Task]", pickle.loads(self.pickled))
            for name in self.qualname.split("."):
                found = getattr(found, name)
        return cast("type[Task]", found)


@contextlib.contextmanager
def importing(what: str, argv: Sequence[str], *, hint: str) -> Iterator[None]:
    """Import what is the user's: it sees `argv`, and what it raises is the task's fault.

    Raises:
        TaskError: It raised, or wanted to end the process.
    """
    before, sys.argv = sys.argv, list(argv)
    try:
        yield
    except RaycloudError:
        raise
    except SystemExit as error:
        raise TaskError(
            f"importing {what} ended the process (it reads the command line?): SystemExit: {error}",
            hint="move that below `if __name__ == '__main__':`, and take settings as arguments of "
            "the task's __init__: the job's `settings` give them",
        ) from error
    except Exception as error:
        what = f"importing {what} raised {type(error).__name__}: {error}"
        raise TaskError(what, hint=hint) from error
    finally:
        sys.argv = before


class _Shipped(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads the modules of the code that this process was given last."""

    def __init__(self) -> None:
        self._sources: dict[str, ModuleSource] = {}
        self._code = ""
        self._turn = RLock()

    def take(self, code: TaskCode) -> None:
        """Make the modules of `code` importable; of other code's, what is imported is forgotten."""
        with self._turn:
            if not code.sources or self._code == code.digest:
                return
            for name in self._sources:
                if getattr(sys.modules.get(name), "__loader__", None) is self:
                    del sys.modules[name]
            self._sources = {one.name: one for one in code.sources}
            self._code = code.digest
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
            if Path(code.folder).is_dir() and code.folder not in sys.path:
                sys.path.insert(0, code.folder)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        one = self._sources.get(fullname)
        if one is None:
            return None
        spec = ModuleSpec(fullname, self, origin=one.path, is_package=one.package)
        spec.has_location = True
        if one.package:
            spec.submodule_search_locations = [str(Path(one.path).parent)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        one = self._sources[module.__name__]
        code = compile(one.source, one.path, "exec", dont_inherit=True)
        exec(code, module.__dict__)

    def get_source(self, fullname: str) -> str:
        """For tracebacks, `inspect` and compilers, where the file is not there."""
        return importlib.util.decode_source(self._sources[fullname].source)

    def is_package(self, fullname: str) -> bool:
        return self._sources[fullname].package


_SHIPPED = _Shipped()


def _received(fields: dict[str, Any]) -> TaskCode:
    """What has arrived in a process; what comes behind it may be of its modules."""
    code = TaskCode(**fields)
    _SHIPPED.take(code)
    return code
