"""A digest of code: of a task's preprocessing, and of all that it names.

Two tasks have the same digest exactly where nothing that `preprocess` could reach by name differs:
its bytecode, the functions, classes and constants of the project that it names, and the attributes
of the task that it names; then the same of those. What is installed (the standard library, site
packages but the task's own, raycloud) counts by name alone. It is the same in each process of one
Python version: neither the seed of `hash`, nor line numbers, nor what docstrings and module names
say matter.
"""

from __future__ import annotations

import copyreg
import struct
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from raycloud.data.code_names import Project, names
from raycloud.errors import TaskError
from raycloud.task import Task

if TYPE_CHECKING:
    from types import CodeType

_BYTES = 16
_NOT_CODE = frozenset(  # of a class: made anew with it, or said otherwise by its functions
    {
        "__abstractmethods__",
        "__annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__match_args__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)
_PLAIN = (type(None), bool, int, str, bytes, bytearray, type(Ellipsis), type(NotImplemented))


def code_digest(task: Task) -> str:
    """The digest of what `task.preprocess` does, as far as its code and its attributes say.

    Raises:
        TaskError: It reads something whose content cannot be told, such as an open file.
    """
    if type(task).preprocess is Task.preprocess:
        return "as-read"
    return _Walk(task).attribute("preprocess").hex()


class _Walk:
    """Goes from value to value; what is met again inside of itself counts by its depth there."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._project = Project(task)
        self._own: dict[str, Any] = getattr(task, "__dict__", {})
        self._above: list[int] = []
        self._done: dict[int, tuple[Any, bytes]] = {}  # the value too, so that no other has its id

    def attribute(self, name: str, *, all_of_them: bool = False) -> bytes:
        """An attribute of the task: its own, or of its class and perhaps of those that it hides."""
        if name in self._own:
            return self._told(f"self.{name}", self._own[name])
        found = []
        for kind in type(self._task).__mro__:
            if name in vars(kind):
                if isinstance(vars(kind)[name], types.MemberDescriptorType):  # of __slots__
                    found.append(self._slot(name))
                elif self._project.has_class(kind):
                    found.append(self._told(f"self.{name}", vars(kind)[name]))
                else:
                    found.append(_digest("name", kind.__module__, kind.__qualname__, name))
                if not all_of_them:
                    break
        return _digest("attribute", *found)

    def _slot(self, name: str) -> bytes:
        try:
            value = getattr(self._task, name)
        except AttributeError:  # not given a value yet
            return _digest("empty")
        return self._told(f"self.{name}", value)

    def _told(self, name: str, value: Any) -> bytes:
        try:
            return self.of(value)
        except _Untold as error:
            raise TaskError(
                f"{type(self._task).__qualname__}.preprocess reads {name}, and whether its cached "
                f"rows are still right cannot be told, as it holds {error}",
                hint="keep what it is made from (a path, a name, numbers) in the attribute or "
                "constant, and make it in preprocess",
            ) from error

    def of(self, value: Any) -> bytes:
        """The digest of any value."""
        if isinstance(value, _PLAIN):
            return _digest(type(value).__name__, repr(value))
        if isinstance(value, float):
            return _digest("float", struct.pack("<d", value))
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._above:
            return _digest("within", str(len(self._above) - self._above.index(id(value))))
        self._above.append(id(value))
        try:
            digest = self._compound(value)
        finally:
            self._above.pop()
        self._done[id(value)] = (value, digest)
        return digest

    def _compound(self, value: Any) -> bytes:
        digest = self._OF_TYPE.get(type(value))
        if digest is not None:
            return digest(self, value)
        if isinstance(value, type):
            return self._class(value)
        if hasattr(value, "__wrapped__"):  # functools.lru_cache
            return self.of(value.__wrapped__)
        if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
            return self.of(np.asarray(value.detach().cpu()))
        return self._reduced(value)

    def _sequence(self, value: Sequence[Any]) -> bytes:
        return self._all(type(value).__name__, value)

    def _mapping(self, value: Mapping[Any, Any]) -> bytes:
        return self._all("dict", chain.from_iterable(value.items()))

    def _array(self, value: np.ndarray[Any, Any]) -> bytes:
        if value.dtype.hasobject:
            return self._all("objects", (value.shape, value.tolist()))
        return _digest("array", value.dtype.str, str(value.shape), value.tobytes())

    def _set(self, value: frozenset[Any]) -> bytes:
        # Each on its own: what was met before would depend on the order, which no one knows.
        return _digest("set", *sorted(_Walk(self._task).of(part) for part in value))

    def _all(self, what: str, values: Iterable[Any]) -> bytes:
        return _digest(what, *(self.of(value) for value in values))

    def _reduced(self, value: Any) -> bytes:
        """Any object, by what it would be copied from."""
        kind = type(value)
        try:
            if kind in copyreg.dispatch_table:
                parts: Any = copyreg.dispatch_table[kind](value)
            else:
                parts = value.__reduce_ex__(4)
        except Exception as error:  # of any library
            raise _Untold(f"a {kind.__module__}.{kind.__qualname__}: {error}") from error
        if isinstance(parts, str):  # the name of a constant or a function of its module
            return _digest("name", getattr(value, "__module__", None) or "", parts)
        listed = (list(part) if isinstance(part, Iterator) else part for part in parts)
        return self._all("object", listed)

    def _function(self, function: types.FunctionType) -> bytes:
        code = function.__code__
        if not self._project.has(code.co_filename):
            # A decorator of a library makes such a function of one of ours.
            within = self.of(getattr(function, "__wrapped__", None))
            return _digest("name", Path(code.co_filename).name, code.co_qualname, within)
        globals_, attributes, imported = names(code)
        parts = [self._code(code, doc=function.__doc__)]
        parts.append(self._all("defaults", (function.__defaults__, function.__kwdefaults__)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                parts.append(self._cell(cell))
        near = list(self._project.imports(imported, function.__globals__.get("__package__")))
        for name in sorted(globals_ & function.__globals__.keys()):
            value = function.__globals__[name]
            if self._is_near(value):
                near.append(value)
            else:
                parts += [name.encode(), self._told(f"the global {name}", value)]
        parts += self._named(near, attributes | imported)
        for name in sorted(attributes):
            if hasattr(type(self._task), name) or name in self._own:
                below = self.attribute(name, all_of_them="super" in globals_)
                parts += [name.encode(), below]
        return _digest("function", *parts)

    def _is_near(self, value: Any) -> bool:
        """Whether of a module or class only that counts which is named beside it."""
        if isinstance(value, types.ModuleType):
            return self._project.has_module(value)
        return any(value is kind for kind in type(self._task).__mro__)

    def _named(self, near: list[Any], wanted: set[str]) -> Iterator[bytes]:
        """What is named of modules and classes, and of those in them."""
        owners = list(near)
        for owner in owners:  # which grows meanwhile
            for name in sorted(wanted & vars(owner).keys()):
                value = vars(owner)[name]
                if not self._is_near(value):
                    yield name.encode()
                    yield self._told(f"{owner.__name__}.{name}", value)
                elif all(value is not other for other in owners):
                    owners.append(value)

    def _cell(self, cell: types.CellType) -> bytes:
        try:
            return self._told("a variable of the function around it", cell.cell_contents)
        except ValueError:  # not given a value yet
            return _digest("empty")

    def _code(self, code: CodeType, doc: str | None = None) -> bytes:
        constants = [None if doc is not None and c == doc else c for c in code.co_consts]
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        variables = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        return _digest(
            "code",
            code.co_code,
            getattr(code, "co_exceptiontable", b""),
            repr((shape, variables)),
            self._all("constants", constants),
        )

    def _class(self, kind: type) -> bytes:
        if not self._project.has_class(kind):
            return _digest("name", kind.__module__, kind.__qualname__)
        members = {name: value for name, value in vars(kind).items() if name not in _NOT_CODE}
        parts = [self._all("bases", kind.__bases__)]
        for name, value in sorted(members.items()):
            if not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                parts += [name.encode(), self.of(value)]
        return _digest("class", kind.__qualname__, *parts)

    def _method(self, value: types.MethodType) -> bytes:
        owner = None if value.__self__ is self._task else value.__self__
        return self._all("method", (owner, value.__func__))

    def _wrapper(self, value: staticmethod[..., Any] | classmethod[Any, ..., Any]) -> bytes:
        return self._all(type(value).__name__, (value.__func__,))

    def _property(self, value: property | cached_property[Any]) -> bytes:
        return self.of(value.fget if isinstance(value, property) else value.func)

    def _module(self, value: types.ModuleType) -> bytes:
        return _digest("module", value.__name__)

    _OF_TYPE: ClassVar[dict[type, Callable[[Any, Any], bytes]]] = {
        list: _sequence,
        tuple: _sequence,
        dict: _mapping,
        types.MappingProxyType: _mapping,
        set: _set,
        frozenset: _set,
        np.ndarray: _array,
        types.CodeType: _code,
        types.FunctionType: _function,
        types.MethodType: _method,
        types.ModuleType: _module,
        staticmethod: _wrapper,
        classmethod: _wrapper,
        property: _property,
        cached_property: _property,
    }


class _Untold(Exception):
    """A value whose content cannot be told; says which."""


def _digest(what: str, *parts: bytes | str) -> bytes:
    total = blake2b(digest_size=_BYTES)
    for part in (what, *parts):
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "little"))
        total.update(content)
    return total.digest()
