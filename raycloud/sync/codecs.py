"""Codecs: fp32 values as fewer bytes, and back; what error feedback and the exchange are made of.

A code stands for one run of fp32 values. It says nothing of its length, which both sides know, and
decodes to the same fp32 values on every processor: each decoded value is a product and a sum that
fp32 holds exactly or rounds once. So replicas that decode the same code stay bit-equal.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import nn

_CHUNK = 1 << 17  # values that are coded at once: what they take stays in the cache
_FACTOR_BYTES = 4
_NEAR = 4  # values within so many powers of two need no factor
_MOST = 126  # powers of two to which fp32 holds both them and their reciprocals exactly
_SIZED = 64  # groups that have sizes of their own, by `TopK`
_SIZES_BYTES = 4
_MAGNITUDE = 2**31 - 1  # the bits of an fp32 value but its sign
_SCALE_BITS = -256  # of an fp32 scale those with which its product with a byte is exact


class Codec(Protocol):
    """Encodes fp32 values, one-dimensional and contiguous; codes are on the CPU.

    On the CPU the kernels for rows of embeddings that torch has do it; values on another device are
    encoded there by torch's operators, and only the code is copied.

    What is not finite stays so: where any value of a block is NaN or infinite, some of it decodes
    to NaN.
    """

    name: str

    @property
    def for_pair(self) -> Codec:
        """What encodes in its place where two exchange: their sum is not encoded again."""
        return self

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


class Full(Codec):
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
        to.add_(codes.to(to.device).view(torch.float32))

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Codec.subtract`."""
        from_.sub_(codes.to(from_.device).view(torch.float32))


class Brain(Codec):
    """bf16, rounded to nearest: 2 bytes a value, 8 bits of precision."""

    name = "bf16"

    def bound(self, count: int) -> int:
        """See `Codec.bound`: 2 bytes a value."""
        return 2 * count

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """See `Codec.encode`."""
        halves = values if values.device.type == "cpu" else values.bfloat16()
        codes.view(torch.bfloat16).copy_(halves)

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """See `Codec.add`."""
        to.add_(codes.to(to.device).view(torch.bfloat16))

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Codec.subtract`."""
        from_.sub_(codes.to(from_.device).view(torch.bfloat16))


class _Rows(Codec):
    """Blocks of values, each with a scale and an offset, by torch's row-wise quantization.

    A code is an fp32 factor for each chunk of values, then a row for each block; the last block is
    filled up with zeros. Values are multiplied by the factor before. It is the power of two that
    lets scales fit their type, and NaN where a value of the chunk is not finite.
    """

    name: str
    _block: int
    _row_bytes: int
    _least = 1.0  # values from here to 1 need no factor

    def bound(self, count: int) -> int:
        """See `Codec.bound`."""
        return _FACTOR_BYTES * -(-count // _CHUNK) + self._row_bytes * -(-count // self._block)

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """See `Codec.encode`."""
        if values.device.type != "cpu":
            codes.copy_(self.encode_by_operators(values))
            return
        if not len(values):
            return
        parts = values.split(_CHUNK)
        factors, rows = self._cut(codes, len(parts))
        chosen = [_factor(part, least=self._least) for part in parts]
        factors.copy_(torch.tensor(chosen))
        room = torch.empty_like(parts[0])  # of all chunks: what was written last is in the cache
        for some, part, factor in zip(rows, parts, chosen, strict=True):
            scaled = part if factor == 1.0 else torch.mul(part, factor, out=room[: len(part)])
            if rest := -len(part) % self._block:
                scaled = nn.functional.pad(scaled, (0, rest))
            some.copy_(self._pack(scaled.view(-1, self._block)))

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """See `Codec.add`."""
        self._add(codes, to, 1.0)

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Codec.subtract`."""
        self._add(codes, from_, -1.0)

    def encode_by_operators(self, values: torch.Tensor) -> torch.Tensor:
        """The code by operators of every device; it decodes alike, and may round otherwise."""
        chunks = -(-len(values) // _CHUNK)
        whole = nn.functional.pad(values, (0, chunks * _CHUNK - len(values))).view(chunks, _CHUNK)
        factors = _factors(whole, least=self._least)
        rows = (whole * factors[:, None]).view(-1, self._block)[: -(-len(values) // self._block)]
        return torch.cat([factors.view(torch.uint8), self._pack_by_operators(rows).view(-1)])

    def decode_by_operators(self, codes: torch.Tensor, count: int) -> torch.Tensor:
        """The values that a code stands for, likewise."""
        factors, rows = self._cut(codes, -(-count // _CHUNK))
        each = factors.reciprocal().repeat_interleave(_CHUNK // self._block)
        values = self._unpack_by_operators(torch.cat(rows))
        return (values * each[: len(values), None]).view(-1)[:count]

    def _add(self, codes: torch.Tensor, to: torch.Tensor, sign: float) -> None:
        if to.device.type != "cpu":
            to.add_(self.decode_by_operators(codes.to(to.device), len(to)), alpha=sign)
            return
        if not len(to):
            return
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

    def _pack_by_operators(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _unpack_by_operators(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _factor(values: torch.Tensor, *, least: float = 1.0) -> float:
    """The power of two that makes values about 1, or 1 where they are; NaN: some are not finite.

    Where they lie between `least` and 1, it is 1.

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
    near = abs(exponent) <= _NEAR or least < size < 1.0
    return 1.0 if near else math.ldexp(1.0, max(-_MOST, min(-exponent, _MOST)))


