"""Packing documents into windows of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Windows of a stream of tokens.

    Attributes:
        windows: Shape (windows, length + 1): what to read, and the same shifted by one to predict.
        counts: Of each window, how many of its tokens, from the second on, are to predict: `length`
            but in a last one that is padded.
        dropped: Tokens at the end of the stream that no window predicts.
    """

    windows: Tokens
    counts: npt.NDArray[np.int64]
    dropped: int


def pack(
    texts: Sequence[bytes | str | Tokens],
    length: int,
    *,
    separator: bytes | str | int | Sequence[int] | Tokens,
    pad: int | None = None,
) -> Packed:
    """Join documents with a separator, and cut them into windows that overlap by one token.

    Window i is `stream[i * length : i * length + length + 1]`, so that every token but the stream's
    first is predicted once.

    Args:
        texts: Documents: text, of which each byte of UTF-8 is a token, or arrays of tokens.
        length: Tokens that a window predicts.
        separator: Stands between two documents, and not at the ends.
        pad: Token that fills up the last window; None: what fills none is dropped.

    >>> packed = pack(["abc", "de"], 2, separator="|")
    >>> [bytes(window) for window in packed.windows], packed.dropped
    ([b'abc', b'c|d'], 1)
    """
    if length < 1:
        raise ValueError(f"length = {length}: a window predicts at least one token")
    stream = _stream(texts, separator)
    to_predict = max(len(stream) - 1, 0)
    whole, rest = divmod(to_predict, length)
    counts = np.full(whole, length, np.int64)
    if rest and pad is not None:
        filler = np.repeat(_fitting("pad", np.array([pad]), stream.dtype), length - rest)
        stream = np.concatenate([stream, filler])
        counts = np.append(counts, rest)
        rest = 0
    if not len(counts):
        return Packed(windows=np.zeros((0, length + 1), stream.dtype), counts=counts, dropped=rest)
    views = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]
    return Packed(windows=views[: len(counts)].copy(), counts=counts, dropped=rest)


def _stream(texts: Sequence[bytes | str | Tokens], separator: Any) -> Tokens:
    documents = [_tokens(text) for text in texts]
    kind = np.result_type(*documents) if documents else np.dtype(np.uint8)
    between = _tokens([separator] if isinstance(separator, int) else separator)
    between = _fitting("separator", between, kind)
    parts = [part for document in documents for part in (between, document)][1:]
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _fitting(name: str, tokens: Tokens, kind: np.dtype[Any]) -> Tokens:
    limits = np.iinfo(kind)
    if tokens.size and (tokens.min() < limits.min or tokens.max() > limits.max):
        raise ValueError(f"{name} = {tokens.tolist()}: not all are tokens of type {kind}")
    return tokens.astype(kind)


def _tokens(text: Any) -> Tokens:
    if isinstance(text, str):
        text = text.encode()
    if isinstance(text, bytes | bytearray | memoryview):
        return np.frombuffer(text, np.uint8)
    tokens = np.asarray(text)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"a document is text or a 1-D array of tokens, not {tokens.dtype}")
    return tokens if tokens.size else tokens.astype(np.uint8)
