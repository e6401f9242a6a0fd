"""Text: whole files to train on and to hold out, by name; and windows packed from documents."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from raycloud.errors import DataError
from raycloud.task import Source, Splits

_HELD_OUT_OF = 20  # one file in twenty is held out
_TEXT_SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})


def text_sources(path: str | None) -> Splits:
    """Text, a file in a row: in column `text`.

    Of a directory about one file in twenty is held out, chosen by its name below it; of a single
    file of this machine its last twentieth. None: the source text of the running Python's own
    standard library, without its tests.

    Raises:
        DataError: The file cannot be read, or is too short.
    """
    if path is not None and Path(path).is_file():
        return _one_file(Path(path))
    keep = _of_library if path is None else _of_anyone
    where = path or sysconfig.get_paths()["stdlib"]
    train, held_out = (
        Source(path=where, format="text", unit="file", select=partial(_is_of, keep, held))
        for held in (False, True)
    )
    return Splits(train=train, held_out=held_out)


def _is_of(keep: Callable[[str], bool], held_out: bool, name: str) -> bool:  # noqa: FBT001 - for `partial`
    """Whether a file is of the text to train on, or of that held out, by its name."""
    return keep(name) and (crc32(name.encode()) % _HELD_OUT_OF == 0) == held_out


def _of_library(name: str) -> bool:
    return name.endswith(".py") and _LEFT_OUT.isdisjoint(PurePosixPath(name).parts[:-1])


def _of_anyone(name: str) -> bool:
    return PurePosixPath(name).suffix in _TEXT_SUFFIXES


def _one_file(file: Path) -> Splits:
    import pyarrow as pa  # noqa: PLC0415 - only a single file needs it

    try:
        content = file.read_text("utf-8", errors="replace")
    except OSError as error:
        raise DataError(
            f"the text {str(file)!r} cannot be read: {error.strerror}",
            hint="set data.path to a text file or a directory of text files",
        ) from error
    cut = len(content) - len(content) // _HELD_OUT_OF
    if cut == len(content):
        raise DataError(
            f"the text {str(file)!r} of {len(content)} characters is too short to hold some out",
            hint=f"give more text: its last {_HELD_OUT_OF}th is held out",
        )

    def part(name: str, text: str) -> Source:
        table = pa.table({"text": [text], "path": [str(file)]})
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        return Source(dataset=table, key=f"text-{name}-{digest}")

    return Splits(train=part("train", content[:cut]), held_out=part("held-out", content[cut:]))


Tokens = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Windows of a stream of tokens.

    Attributes:
        windows: Shape (windows, length + 1): what to read, and the same shifted by one to predict.
        counts: Of each, how many tokens are to predict: `length` but in a last one that is padded.
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
