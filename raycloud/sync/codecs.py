"""Codecs: fp32 values as fewer bytes, and back; what error feedback and the exchange are made of.

A code stands for one run of fp32 values. It says nothing of its length, which both sides know, and
decodes to the same fp32 values on every processor: each decoded value is a product and a sum that
fp32 holds exactly or rounds once. So replicas that decode the same code stay bit-equal.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import nn

_CHUNK = 1 << 17  # values that are coded at once: what they take stays in the cache
_FACTOR_BYTES = 4
_NEAR = 4  # values within so many powers of two need no factor
_MOST = 126  # powers of two to which fp32 holds both them and their reciprocals exactly
_SCALE_BITS = -256  # of an fp32 scale those with which its product with a byte is exact


class Codec(Protocol):
    """Encodes fp32 values, one-dimensional and contiguous, on the CPU.

    What is not finite stays so: where any value of a block is NaN or infinite, some of it decodes
    to NaN.
    """

    name: str

    def bound(self, count: int) -> int:
        """Bytes of the code of `count` values, exactly."""
        ...

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the code of `values`, shape (count,), to `codes`, shape (bound(count),), uint8."""
        ...

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """Add what `codes` stand for to `to`, shape (count,), in place."""
        ...

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """Subtract it: of values that were just encoded, the residual remains."""
        ...


class Full:
    """fp32 as it is: no codec. Lossless."""

    name = "none"

    def bound(self, count: int) -> int:
        """See `Codec.bound`: 4 bytes a value."""
        return 4 * count

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """See `Codec.encode`."""
        codes.view(torch.float32).copy_(values)

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """See `Codec.add`."""
        to.add_(codes.view(torch.float32))

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Codec.subtract`."""
        from_.sub_(codes.view(torch.float32))


class Brain:
    """bf16, rounded to nearest: 2 bytes a value, 8 bits of precision."""

    name = "bf16"

    def bound(self, count: int) -> int:
        """See `Codec.bound`: 2 bytes a value."""
        return 2 * count

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """See `Codec.encode`."""
        codes.view(torch.bfloat16).copy_(values)

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """See `Codec.add`."""
        to.add_(codes.view(torch.bfloat16))

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Codec.subtract`."""
        from_.sub_(codes.view(torch.bfloat16))


class _Rows:
    """Blocks of values, each with a scale and an offset, by torch's row-wise quantization.

    A code is an fp32 factor for each chunk of values, then a row for each block; the last block is
    filled up with zeros. Values are multiplied by the factor before. It is the power of two that
    lets scales fit their type, and NaN where a value of the chunk is not finite.
    """

    name: str
    _block: int
    _row_bytes: int

    def bound(self, count: int) -> int:
        """See `Codec.bound`."""
        return _FACTOR_BYTES * -(-count // _CHUNK) + self._row_bytes * -(-count // self._block)

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """See `Codec.encode`."""
        parts = values.split(_CHUNK)
        factors, rows = self._cut(codes, len(parts))
        chosen = [_factor(part) for part in parts]
        factors.copy_(torch.tensor(chosen))
        for some, part, factor in zip(rows, parts, chosen, strict=True):
            scaled = part if factor == 1.0 else part * factor
            if rest := -len(part) % self._block:
                scaled = nn.functional.pad(scaled, (0, rest))
            some.copy_(self._pack(scaled.view(-1, self._block)))

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """See `Codec.add`."""
        self._add(codes, to, 1.0)

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Codec.subtract`."""
        self._add(codes, from_, -1.0)

    def _add(self, codes: torch.Tensor, to: torch.Tensor, sign: float) -> None:
        parts = to.split(_CHUNK)
        factors, rows = self._cut(codes, len(parts))
        for some, part, factor in zip(rows, parts, factors.tolist(), strict=True):
            part.add_(self._unpack(some).view(-1)[: len(part)], alpha=sign / factor)

    def _cut(
        self, codes: torch.Tensor, chunks: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        factors, rows = codes.tensor_split((_FACTOR_BYTES * chunks,))
        each = rows.view(-1, self._row_bytes).split(_CHUNK // self._block)
        return factors.view(torch.float32), each

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _factor(values: torch.Tensor) -> float:
    """The power of two that makes values about 1, or 1 where they are; NaN: some are not finite.

    >>> [_factor(torch.tensor([x, x])) for x in (1e-4, 0.7, 0.0, 1e-30, math.inf)]
    [8192.0, 1.0, 1.0, 6.338253001141147e+29, nan]
    """
    size = math.sqrt(float(torch.dot(values, values)) / len(values))
    if not (size and math.isfinite(size)):  # or the squares are beyond what fp32 holds
        low, high = map(float, values.aminmax())
        size = max(-low, high)
    if not math.isfinite(size):
        return math.nan
    exponent = math.frexp(size)[1]
    return 1.0 if abs(exponent) <= _NEAR else math.ldexp(1.0, max(-_MOST, min(-exponent, _MOST)))


class Int8(_Rows):
    """One byte a value, in blocks of 256 with fp32 scale and offset: 3.88 times fewer bytes."""

    name = "int8"
    _block = 256
    _row_bytes = 256 + 8

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack(rows)
        packed[:, 256:260].view(torch.int32).bitwise_and_(_SCALE_BITS)
        return packed

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        unpacked: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(rows)
        return unpacked


class Int4(_Rows):
    """Four bits a value, in blocks of 128 with fp16 scale and offset: 7.53 times fewer bytes."""

    name = "int4"
    _block = 128
    _row_bytes = 64 + 4

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.quantized.embedding_bag_4bit_prepack(rows)
        return packed

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        unpacked: torch.Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(rows)
        return unpacked


CODECS: dict[str, Codec] = {one.name: one for one in (Full(), Brain(), Int8(), Int4())}
