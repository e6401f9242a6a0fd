"""Text to train on, and text held out: whole files, chosen by name; and windows cut from it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from zlib import crc32

import numpy as np
import numpy.typing as npt

from raycloud.errors import DataError
from raycloud.task import Source, Splits

_HELD_OUT_OF = 20  # one file in twenty is held out
_TEXT_SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})

Bytes = npt.NDArray[np.uint8]


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
    return Splits(
        train=Source(path=where, format="text", unit="file", select=_Part(keep, held_out=False)),
        held_out=Source(path=where, format="text", unit="file", select=_Part(keep, held_out=True)),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Whether a file is of the text to train on, or of that held out, by its name."""

    keep: Callable[[str], bool]
    held_out: bool

    def __call__(self, name: str) -> bool:
        return self.keep(name) and (crc32(name.encode()) % _HELD_OUT_OF == 0) == self.held_out


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


class Windows:
    """A text cut into samples: `length` bytes to read, and the same shifted by one to predict.

    Sample i is `text[i * length : i * length + length + 1]`, shape (length + 1,), uint8.
    """

    def __init__(self, text: Bytes, length: int) -> None:
        """Raises `DataError` where the text is shorter than one window."""
        if len(text) <= length:
            raise DataError(
                f"a text of {len(text)} bytes is too short for a window of {length}",
                hint="give more text, or a shorter window",
            )
        self._text = text
        self._length = length

    def __len__(self) -> int:
        """Number of whole windows."""
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> Bytes:
        """The window `index`, without a copy."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self._length
        return self._text[start : start + self._length + 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text to train on and text held out, as bytes."""

    train: Bytes
    held_out: Bytes


def standard_library() -> Corpus:
    """What `text_sources(None)` selects, read at once, in the order of the names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # not even looked into
        names += [Path(folder, file).relative_to(root).as_posix() for file in files]

    def part(*, held_out: bool) -> Bytes:
        wanted = _Part(_of_library, held_out=held_out)
        chosen = [root / name for name in sorted(names) if wanted(name)]
        return np.frombuffer(b"".join(file.read_bytes() for file in chosen), dtype=np.uint8)

    return Corpus(train=part(held_out=False), held_out=part(held_out=True))