def _factors(chunks: torch.Tensor, *, least: float) -> torch.Tensor:
    """The same of each row, on its device, which is not waited for."""
    size = chunks.square().mean(1).sqrt()
    largest = chunks.abs().amax(1)
    size = torch.where(size.isfinite() & (size > 0.0), size, largest)
    exponent = torch.frexp(size).exponent
    near = (exponent.abs() <= _NEAR) | ((size > least) & (size < 1.0)) | (size == 0.0)
    power = torch.ldexp(torch.ones_like(size), (-exponent).clamp(-_MOST, _MOST))
    return torch.where(size.isfinite(), torch.where(near, 1.0, power), math.nan)


def _scaled(rows: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least value of each row, and what one level is of the range above it."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    return low, (high - low) / (levels - 1)


class Int8(_Rows):
    """One byte a value, in blocks of 256 with fp32 scale and offset: 3.88 times fewer bytes."""

    name = "int8"
    _block = 256
    _row_bytes = 256 + 8
    _least = 2.0**-18  # torch adds 1e-8 to each row's range

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack(rows)
        packed[:, 256:260].view(torch.int32).bitwise_and_(_SCALE_BITS)
        return packed

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        unpacked: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(rows)
        return unpacked

    def _pack_by_operators(self, rows: torch.Tensor) -> torch.Tensor:
        low, scale = _scaled(rows, 256)
        scale = scale.view(torch.int32).bitwise_and(_SCALE_BITS).view(torch.float32)
        codes = torch.nan_to_num((rows - low) / scale).round().clamp(0, 255).to(torch.uint8)
        return torch.cat([codes, scale.view(torch.uint8), low.view(torch.uint8)], 1)

    def _unpack_by_operators(self, rows: torch.Tensor) -> torch.Tensor:
        scale, low = rows[:, 256:].contiguous().view(torch.float32).split(1, dim=1)
        values: torch.Tensor = rows[:, :256].float() * scale + low
        return values


class Int4(_Rows):
    """Four bits a value, in blocks of 32 with fp16 scale and offset: 6.4 times fewer bytes.

    Blocks of 128 take 15% fewer, and cost more of the loss where sums are encoded, too; where they
    are not, between two, it is those: `docs/decisions/0025`, `0041`.

    Args:
        block: Values of a block, a power of two.
        for_pair: See `Codec.for_pair`; None: this itself.
    """

    name = "int4"

    def __init__(self, block: int = 32, for_pair: Codec | None = None) -> None:
        self._block, self._row_bytes, self._for_pair = block, block // 2 + 4, for_pair

    @property
    def for_pair(self) -> Codec:
        """See `Codec.for_pair`."""
        return self if self._for_pair is None else self._for_pair

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.quantized.embedding_bag_4bit_prepack(rows)
        return packed

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        unpacked: torch.Tensor = torch.ops.quantized.embedding_bag_4bit_unpack(rows)
        return unpacked

    def _pack_by_operators(self, rows: torch.Tensor) -> torch.Tensor:
        low, scale = (one.half() for one in _scaled(rows, 16))
        codes = torch.nan_to_num((rows - low.float()) / scale.float()).round().clamp(0, 15)
        even, odd = codes.to(torch.uint8).view(len(rows), -1, 2).unbind(2)
        packed = even | (odd << 4)
        return torch.cat([packed, scale.view(torch.uint8), low.view(torch.uint8)], 1)

    def _unpack_by_operators(self, rows: torch.Tensor) -> torch.Tensor:
        packed, ends = rows.split([self._block // 2, 4], dim=1)
        scale, low = ends.contiguous().view(torch.float16).float().split(1, dim=1)
        codes = torch.stack([packed & 15, packed >> 4], 2).view(len(rows), -1)
        values: torch.Tensor = codes.float() * scale + low
        return values


class TopK(Codec):
    """The largest value of each group: its place, its sign and one of two sizes.

    G groups have at most `ratio` values, a power of two, each: those that lie G apart, so that the
    neighbours of a large one, which are often large, too, are in other groups. Of places that are
    as likely as each other the entropy is log2(ratio) bits, and these are what a code has of them:
    a plane of one bit for all groups after the other, then planes of signs, and of which size it
    is. The sizes of 64 groups each, in bf16, come last: the mean of those that are not above the
    mean, and that of the others. Magnitudes that differ by less than 1 / 2^15 count as equal.

    So all bits are a code: none has a place beyond its group. What one says of values that the last
    groups lack is left out.

    This is for what is sent seldom, and with error feedback: what is not sent is not small.
    """

    name = "topk"

    def __init__(self, ratio: int) -> None:
        self._ratio, self._bits = ratio, ratio.bit_length() - 1

    def bound(self, count: int) -> int:
        """See `Codec.bound`."""
        groups = -(-count // self._ratio)
        return self._plane_bytes(groups) + _SIZES_BYTES * -(-groups // _SIZED)

    def encode(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """See `Codec.encode`."""
        if not len(values):
            return
        groups = -(-len(values) // self._ratio)
        if rest := groups * self._ratio - len(values):
            values = nn.functional.pad(values, (0, rest))
        rows = values.view(self._ratio, groups)
        places = torch.cat([self._largest(some) for some in rows.split(_CHUNK // self._ratio, 1)])
        kept = rows.gather(0, places[None].long())[0].cpu()
        sizes, large = _two_sizes(kept.abs())
        told = places.cpu().short() | kept.signbit().short() << self._bits
        told |= large.short() << (self._bits + 1)
        octets, sized = codes.tensor_split((self._plane_bytes(groups),))
        for k, plane in enumerate(octets.view(self._bits + 2, -1)):
            plane.copy_(torch.from_numpy(np.packbits(told.numpy() & (1 << k))))
        sized.copy_(sizes.view(torch.uint8).view(-1))

    def add(self, codes: torch.Tensor, to: torch.Tensor) -> None:
        """See `Codec.add`."""
        self._add(codes, to, 1)

    def subtract(self, codes: torch.Tensor, from_: torch.Tensor) -> None:
        """See `Codec.subtract`."""
        self._add(codes, from_, -1)

    def _add(self, codes: torch.Tensor, to: torch.Tensor, sign: int) -> None:
        if not len(to):
            return
        groups = -(-len(to) // self._ratio)
        octets, sized = codes.cpu().tensor_split((self._plane_bytes(groups),))
        planes = octets.view(self._bits + 2, -1).numpy()
        told = torch.from_numpy(np.unpackbits(planes, axis=1, count=groups))
        *places, negative, large = told
        at = torch.arange(groups)
        for k, place in enumerate(places):
            at.add_(place, alpha=groups << k)
        of_blocks = sized.clone().view(torch.bfloat16).float().view(-1, 2)
        small, big = of_blocks.repeat_interleave(_SIZED, 0)[:groups].unbind(1)
        values = torch.where(large.bool(), big, small).mul_(1.0 - 2.0 * negative)
        if groups * self._ratio > len(to):
            there = at < len(to)
            at, values = at[there], values[there]
        to.index_add_(0, at.to(to.device), values.to(to.device), alpha=sign)

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        """In which row each column is largest: as integers the bits of magnitudes are in order.

        The last of these bits make room for the row's number.
        """
        order = rows.view(torch.int32).bitwise_and(_MAGNITUDE & -self._ratio)
        order |= torch.arange(self._ratio, dtype=torch.int32, device=rows.device)[:, None]
        return order.amax(0) & (self._ratio - 1)

    def _plane_bytes(self, groups: int) -> int:
        return (self._bits + 2) * -(-groups // 8)


def _two_sizes(magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of each block, shape (blocks, 2), in bf16; and which have the larger one."""
    blocks = nn.functional.pad(magnitudes, (0, -len(magnitudes) % _SIZED)).view(-1, _SIZED)
    there = torch.arange(blocks.numel()).view_as(blocks) < len(magnitudes)
    large = blocks > _mean(blocks, there)[:, None]
    sizes = torch.stack([_mean(blocks, there & ~large), _mean(blocks, large)], 1)
    return sizes.bfloat16(), large.view(-1)[: len(magnitudes)]


def _mean(blocks: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Of these of each block; 0 where there are none. A sum could be beyond what fp32 holds."""
    return (blocks * (of / of.sum(1, keepdim=True).clamp_min(1))).sum(1)


CODECS: dict[str, Codec] = {
    one.name: one for one in (Full(), Brain(), Int8(), Int4(for_pair=Int4(128)))
}
