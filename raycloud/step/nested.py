"""Nested state as plain values and named tensors, and back into the objects that hold it.

Optimizers, schedules and modules keep numbers, tensors, lists of tensors, other schedules and
objects of their own. Back, no object is made from what a checkpoint says: objects are those that
the task has made, at the same place, and only their state is put back. So nothing is ever run.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from raycloud.checkpoint.values import DEEPEST, Tagged
from raycloud.errors import CheckpointError, TaskError

_STATELESS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MethodType,
    type,
    torch.device,
    partial,
    weakref.ref,
)
_STANDARD = ("__reduce__", "__reduce_ex__", "__getstate__")
_ARRAYS = "biufc"  # kinds of NumPy types that torch has, too
_NAMES = 200  # characters of a key in a name
_HINT = "resume with the task the run was started with"
_KEEP = (
    "keep numbers, strings, lists, dicts and tensors, or objects of your own that hold these; or "
    "give its class state_dict and load_state_dict, which decide what is kept"
)
_KEEP_PLAIN = (
    "keep numbers, strings, lists, dicts and tensors there: an object that is made on the way is "
    "not there where the state is put back, unless the state_dict and load_state_dict of the "
    "optimizer or the module see to it"
)


class Packing:
    """Turns nested state into plain values, and its tensors into named ones: live, not copies.

    Objects that are `known` have their state elsewhere, such as the model and the optimizer.
    """

    def __init__(self, known: tuple[object, ...] = ()) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._known = {id(one) for one in known}
        self._objects = True
        self._names: dict[int, str] = {}
        self._held: list[object] = []  # so that no other object gets the number of one of them

    def pack(self, value: object, where: str, *, objects: bool = True) -> Any:
        """Plain values in place of `value`; `TaskError` names what in it no checkpoint can hold.

        Names of its tensors begin with `where`, its path. Only where it is put back where the same
        `objects` are again may it hold any.
        """
        self._objects = objects
        return self._packed(value, where, 0)

    def _packed(self, value: object, where: str, depth: int) -> Any:
        if depth > DEEPEST:
            raise _unfit(where, f"lies deeper than {DEEPEST} levels")
        if isinstance(value, torch.Tensor | np.ndarray | np.generic | torch.dtype):
            found = self._packed_tensor(value, where)
        elif isinstance(value, dict):
            found = self._packed_dict(value, where, depth)
        elif isinstance(value, deque) or type(value) in (list, tuple, torch.Size):
            found = self._packed_items(value, where, depth)
        elif value is None or (
            isinstance(value, bool | int | float | str) and not isinstance(value, Enum)
        ):
            found = value
        else:
            found = self._packed_object(value, where, depth)
        return found

    def _packed_tensor(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return Tagged("tensor", self._named(value, where))
        if isinstance(value, torch.dtype):
            return Tagged("dtype", str(value).removeprefix("torch."))
        if isinstance(value, float) or value.dtype.kind == "U":  # NumPy's that are Python's, too
            return value.item()
        if value.dtype.kind not in _ARRAYS or not value.dtype.isnative:
            raise _unfit(where, f"is a NumPy array of {value.dtype}")
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return Tagged(kind, self._named(torch.from_numpy(np.array(value)), where))

    def _packed_items(self, value: Any, where: str, depth: int) -> Any:
        items = [self._packed(v, f"{where}/{i}", depth + 1) for i, v in enumerate(value)]
        if isinstance(value, deque):
            return Tagged("deque", [value.maxlen, items])
        return items if type(value) is list else tuple(items)

    def _packed_dict(self, value: dict[Any, Any], where: str, depth: int) -> Any:
        kind = type(value)
        if kind not in (dict, Counter, OrderedDict, defaultdict):
            raise _unfit(where, f"is a {kind.__module__}.{kind.__qualname__}")
        items = {k: self._packed(v, f"{where}/{_key(k)}", depth + 1) for k, v in value.items()}
        return items if kind is defaultdict else kind(items)

    def _packed_object(self, value: Any, where: str, depth: int) -> Any:
        if not self._objects:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise _unfit(where, f"is a {kind}", _KEEP_PLAIN)
        if isinstance(value, Enum):
            return Tagged("member", value.name)
        if isinstance(value, _STATELESS) or id(value) in self._known:
            return Tagged("live", None)
        state = _state_of(value)
        if state is None:
            raise _unfit(where, f"is a {type(value).__module__}.{type(value).__qualname__}")
        self._known.add(id(value))  # from a second place on it is the same
        self._held.append(value)
        packed = self._packed(dict(state), where, depth + 1)
        return Tagged("object", {"kind": _kind(value), "state": packed})

    def _named(self, tensor: torch.Tensor, where: str) -> str:
        wrapped: bool = is_traceable_wrapper_subclass(tensor)
        if wrapped:
            raise _unfit(where, f"is a tensor of the class {type(tensor).__qualname__}")
        if id(tensor) not in self._names:
            name, more = f"held/{where}", 1
            while name in self.tensors:
                more += 1
                name = f"held/{where}~{more}"
            self._names[id(tensor)] = name
            self._held.append(tensor)
            self.tensors[name] = tensor.detach()
        return self._names[id(tensor)]


@dataclass(kw_only=True)
class Unpacking:
    """Puts packed state back: `unpack` looks at all of it, and changes nothing.

    Attributes:
        tensors: Those that the state names.
        copies: To be called then: they fill tensors that are there.
        loads: To be called last: they put back the state of objects.
    """

    tensors: Mapping[str, torch.Tensor]
    copies: list[Callable[[], object]] = field(default_factory=list)
    loads: list[Callable[[], object]] = field(default_factory=list)

    def unpack(self, packed: Any, live: Any, where: str) -> Any:
        """The state that was packed, with tensors where those of `live` are, and its objects.

        That is what is at the same place, `where`, now. `CheckpointError`: there is no such tensor;
        `TaskError`: there is no such object here.
        """
        if isinstance(packed, Tagged):
            return self._unpacked(packed, live, where)
        if isinstance(packed, dict):
            there = live if isinstance(live, dict) else {}
            items = {
                k: self.unpack(v, there.get(k), f"{where}/{_key(k)}") for k, v in packed.items()
            }
            if type(packed) is dict and isinstance(live, defaultdict):
                return defaultdict(live.default_factory, items)
            return type(packed)(items)
        if isinstance(packed, list | tuple):
            return type(packed)(self._items(packed, live, where))
        return packed

    def _items(self, packed: Any, live: Any, where: str) -> list[Any]:
        there = list(live) if isinstance(live, list | tuple | deque) else []
        there += [None] * len(packed)
        return [self.unpack(v, there[i], f"{where}/{i}") for i, v in enumerate(packed)]

    def _unpacked(self, packed: Tagged, live: Any, where: str) -> Any:
        match packed.kind, packed.content:
            case "tensor", str(name):
                return self._tensor(name, live, where)
            case ("array" | "scalar") as kind, str(name):
                array = self._saved(name, where).numpy()
                return array.copy() if kind == "array" else array[()]
            case "live", None if live is not None:
                return live
            case "object", {"kind": str(kind), "state": dict(state)} if kind == _kind(live):
                return self._object(state, live, where)
            case "member", str(name) if isinstance(live, Enum) and name in type(live).__members__:
                return type(live)[name]
            case "dtype", str(name) if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            case "deque", [most, list(items)] if most is None or type(most) is int:
                return deque(self._items(items, live, where), most)
            case ("object" | "live" | "member") as kind, content:
                was = content.get("kind") if isinstance(content, dict) else content
                raise TaskError(
                    f"{where} is {_a(was) if was else 'a function or a class'} in the checkpoint, "
                    f"the task makes {_a(_kind(live))}",
                    hint=_HINT,
                )
            case _:
                raise CheckpointError(
                    f"what the checkpoint says of {where} cannot be used",
                    hint="use another checkpoint: this one was altered",
                )

    def _saved(self, name: str, where: str) -> torch.Tensor:
        if name not in self.tensors:
            raise CheckpointError(
                f"the checkpoint lacks the tensor {name!r} of {where}", hint=_HINT
            )
        return self.tensors[name]

    def _tensor(self, name: str, live: Any, where: str) -> torch.Tensor:
        """Into the tensor that is there, if it fits: others may hold that one, too."""
        saved = self._saved(name, where)
        if not isinstance(live, torch.Tensor):
            return saved
        if (live.shape, live.dtype) != (saved.shape, saved.dtype):
            return saved.to(live.device)
        self.copies.append(partial(live.detach().copy_, saved))
        return live

    def _object(self, content: dict[Any, Any], live: Any, where: str) -> Any:
        state = _state_of(live)
        if state is None:
            raise _unfit(where, f"is {_a(_kind(live))}")
        found = self.unpack(content, dict(state), where)
        if _keeps_state(live):
            self.loads.append(partial(live.load_state_dict, found))
        else:
            self.loads.append(partial(_put_back, live, found))
        return live


def exactly(saved: Any, loaded: Any) -> Any:
    """What was saved, on the devices of what an optimizer has made of it: it casts, and more."""
    if isinstance(saved, torch.Tensor):
        if not isinstance(loaded, torch.Tensor):
            return saved
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, dict):
        there = loaded if isinstance(loaded, dict) else {}
        found = copy.copy(saved)
        found.update({k: exactly(v, there.get(k)) for k, v in saved.items()})
        return found
    if isinstance(saved, list | tuple | deque):
        made = list(loaded) if isinstance(loaded, list | tuple | deque) else []
        made += [None] * len(saved)
        items = [exactly(v, made[i]) for i, v in enumerate(saved)]
        return deque(items, saved.maxlen) if isinstance(saved, deque) else type(saved)(items)
    return saved


def _keeps_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _state_of(value: Any) -> Mapping[str, Any] | None:
    """What an object holds; None: that cannot be known."""
    if _keeps_state(value):
        found: Mapping[str, Any] = value.state_dict()
        return found
    kind = type(value)
    if any(getattr(kind, name) is not getattr(object, name) for name in _STANDARD):
        return None  # part of what it holds is elsewhere, as of a generator of random numbers
    if any(base.__dict__.get("__slots__") for base in kind.__mro__):
        return None
    return getattr(value, "__dict__", None)


def _put_back(live: Any, state: dict[str, Any]) -> None:
    held = vars(live)
    for key in set(held) - set(state):
        del held[key]
    held.update(state)


def _kind(value: object) -> str:
    return "none" if value is None else type(value).__qualname__


def _a(kind: object) -> str:
    return "none" if kind == "none" else f"a {kind}"


def _key(key: object) -> str:
    text = str(key)[:_NAMES]
    return text if text.isprintable() else ascii(text)


def _unfit(where: str, problem: str, hint: str = _KEEP) -> TaskError:
    return TaskError(f"state for a checkpoint: {where} {problem}, which it cannot hold", hint=hint)
