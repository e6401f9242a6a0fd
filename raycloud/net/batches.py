"""Batches as messages: how a batch is put together as JSON, and the bytes of its tensors beside it.

A batch is tensors and arrays in any nesting of dicts, lists, tuples and named tuples, with plain
values between them. Nothing is unpickled: a named tuple is made again by its class only where this
process has that class already, and a tensor is its type, its shape and its bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycloud.errors import TransportError

if TYPE_CHECKING:
    from raycloud.net.messages import Array

_PLAIN = (bool, int, float, str, type(None))
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype) and not str(one).startswith(("torch.q", "torch.bits"))
}


class UnpackableError(Exception):
    """A batch holds something that does not travel; says what."""


def packed(batch: Any, arrays: list[Array]) -> Any:
    """What a batch is, as JSON has it; the bytes of its tensors are put behind those in `arrays`.

    >>> arrays = []
    >>> packed({"x": torch.zeros(2), "n": (1, "a")}, arrays)["dict"][0]
    ['x', {'tensor': 0, 'dtype': 'float32', 'shape': [2]}]
    >>> arrays[0].nbytes
    8

    Raises:
        UnpackableError: It holds something else than tensors, arrays, plain values, and Python's
            own containers: of another class a batch would come out as another one than went in.
    """
    match batch:
        case torch.Tensor():
            return _tensor(batch, arrays)
        case np.ndarray() if not (batch.dtype.hasobject or batch.dtype.names):
            arrays.append(_octets(batch))
            told = {"dtype": batch.dtype.str, "shape": list(batch.shape)}
            return {"array": len(arrays) - 1, **told}
        case dict() if type(batch) is dict and all(type(key) is str for key in batch):
            return {"dict": [[key, packed(part, arrays)] for key, part in batch.items()]}
        case tuple() if hasattr(batch, "_fields"):
            kind = type(batch)
            parts = [packed(part, arrays) for part in batch]
            return {"named": f"{kind.__module__}:{kind.__qualname__}", "parts": parts}
        case tuple() | list() if type(batch) in (tuple, list):
            name = "tuple" if isinstance(batch, tuple) else "list"
            return {name: [packed(part, arrays) for part in batch]}
        case _ if type(batch) in _PLAIN:
            return {"plain": batch}
        case _:
            pass
    raise UnpackableError(f"a batch holds a {type(batch).__module__}.{type(batch).__qualname__}")


def unpacked(told: Any, arrays: Sequence[Array]) -> Any:
    """The batch again; its tensors and arrays are those bytes, which are its own from now on.

    Raises:
        TransportError: What came is none, or names a class that this process does not have.
    """
    try:
        return _unpacked(told, arrays)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise TransportError(f"what came is no batch: {error!r:.200}") from error


def _unpacked(told: Any, arrays: Sequence[Array]) -> Any:
    match told:
        case {"tensor": int(at), "dtype": str(dtype), "shape": [*shape]}:
            whole: Any = torch.from_numpy(arrays[at])
            if not math.prod(shape):
                return torch.empty(shape, dtype=_DTYPES[dtype])
            return whole.view(_DTYPES[dtype]).reshape(shape)
        case {"array": int(at), "dtype": str(kind), "shape": [*shape]}:
            made = np.dtype(kind)
            if made.hasobject:
                raise ValueError(f"an array of {kind}")
            return arrays[at].view(made).reshape(shape)
        case {"dict": [*pairs]}:
            return {str(key): _unpacked(part, arrays) for key, part in pairs}
        case {"named": str(name), "parts": [*parts]}:
            return _named(name)._make(_unpacked(part, arrays) for part in parts)
        case {"tuple": [*parts]}:
            return tuple(_unpacked(part, arrays) for part in parts)
        case {"list": [*parts]}:
            return [_unpacked(part, arrays) for part in parts]
        case {"plain": value} if type(value) in _PLAIN:
            return value
    raise ValueError(f"{told!r:.80}")


def _named(name: str) -> Any:
    """The class of a named tuple that is loaded here already."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise TypeError(f"{name} is no named tuple")
    return found


def _tensor(value: torch.Tensor, arrays: list[Array]) -> dict[str, Any]:
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout is not torch.strided or dtype not in _DTYPES:
        raise UnpackableError(f"a batch holds a tensor of {value.dtype}, {value.layout}")
    plain = value.detach().cpu().contiguous()
    arrays.append(plain.reshape(-1).view(torch.uint8).numpy())
    return {"tensor": len(arrays) - 1, "dtype": dtype, "shape": list(value.shape)}


def _octets(array: Array) -> Array:
    found: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return found
