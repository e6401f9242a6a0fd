"""Messages between who uses tables and the servers that hold them: a header, and arrays.

They go over a keyed stream (`net.stream`), one connection for each user and server. What an array
is stands in the header; its bytes follow in chunks with check sums. Nothing is unpickled, and
nothing is made room for that is larger than was agreed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raycloud.errors import TaskError, TransportError

if TYPE_CHECKING:
    from raycloud.net.stream import Stream

MOST_BYTES = 2**31  # of a message's arrays
_MOST_ARRAYS = 4096
_CHUNK_BYTES = 2**20
_KINDS = {kind: np.dtype(kind) for kind in ("uint8", "int64", "float32", "float64")}
_ARRAYS = "arrays"

Array = npt.NDArray[Any]


def tell(
    stream: Stream,
    header: Mapping[str, Any],
    arrays: Sequence[Array] = (),
    *,
    limited: bool = True,
) -> int:
    """Send a message; returns the bytes of its arrays. Who hears it takes any, unless `limited`.

    Raises:
        TransportError: The connection broke.
        TaskError: It is larger than who hears it takes.
    """
    if (size := sum(one.nbytes for one in arrays)) > MOST_BYTES and limited:
        raise TaskError(
            f"{size} bytes of rows would go in one message, {MOST_BYTES} at most may",
            hint="write more servers, that each have a part of them",
        )
    kinds = [[str(one.dtype), list(one.shape)] for one in arrays]
    stream.tell({**header, _ARRAYS: kinds})
    sent = 0
    for one in arrays:
        plain: Any = np.ascontiguousarray(one)
        whole = memoryview(plain).cast("B") if one.size else memoryview(b"")
        for at in range(0, len(whole), _CHUNK_BYTES):
            stream.send(whole[at : at + _CHUNK_BYTES])
        sent += len(whole)
    return sent


def hear(stream: Stream, most_bytes: int = MOST_BYTES) -> tuple[dict[str, Any], list[Array]]:
    """The next message.

    Raises:
        TransportError: The connection broke, or what came is no message, or is too large.
    """
    header = stream.hear()
    shapes = [_shape_of(kind) for kind in _listed(header.pop(_ARRAYS, []))]
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes)
    if size > most_bytes:
        raise TransportError(f"a message of {size} bytes came, {most_bytes} at most may")
    arrays: list[Array] = []
    for dtype, shape in shapes:
        one: Any = np.empty(shape, dtype)
        if one.size:
            stream.receive(memoryview(one).cast("B"))
        arrays.append(one)
    return header, arrays


def _listed(told: Any) -> list[Any]:
    if not isinstance(told, list) or len(told) > _MOST_ARRAYS:
        raise TransportError(f"a message came whose arrays are {told!r:.80}")
    return told


def _shape_of(told: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    match told:
        case [str(kind), [*shape]] if kind in _KINDS and all(
            type(n) is int and 0 <= n < MOST_BYTES for n in shape
        ):
            return _KINDS[kind], tuple(shape)
    raise TransportError(f"a message came with an array that is {told!r:.80}")
