"""What code names, and whether that is the project's own or installed."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_SITES = frozenset({"site-packages", "dist-packages"})
_INSTALLED = (
    "<frozen",
    os.path.join(Path(__file__).parents[1], ""),  # noqa: PTH118  # raycloud, with its slash
    *(os.path.join(sysconfig.get_paths()[name], "") for name in _PATHS),  # noqa: PTH118
)


def names(code: CodeType) -> tuple[set[str], set[str], set[str]]:
    """What code and the code inside of it name: globals, attributes, and imported modules."""
    globals_, attributes, imported = set(), set(), set()
    for part in _codes(code):
        for step in dis.get_instructions(part):
            if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
                globals_.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                imported.add(str(step.argval))
            elif step.opcode in dis.hasname:
                attributes.add(str(step.argval))
    return globals_, attributes, imported


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


class Project:
    """Which code is the project's own: all that is not installed, and the task's own package."""

    def __init__(self, task: object) -> None:
        """A task that is installed makes its whole package the project's own."""
        top = type(task).__module__.partition(".")[0]
        file = getattr(sys.modules.get(top), "__file__", None)
        own = Path(file) if file else None
        if own is not None and own.name == "__init__.py":
            own = own.parent
        self._own = () if own is None else (str(own), os.path.join(own, ""))  # noqa: PTH118

    def has(self, file: str) -> bool:
        """Whether a file of code is not of the standard library, a site package or raycloud."""
        if self._own and (file == self._own[0] or file.startswith(self._own[1])):
            return True
        return not file.startswith(_INSTALLED) and _SITES.isdisjoint(Path(file).parts)

    def has_module(self, module: types.ModuleType) -> bool:
        """The same of a module."""
        file = getattr(module, "__file__", None)
        return self.has(file) if file else module.__name__ not in sys.stdlib_module_names

    def has_class(self, kind: type) -> bool:
        """The same of a class."""
        module = sys.modules.get(kind.__module__)
        return module is None or self.has_module(module)

    def imports(self, names: Iterable[str], package: str | None) -> Iterator[types.ModuleType]:
        """Its modules among those that a function imports when it runs; they are imported now."""
        for name in sorted(names):
            for place in (name, f"{package}.{name}") if package else (name,):
                top = place.partition(".")[0]
                if top and self._has_top(top):
                    with suppress(ModuleNotFoundError):  # `from .a import b` names an `a` alone
                        module = importlib.import_module(place)
                        if self.has_module(module):
                            yield module

    def _has_top(self, name: str) -> bool:
        if name in sys.stdlib_module_names:
            return False
        spec = importlib.util.find_spec(name)
        return spec is None or spec.origin is None or self.has(spec.origin)
