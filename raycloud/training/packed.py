"""State of any shape as plain values and named tensors, and back into the objects that hold it.

Optimizers, schedules and modules keep more than tensors by parameter: a rate that is a tensor,
lists of tensors, a schedule in a schedule, callable objects. What is no plain value becomes a
dictionary with one key that starts with `~`:

    {"~tensor": "held/..."}              a tensor, kept among the tensors under this name
    {"~object": kind, "state": {...}}    an object, by `state_dict()` or else by its attributes
    {"~as made": kind}                   a function or a class: the one that the task's code makes

Nothing is made from what a checkpoint says: an object's state is loaded into the object that the
task has made in its place.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from raycloud.errors import CheckpointError, TaskError

HELD = "held/"  # what the names of such tensors start with

_TENSOR, _OBJECT, _AS_MADE, _STATE = "~tensor", "~object", "~as made", "state"
_CODE = (
    types.FunctionType
    | types.BuiltinFunctionType
    | types.MethodType
    | types.MethodDescriptorType
    | type
)
_DICTS = (dict, Counter, OrderedDict)
_DEEPEST = 32
_HINT = "resume with the task the run was started with"


def pack(value: object, where: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Any:
    """Plain values in place of `value`.

    Args:
        value: State of any shape.
        where: Its key path; names of tensors are `held/` and the path of each.
        tensors: Gets the tensors, live ones.
        depth: How deep it lies.

    Raises:
        TaskError: It holds a model, an optimizer as state, or itself; names the key path.
    """
    if depth > _DEEPEST:
        raise _unfit(where, f"lies deeper than {_DEEPEST} levels, or contains itself")
    if isinstance(value, torch.Tensor):
        tensors[HELD + where] = value.detach()
        return {_TENSOR: HELD + where}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        items = [pack(item, f"{where}/{i}", tensors, depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        made: dict[Any, Any] = type(value)() if type(value) in _DICTS else {}
        for key, item in value.items():
            made[key] = pack(item, f"{where}/{key}", tensors, depth + 1)
        return made
    if isinstance(value, _CODE | torch.optim.Optimizer):
        return {_AS_MADE: _kind(value)}
    return {_OBJECT: _kind(value), _STATE: pack(_state(value, where), where, tensors, depth + 1)}


def unpack(saved: object, live: object, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """What was packed: copies of tensors, and `live` objects with their state loaded.

    Args:
        saved: From `pack`.
        live: What the task has made in its place; an object of it is changed.
        tensors: By name.
        where: Its key path, for errors.

    Raises:
        TaskError: The task's object is of another kind, or there is none.
        CheckpointError: A tensor is not there.
    """
    if isinstance(saved, list | tuple):
        lives = live if isinstance(live, list | tuple) and len(live) == len(saved) else saved
        items = [
            unpack(item, other, tensors, f"{where}/{i}")
            for i, (item, other) in enumerate(zip(saved, lives, strict=True))
        ]
        return items if isinstance(saved, list) else tuple(items)
    if not isinstance(saved, dict):
        return saved
    if _TENSOR in saved:
        name = saved[_TENSOR]
        if name not in tensors:
            raise CheckpointError(f"the checkpoint lacks {name!r}", hint="resume from another one")
        return tensors[name].clone()
    kind = saved.get(_AS_MADE, saved.get(_OBJECT))
    if kind is None:
        there = live if isinstance(live, dict) else {}
        loaded = saved.copy()
        for key, value in saved.items():
            loaded[key] = unpack(value, there.get(key), tensors, f"{where}/{key}")
        return loaded
    if _kind(live) != kind:
        raise TaskError(
            f"{where} is a {kind} in the checkpoint, the task makes {_kind(live)}", hint=_HINT
        )
    if _OBJECT in saved:
        state = unpack(saved[_STATE], _state(live, where), tensors, where)
        load = getattr(live, "load_state_dict", None)
        load(state) if load is not None else vars(live).update(state)
    return live


def like(saved: Any, loaded: Any) -> Any:
    """`saved` where its values lie now: libraries change the dtype of what they load.

    Args:
        saved: Values as they were.
        loaded: The same as somebody has loaded them: where tensors are to be.
    """
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple):
        items = [like(one, other) for one, other in zip(saved, loaded, strict=True)]
        return items if isinstance(saved, list) else tuple(items)
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {key: like(value, loaded.get(key)) for key, value in saved.items()}
    return saved


def _state(value: object, where: str) -> Any:
    if isinstance(value, nn.Module):
        raise _unfit(where, f"is a {_kind(value)}, a model")
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if not hasattr(value, "__dict__"):
        raise _unfit(where, f"is a {_kind(value)}")
    return dict(vars(value))


def _kind(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    name = value.__qualname__ if isinstance(value, types.FunctionType) else kind.__qualname__
    return f"{kind.__module__}.{name}" if kind.__module__ != "builtins" else name


def _unfit(where: str, problem: str) -> TaskError:
    return TaskError(
        f"state for a checkpoint: {where} {problem}",
        hint="keep numbers, strings, tensors, lists and dictionaries of them, or objects that have "
        "state_dict() and load_state_dict()",
    )
