"""Text as UTF-8, cut at lines; and files that are a row each: texts and images."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raycloud.data.clean import convert_columns
from raycloud.data.formats import Piece, Slice, codec_of, columns_to_read
from raycloud.data.location import AT_ONCE, is_local, open_input
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.data.retry import Pause
    from raycloud.task import Source

_BLOCK_BYTES = 32 * 2**20
_REST_BYTES = 2**16
_LARGEST_BYTES = 64 * 2**20  # a line, or a file that is unpacked: a few bytes can do so without end
_TOO_LONG = f"a line is longer than {_LARGEST_BYTES} bytes"
_READ_BYTES = 2**20
_BOM = b"\xef\xbb\xbf"
_NOT_UTF8 = "is not UTF-8"


def text_of(source: Source, file: Input, opened: pa.NativeFile) -> pa.NativeFile:
    """The file's text as UTF-8, from where `opened` stands; decompressed."""
    codec = codec_of(file.path)
    stream = pa.CompressedInputStream(opened, codec) if codec else opened
    if is_utf8(source):
        return stream
    return pa.transcoding_input_stream(stream, source.encoding, "utf-8")


def is_utf8(source: Source) -> bool:
    """Whether texts need no decoding; a `DataError` where there is no such encoding."""
    try:
        return codecs.lookup(source.encoding).name in {"utf-8", "ascii", "utf-8-sig"}
    except LookupError:
        raise DataError(
            f"Source.encoding = {source.encoding!r}: there is no such encoding",
            hint="give a name that Python knows, such as latin-1, cp1252 or utf-16",
        ) from None


def check_encoding(source: Source, file: Input, head: bytes) -> None:
    """Refuse UTF-16 that is taken for UTF-8, by a `DataError`."""
    if is_utf8(source) and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{file.path!r} is UTF-16 text, by its first two bytes",
            hint="give Source.encoding='utf-16'",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Whole lines of a file; the first one's number in the slice; `before` counts those before."""

    data: bytes
    file: str
    first: int = 0
    before: Callable[[], int] = int

    def split(self) -> list[bytes]:
        """Each line, without its end."""
        lines = self.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return [line[:-1] if line.endswith(b"\r") else line for line in lines]

    def piece(
        self, table: pa.Table, numbers: np.ndarray[Any, Any] | None, bad: Mapping[int, str]
    ) -> Piece:
        """The rows of these lines, by their numbers among these; None: all, one after another."""
        numbers = np.arange(table.num_rows) if numbers is None else numbers
        return Piece(
            table=table,
            file=self.file,
            numbers=numbers + self.first,
            before=self.before,
            bad={self.first + row: why for row, why in bad.items()},
        )


def lines_of(source: Source, piece: Slice, pause: Pause) -> Iterator[Lines]:
    """The lines that begin in the slice, many at a time."""
    for file in piece.inputs:
        if piece.stop:
            yield from _lines_between(source, file, piece, pause)
            continue
        with open_input(source, file, pause) as opened:
            first = 0
            for data in _blocks(text_of(source, file, opened)):
                if not first:
                    check_encoding(source, file, data)
                yield Lines(data=data, file=file.path, first=first)
                first += data.count(b"\n")


def read_lines(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """Each line a row, of `text` and `path`; one that is not UTF-8 is bad."""
    for lines in lines_of(source, piece, pause):
        texts = pa.array(lines.split(), pa.binary())
        table = pa.table({"text": texts, "path": pa.repeat(lines.file, len(texts))})
        good = convert_columns(table, {"text": pa.string()})
        table = good.table.select(columns_to_read(source, table.column_names, lines.file))
        yield lines.piece(table, good.kept, dict.fromkeys(good.bad, _NOT_UTF8))


def line_ranges(size: int, target: int) -> list[tuple[int, int]]:
    """Equal ranges of bytes of about `target`.

    >>> line_ranges(100, 40)
    [(0, 34), (34, 67), (67, 100)]
    """
    count = -(-size // target)
    return list(pairwise(-(-size * i // count) for i in range(count + 1)))


def _blocks(stream: pa.NativeFile) -> Iterator[bytes]:
    """Whole lines, about 32 MB at a time."""
    rest: list[bytes] = []
    head = True
    while data := stream.read(_BLOCK_BYTES):
        if head:
            data, head = data.removeprefix(_BOM), False
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, data[:end]])
            rest = []
        rest.append(data[end:])
        if sum(map(len, rest)) > _LARGEST_BYTES:
            raise OSError(_TOO_LONG)
    if last := b"".join(rest):
        yield last


def _lines_between(source: Source, file: Input, piece: Slice, pause: Pause) -> Iterator[Lines]:
    with open_input(source, file, pause) as opened:
        start = max(piece.start - 1, 0)  # a line begins at `start` where the byte before ends one
        opened.seek(start)
        data = opened.read(piece.stop - start)
        begin = piece.start
        if piece.start:
            end = data.find(b"\n") + 1
            begin = start + end
            data = data[end:] if end else b""
        else:
            data = data.removeprefix(_BOM)
        if not data:
            return
        parts = [data]
        while not parts[-1].endswith(b"\n") and (more := opened.read(_REST_BYTES)):
            parts.append(more[: more.find(b"\n") + 1] or more)
            if len(parts) > _LARGEST_BYTES // _REST_BYTES:
                raise OSError(_TOO_LONG)

    @cache
    def before() -> int:
        with open_input(source, file, pause) as opened:
            starts = range(0, begin, _BLOCK_BYTES)
            return sum(opened.read(min(_BLOCK_BYTES, begin - s)).count(b"\n") for s in starts)

    yield Lines(data=b"".join(parts), file=file.path, before=before)


def read_whole(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """Each file a row: of `text` and `path`, or of `image`, `path` and `label` (its folder's name).

    A text that is not UTF-8 is bad.
    """
    paths = [file.path for file in piece.inputs]
    contents = pa.array(_contents(source, piece, pause), pa.binary())
    if piece.format == "images":
        labels = [path.rpartition("/")[0].rpartition("/")[2] for path in paths]
        good = convert_columns(pa.table({"image": contents, "path": paths, "label": labels}), {})
    else:
        good = convert_columns(pa.table({"text": contents, "path": paths}), {"text": pa.string()})
    yield Piece(
        table=good.table.select(columns_to_read(source, good.table.column_names, paths[0])),
        file=paths[0],
        files=paths,
        numbers=good.kept,
        bad=dict.fromkeys(good.bad, _NOT_UTF8),
    )


def _contents(source: Source, piece: Slice, pause: Pause) -> list[bytes]:
    def content(file: Input) -> bytes:
        with open_input(source, file, pause) as opened:
            stream = opened if piece.format == "images" else text_of(source, file, opened)
            return bytes(opened.read()) if stream is opened else _unpacked(stream)

    if all(is_local(file.path) for file in piece.inputs):
        return [content(file) for file in piece.inputs]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="raycloud-read") as pool:
        return list(pool.map(content, piece.inputs))


def _unpacked(stream: pa.NativeFile) -> bytes:
    """The whole content; in an array of its own, which is not joined from parts."""
    content = bytearray()
    while data := stream.read(_READ_BYTES):
        content += data
        if len(content) > _LARGEST_BYTES:
            raise OSError(f"it unpacks to more than {_LARGEST_BYTES} bytes")
    return bytes(content)
