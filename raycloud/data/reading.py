"""What the readers of all formats share: opening an input, and saying what is wrong with it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa

from raycloud.data.formats import codec_of
from raycloud.data.hush import hushed
from raycloud.data.location import open_file
from raycloud.data.roots import paths_of
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.data.patience import Pause
    from raycloud.task import Source

_FOLDER = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")
_NOTHING = "__HIVE_DEFAULT_PARTITION__"
_PART_BYTES = 2**20
_AGAIN = "write or fetch the file again, or leave it out by `Source.select`"


def text_of(source: Source, file: Input, opened: pa.NativeFile) -> pa.NativeFile:
    """The file's text as UTF-8, from where `opened` stands; decompressed.

    Raises:
        DataError: It is in another encoding than the source says, as far as its beginning tells.
    """
    codec = codec_of(file.path)
    stream = pa.CompressedInputStream(opened, codec) if codec else opened
    if not is_utf8(source):
        return _Decoded(stream, source.encoding, file.path).stream
    return stream


def is_utf8(source: Source) -> bool:
    """Whether texts need no decoding.

    Raises:
        DataError: There is no such encoding.
    """
    try:
        return codecs.lookup(source.encoding).name in {"utf-8", "ascii", "utf-8-sig"}
    except LookupError:
        raise DataError(
            f"Source.encoding = {source.encoding!r}: there is no such encoding",
            hint="give a name that Python knows, such as latin-1, cp1252 or utf-16",
        ) from None


def check_encoding(source: Source, file: Input, head: bytes) -> None:
    """Refuse UTF-16 that is taken for UTF-8.

    Raises:
        DataError: It is.
    """
    if is_utf8(source) and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{file.path!r} is UTF-16 text, by its first two bytes",
            hint="give Source.encoding='utf-16'",
        )


class _Decoded:
    """Text of another encoding as a stream of UTF-8."""

    def __init__(self, stream: pa.NativeFile, encoding: str, path: str) -> None:
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._path, self._encoding = path, encoding
        self.stream = pa.PythonFile(self, mode="r")
        self._from, self._rest, self.closed = stream, b"", False

    def read(self, size: int = -1) -> bytes:
        """The next bytes, up to so many."""
        while size < 0 or len(self._rest) < size:
            come = self._from.read(_PART_BYTES)
            try:
                self._rest += self._decoder.decode(come, final=not come).encode()
            except UnicodeDecodeError as error:
                raise OSError(f"it is no {self._encoding} text: {error.reason}") from error
            if not come:
                break
        size = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def close(self) -> None:
        """The file is closed by who has opened it."""
        self.closed = True

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is read once, from its beginning."""
        return False


@contextmanager
def reading(source: Source, file: Input, pause: Pause) -> Iterator[pa.NativeFile]:
    """The input, open; what goes wrong with it inside is a `DataError` that names it."""
    try:
        with open_file(source, file.path, pause=pause) as opened:
            size = opened.size()
            if size != file.bytes:
                raise DataError(
                    f"{file.path!r} has changed: it was of {file.bytes} bytes when it was found, "
                    f"and is of {size}",
                    hint="leave files as they are while a run reads them",
                )
            yield opened
    except (pa.ArrowException, OSError, EOFError) as error:
        text = hushed(str(error), paths_of(source)).strip() or type(error).__name__
        raise DataError(f"{file.path!r} is damaged: {text.splitlines()[0]}", hint=_AGAIN) from error


def folders_of(path: str) -> dict[str, str | None]:
    """What the names of a file's directories say, as Hive writes them.

    >>> folders_of("/data/day=1/kind=a%20b/part.parquet")
    {'day': '1', 'kind': 'a b'}
    """
    found = (_FOLDER.fullmatch(name) for name in path.split("/")[:-1])
    said = {one["name"]: unquote(one["value"]) for one in found if one is not None}
    return {name: None if value == _NOTHING else value for name, value in said.items()}


def chosen(source: Source, there: Sequence[str], file: str) -> list[str]:
    """The columns to read of a file that has the columns `there`.

    Raises:
        DataError: Neither the file nor its directories have one.
    """
    if source.columns is None:
        return list(there)
    missing = [name for name in source.columns if name not in there]
    if set(missing) - folders_of(file).keys():
        raise DataError(
            f"{file!r} has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, there)) or 'none'}",
            hint="correct Source.columns",
        )
    return [name for name in source.columns if name in there]
