"""Tensors as bytes: what is told of them, room for them, and any range of them in a row."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch

from raycloud.errors import TransportError

_LARGEST_BYTES = 2**40

Tensors = dict[str, torch.Tensor]


def described(tensors: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    """Name, type and shape of each, for a header."""
    return [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in tensors.items()]


def room_for(told: Mapping[str, Any]) -> Tensors:
    """Room for the tensors of a header.

    Raises:
        TransportError: It does not describe any.
    """
    found: Tensors = {}
    room = _LARGEST_BYTES
    for one in told.get("tensors", ()):
        match one:
            case [str(name), str(kind), [*shape]] if all(type(n) is int and n >= 0 for n in shape):
                dtype = getattr(torch, kind, None)
            case _:
                dtype = None
        if not isinstance(dtype, torch.dtype):
            raise TransportError(f"a tensor is announced that can be none: {one!r}")
        room -= math.prod(shape) * dtype.itemsize
        if room < 0:
            raise TransportError(f"more than {_LARGEST_BYTES} bytes are announced, with {one!r}")
        found[name] = torch.empty(shape, dtype=dtype)
    return found


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Those of one that lies on the CPU, in one piece."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class Row:
    """Tensors, one after the other, as one row of bytes.

    Args:
        tensors: In their order. They are not held still, and where they lie in one piece on the CPU
            not copied.

    Attributes:
        size: Bytes of all.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lay them out; those without elements take no place."""
        self._tensors = [t for t in tensors if t.numel()]
        self._ends = list(accumulate(t.numel() * t.element_size() for t in self._tensors))
        self.size = self._ends[-1] if self._ends else 0
        self._copy = -1, torch.empty(0)  # of the last one that does not lie in one piece

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes of a range: where they are, or a copy if they lie in several places."""
        found = [self._bytes(*part) for part in self._parts(start, stop)]
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def places(self, start: int, stop: int) -> list[memoryview]:
        """Where the bytes of a range are to be written, in tensors as `room_for` makes them."""
        return [self._bytes(*part) for part in self._parts(start, stop)]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Which tensors a range goes through, and for each from which of its bytes to which."""
        at = bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[at - 1] if at else 0
            end = min(stop, self._ends[at])
            yield at, start - before, end - before
            start, at = end, at + 1

    def _bytes(self, at: int, start: int, stop: int) -> memoryview:
        tensor = self._tensors[at]
        if not tensor.is_contiguous():
            copy = self._copy
            if copy[0] != at:
                copy = self._copy = at, tensor.contiguous()
            tensor = copy[1]
        piece = tensor.reshape(-1).view(torch.uint8)[start:stop]
        found: memoryview = piece.to("cpu").numpy().data
        return found
