"""Digests of all that decides what a block holds: files, tables, and the code of `preprocess`.

<root>/digests.json    of local files, by path; worth no more than the time to read them again
"""

from __future__ import annotations

import copyreg
import dis
import importlib.util
import json
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raycloud.bounded import json_value, read_whole
from raycloud.data.block import publish
from raycloud.data.cache import locked
from raycloud.data.clean import plain_table
from raycloud.data.index import Input
from raycloud.data.location import is_local, open_file
from raycloud.errors import DataError, TaskError
from raycloud.task import Task

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.clock import Clock
    from raycloud.data.location import File
    from raycloud.task import Source

FORMAT = 1

_DIGEST_BYTES = 16
_READ_BYTES = 2**20
_SETTLED_S = 2.0  # file systems keep times as coarse as this: a younger file may change unseen
_MOST_THREADS = 8
_LARGEST_BYTES = 2**30  # of the memo, which has a line for each file there ever was
_MOST_VALUES = 2**27

_Known = tuple[int, int, int, str]  # size, time, inode; digest


def combined(*parts: Any) -> str:
    """The digest of JSON-ready values, as 32 hex digits.

    >>> combined("a", 1) == combined("a", 1) != combined("a1")
    True
    """
    text = json.dumps(parts, sort_keys=True, allow_nan=False)
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def inputs_of(source: Source, files: Sequence[File], root: Path, clock: Clock) -> tuple[Input, ...]:
    """Each file with a digest: of its content where it is local, else of what its store says.

    What a store says is the path, the size, the time of the last change and the tag of its content
    (S3's ETag). One that says neither time nor tag is read. The digest of a local file is
    remembered in `root`, a cache, until its size, time or inode changes; `clock` tells files that
    may have changed since, but show the same time.

    Raises:
        DataError: A file cannot be read.
    """
    known = _remembered(root)
    fresh: dict[str, _Known] = {}
    settled_ns = int((clock.unix_s() - _SETTLED_S) * 1e9)

    def digested(file: File) -> Input:
        if is_local(file.path):
            digest = local(Path(file.path))
        elif file.tag is None and file.modified_ns is None:
            with open_file(source, file.path) as stream:
                digest = _content(stream.read)
        else:
            digest = combined("remote", file.path, file.bytes, file.modified_ns, file.tag)
        return Input(path=file.path, bytes=file.bytes, digest=digest, modified_ns=file.modified_ns)

    def local(path: Path) -> str:
        name = str(path.absolute())
        with _readable(path):
            status = path.stat()
            seen = (status.st_size, status.st_mtime_ns, status.st_ino)
            if name in known and tuple(known[name][:3]) == seen:
                return known[name][3]
            with path.open("rb", buffering=0) as file:
                content = _content(file.read)
        if status.st_mtime_ns < settled_ns:
            fresh[name] = (*seen, content)
        return content

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        inputs = tuple(threads.map(digested, files))
    if fresh:
        with locked(root):  # another process may have added others meanwhile
            record = {"format": FORMAT, "files": {**_remembered(root), **fresh}}
            publish(root / "digests.json", json.dumps(record).encode())
    return inputs


def check_unchanged(inputs: Iterable[Input]) -> None:
    """Refuse local files that are others than they were when they were found.

    A file of the same size and time is taken to be the same; any other is read.

    Raises:
        DataError: One has changed, or cannot be read.
    """
    for one in inputs:
        if one.modified_ns is None or not is_local(one.path):
            continue
        path = Path(one.path)
        with _readable(path):
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) == (one.bytes, one.modified_ns):
                continue
            with path.open("rb", buffering=0) as file:
                digest = _content(file.read)
        if digest != one.digest:
            raise DataError(
                f"{one.path!r} has changed while it was read",
                hint="leave files as they are while a run reads them",
            )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            hint="let the user that runs raycloud read it, or leave it out with Source.select",
        ) from error


def table_digest(parts: Iterable[pa.Table]) -> str:
    """The digest of a table's rows, cut at the same rows each time; chunks do not matter."""
    total = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        table = plain_table(part.combine_chunks()).combine_chunks()
        total.update(repr(table.schema.to_string(show_field_metadata=False)).encode())
        for batch in table.to_batches():
            total.update(batch.serialize())
    return total.hexdigest()


