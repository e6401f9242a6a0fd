"""Text as bytes: whole files held out, and windows cut from the rest."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from raycloud.errors import DataError

_HELD_OUT_OF = 20  # one file in twenty is held out
_TEXT_SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Text to train on and text held out, as bytes."""

    train: Bytes
    held_out: Bytes


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


def read_text(path: str | Path) -> Corpus:
    """A file, or all text files below a directory, in the order of their names.

    Of a directory, whole files are held out (about one in twenty, chosen by name); of a single
    file, its last twentieth.

    Raises:
        DataError: Nothing is there, or it cannot be read.
    """
    root = Path(path)
    if root.is_dir():
        files = sorted(f for f in root.rglob("*") if f.suffix in _TEXT_SUFFIXES and f.is_file())
        return _split(root, files)
    try:
        text = np.frombuffer(root.read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise DataError(
            f"the text {str(path)!r} cannot be read: {error.strerror}",
            hint="set data.path to a text file or a directory of text files",
        ) from error
    cut = len(text) - len(text) // _HELD_OUT_OF
    return Corpus(train=text[:cut], held_out=text[cut:])


def standard_library() -> Corpus:
    """The source text of the running Python's own standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # not even looked into
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return _split(root, sorted(files))


def _split(root: Path, files: Iterable[Path]) -> Corpus:
    train: list[bytes] = []
    held_out: list[bytes] = []
    for file in files:
        name = file.relative_to(root).as_posix()
        part = held_out if crc32(name.encode()) % _HELD_OUT_OF == 0 else train
        part.append(file.read_bytes())
    if not train or not held_out:
        raise DataError(
            f"{str(root)!r} has too few text files to hold some out",
            hint=f"files ending in {', '.join(sorted(_TEXT_SUFFIXES))} are read; about one in "
            f"{_HELD_OUT_OF} is held out",
        )
    return Corpus(
        train=np.frombuffer(b"".join(train), dtype=np.uint8),
        held_out=np.frombuffer(b"".join(held_out), dtype=np.uint8),
    )
