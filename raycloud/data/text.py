"""Text to train on, and text held out: whole files, chosen by name."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from zlib import crc32

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