def _remembered(root: Path) -> dict[str, _Known]:
    try:
        record = json_value(read_whole(root / "digests.json", _LARGEST_BYTES), _MOST_VALUES)
        files: dict[str, _Known] = record["files"]
        return files if record["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # none yet, or not whole: the files are read again


def _content(read: Callable[[int], bytes | None]) -> str:
    total = blake2b(digest_size=_DIGEST_BYTES)
    while chunk := read(_READ_BYTES):
        total.update(chunk)
    return total.hexdigest()


# The digest of code. Two tasks have the same exactly where nothing that `preprocess` could reach by
# name differs: its bytecode, the functions, classes and constants of the project that it names, and
# the attributes of the task that it names; then the same of those. What is installed (the standard
# library, site packages but the task's own, raycloud) counts by name alone. It is the same in each
# process of one Python version: neither the seed of `hash`, nor line numbers, nor what docstrings
# and module names say matter.

_PLAIN = (type(None), bool, int, float, str, bytes, bytearray, type(...), type(NotImplemented))
_SITES = frozenset({"site-packages", "dist-packages"})
_INSTALLED = (
    "<frozen",
    os.path.join(Path(__file__).parents[1], ""),  # noqa: PTH118  # raycloud, with its slash
    *(
        os.path.join(sysconfig.get_paths()[name], "")  # noqa: PTH118
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
)


def code_digest(task: Task) -> str:
    """The digest of what `task.preprocess` does, as far as its code and its attributes say.

    Raises:
        TaskError: It reads something whose content cannot be told, such as an open file.
    """
    if type(task).preprocess is Task.preprocess:
        return "as-read"
    return _Walk(task).attribute("preprocess").hex()


def rows_digest(task: Task, sources: Mapping[str, Source]) -> str | None:
    """The digest of what decides the rows of these sources, by split, beside the files' content.

    Tasks of the same digest have the same rows. None: it cannot be told, as of a `dataset` in
    memory that has no `key`.
    """
    walk, found = _Walk(task), dict[str, list[str]]()
    try:
        for split, source in sorted(sources.items()):
            if source.dataset is not None and source.key is None:
                return None
            named = [f.name for f in fields(source) if f.name != "dataset"]
            found[split] = [walk.of(getattr(source, name)).hex() for name in named]
        return combined(code_digest(task), found)
    except (_OpaqueError, TaskError):
        return None


class _Walk:
    """Digests values, depth first; one that holds itself counts by its depth there."""

    def __init__(self, task: Task) -> None:
        self._task, self._project = task, _Project(task)
        self._own: dict[str, Any] = getattr(task, "__dict__", {})
        self._above: list[int] = []
        self._done: dict[int, tuple[Any, bytes]] = {}  # the value too, so that no other has its id

    def attribute(self, name: str, *, all_of_them: bool = False) -> bytes:
        """An attribute of the task: its own, or of its class and perhaps of those that it hides."""
        if name in self._own:
            return self._named(f"self.{name}", self._own[name])
        found = []
        holders = [kind for kind in type(self._task).__mro__ if name in vars(kind)]
        for kind in holders if all_of_them else holders[:1]:
            value = vars(kind)[name]
            if isinstance(value, types.MemberDescriptorType):  # of __slots__
                found.append(self._named(f"self.{name}", getattr(self._task, name, None)))
            elif self._project.has_class(kind):
                found.append(self._named(f"self.{name}", value))
            else:
                found.append(_digest("name", kind.__module__, kind.__qualname__, name))
        return _digest("attribute", *found)

    def _named(self, name: str, value: Any) -> bytes:
        try:
            return self.of(value)
        except _OpaqueError as error:
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
        if value is self._task:  # what is read of it counts by name
            return _digest("task")
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._above:
            return _digest("within", str(len(self._above) - self._above.index(id(value))))
        self._above.append(id(value))
        digest = self._content(value)  # where it raises, nothing is digested any more
        self._above.pop()
        self._done[id(value)] = (value, digest)
        return digest

    def _content(self, value: Any) -> bytes:
        kind = type(value)
        if kind in {set, frozenset}:
            # Each on its own: what was met before would depend on the order, which no one knows.
            return _digest("set", *sorted(_Walk(self._task).of(part) for part in value))
        if kind is types.FunctionType:
            return self._function(value)
        if kind in _PARTS:
            return self._all(kind.__name__, _PARTS[kind](value))
        if isinstance(value, type):
            if not self._project.has_class(value):
                return _digest("name", value.__module__, value.__qualname__)
            members = chain.from_iterable(m for m in sorted(vars(value).items()) if _is_member(*m))
            return self._all("class", (value.__qualname__, value.__bases__, *members))
        if hasattr(value, "__wrapped__"):  # functools.lru_cache
            return self.of(value.__wrapped__)
        if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
            return self.of(np.asarray(value.detach().cpu()))
        return self._copied(value)

    def _all(self, what: str, values: Iterable[Any]) -> bytes:
        return _digest(what, *map(self.of, values))

    def _copied(self, value: Any) -> bytes:
        """Any object, by what it would be copied from."""
        kind = type(value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            parts: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception as error:  # of any library
            raise _OpaqueError(f"a {kind.__module__}.{kind.__qualname__}: {error}") from error
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
        globals_, attributes, imported = _names(code)
        parts = [self._all("code", _parts_of_code(code, function.__doc__))]
        parts.append(self._all("defaults", (function.__defaults__, function.__kwdefaults__)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                inner = cell.cell_contents
            except ValueError:  # not given a value yet
                continue
            if name != "__class__":
                digest = self._named("a variable of the function around it", inner)
                parts += [name.encode(), digest]
        owners = list(self._project.imports(imported, function.__globals__.get("__package__")))
        for name in sorted(globals_ & function.__globals__.keys()):
            value = function.__globals__[name]
            if self._counts_by_name(value):
                owners.append(value)
            else:
                parts += [name.encode(), self._named(f"the global {name}", value)]
        parts += self._members(owners, attributes | imported)
        for name in sorted(attributes):
            if hasattr(type(self._task), name) or name in self._own:
                digest = self.attribute(name, all_of_them="super" in globals_)
                parts += [name.encode(), digest]
        return _digest("function", *parts)

    def _counts_by_name(self, value: Any) -> bool:
        """Whether of a module or class only that counts which is named beside it."""
        if isinstance(value, types.ModuleType):
            return self._project.has_module(value)
        return any(value is kind for kind in type(self._task).__mro__)

    def _members(self, owners: list[Any], wanted: set[str]) -> Iterator[bytes]:
        """What is named of modules and classes, and of those in them, which join `owners`."""
        for owner in owners:
            for name in sorted(wanted & vars(owner).keys()):
                value = vars(owner)[name]
                if not self._counts_by_name(value):
                    yield name.encode()
                    yield self._named(f"{owner.__name__}.{name}", value)
                elif all(value is not other for other in owners):
                    owners.append(value)


class _OpaqueError(Exception):
    """A value whose content cannot be told; says which."""


class _Project:
    """Which code is the project's own: what is not installed, and the task's own package."""

    def __init__(self, task: object) -> None:
        top = type(task).__module__.partition(".")[0]
        file = Path(getattr(sys.modules.get(top), "__file__", None) or os.devnull)
        self._own = file.parent if file.name == "__init__.py" else file

    def has(self, file: str) -> bool:
        path = Path(file)
        if path.is_relative_to(self._own):
            return True
        return not file.startswith(_INSTALLED) and _SITES.isdisjoint(path.parts)

    def has_module(self, module: types.ModuleType) -> bool:
        if file := getattr(module, "__file__", None):
            return self.has(file)
        return module.__name__ not in sys.stdlib_module_names

    def has_class(self, kind: type) -> bool:
        module = sys.modules.get(kind.__module__)
        return module is None or self.has_module(module)

    def imports(self, names: Iterable[str], package: str | None) -> Iterator[types.ModuleType]:
        """Its modules among those that a function imports when it runs; they are imported now."""
        for name in sorted(names):
            for place in (name, f"{package}.{name}") if package else (name,):
                if self._may_have(place.partition(".")[0]):
                    with suppress(ModuleNotFoundError):  # `from .a import b` names an `a` alone
                        module = importlib.import_module(place)
                        if self.has_module(module):
                            yield module

    def _may_have(self, top: str) -> bool:
        """Whether a top-level module could be the project's, without importing it."""
        if not top or top in sys.stdlib_module_names:
            return False
        spec = importlib.util.find_spec(top)
        return spec is None or spec.origin is None or self.has(spec.origin)


def _names(code: types.CodeType) -> tuple[set[str], set[str], set[str]]:
    """What code and the code inside of it name: globals, attributes, and imported modules."""
    globals_, attributes, imported = set[str](), set[str](), set[str]()
    kinds = {"LOAD_GLOBAL": globals_, "LOAD_NAME": globals_, "IMPORT_NAME": imported}
    for step in dis.get_instructions(code):
        if step.opcode in dis.hasname:
            kinds.get(step.opname, attributes).add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for names, within in zip(
                (globals_, attributes, imported), _names(constant), strict=True
            ):
                names.update(within)
    return globals_, attributes, imported


def _is_member(name: str, value: Any) -> bool:
    """Whether a class has this from its source, and not from being a class or a dataclass."""
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return False
    if name.startswith("__"):
        return callable(value) or isinstance(value, classmethod | property)
    return name != "_abc_impl"


def _parts_of_code(code: types.CodeType, doc: str | None = None) -> Iterable[Any]:
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    variables = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    constants = [None if doc is not None and c == doc else c for c in code.co_consts]
    return (code.co_code, code.co_exceptiontable, shape, variables, constants)


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((list, tuple), iter),
    **dict.fromkeys((dict, types.MappingProxyType), lambda v: chain.from_iterable(v.items())),
    np.ndarray: lambda value: (
        value.dtype.str,
        value.shape,
        value.tolist() if value.dtype.hasobject else value.tobytes(),
    ),
    types.CodeType: _parts_of_code,
    types.MethodType: lambda value: (value.__self__, value.__func__),
    types.ModuleType: lambda value: (value.__name__,),
    **dict.fromkeys((staticmethod, classmethod), lambda value: (value.__func__,)),
    property: lambda value: (value.fget,),
    cached_property: lambda value: (value.func,),
}
"""By type, the values that decide what a value is."""


def _digest(what: str, *parts: bytes | str) -> bytes:
    total = blake2b(digest_size=_DIGEST_BYTES)
    for part in (what, *parts):
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "little"))
        total.update(content)
    return total.digest()
