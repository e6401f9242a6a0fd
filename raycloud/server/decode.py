"""Codes of gradients, as `sync.codecs` writes them, back to fp32: the same values, by numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raycloud.errors import InternalError

if TYPE_CHECKING:
    from raycloud.net.messages import Array

_CHUNK = 1 << 17  # values that share a factor
_ROWS = {"int8": (256, 264), "int4": (32, 20)}  # values of a block, and its bytes


def decoded(codec: str, codes: Array, rows: int, width: int) -> Array:
    """The gradients that codes stand for, shape (rows, width); plain ones are as they are.

    Raises:
        InternalError: There is no such codec, or these are not so many codes.
    """
    if codec == "none":
        values = codes
    elif codec == "bf16":
        values = (codes.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif codec in _ROWS:
        values = _blocks(codec, codes, rows * width)
    else:
        raise InternalError(f"no server knows the codec {codec!r}")
    if values.size != rows * width:
        raise InternalError(f"{values.size} values came for {rows} rows of {width}")
    return values.reshape(rows, width)


def _blocks(codec: str, codes: Array, count: int) -> Array:
    block, size = _ROWS[codec]
    chunks, blocks = -(-count // _CHUNK), -(-count // block)
    if len(codes) != 4 * chunks + size * blocks:
        raise InternalError(f"{len(codes)} bytes came for {count} values as {codec}")
    factors = codes[: 4 * chunks].view(np.float32)
    packed = codes[4 * chunks :].reshape(blocks, size)
    values = _bytes(packed) if codec == "int8" else _nibbles(packed)
    each = np.repeat(np.float32(1.0) / factors, _CHUNK // block)[:blocks]
    scaled: Array = values * each[:, None]
    return scaled.reshape(-1)[:count]


def _bytes(packed: Array) -> Array:
    scale, low = packed[:, 256:].copy().view(np.float32).T
    values: Array = packed[:, :256].astype(np.float32) * scale[:, None] + low[:, None]
    return values


def _nibbles(packed: Array) -> Array:
    scale, low = packed[:, 16:].copy().view(np.float16).astype(np.float32).T
    codes = np.stack([packed[:, :16] & 15, packed[:, :16] >> 4], 2).reshape(len(packed), -1)
    values: Array = codes.astype(np.float32) * scale[:, None] + low[:, None]
    return values
