"""Files of lines, text and JSON: cut at lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from raycloud.data.convert import sift
from raycloud.data.index import BadRow, Input
from raycloud.data.pieces import NAMED_BAD_ROWS, Piece, Slice
from raycloud.data.reading import check_encoding, chosen, reading, text_of

if TYPE_CHECKING:
    from raycloud.data.patience import Pause
    from raycloud.task import Source

_BLOCK_BYTES = 32 * 2**20
_REST_BYTES = 2**16
_LINE_BYTES = 64 * 2**20  # the longest line: a few bytes can unpack to one without end
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Whole lines of a file; `first` is the number of the first one, in the slice."""

    data: bytes
    file: str
    first: int
    rows_before: Callable[[], int] | None = None

    def split(self) -> list[bytes]:
        """Each line, without its end."""
        lines = self.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return [line[:-1] if line.endswith(b"\r") else line for line in lines]


def lines_of(source: Source, piece: Slice, pause: Pause) -> Iterator[Lines]:
    """The lines that begin in the slice, many at a time."""
    for file in piece.inputs:
        if piece.stop:
            yield from _range(source, file, piece, pause)
            continue
        with reading(source, file, pause) as opened:
            first = 0
            for data in _blocks(text_of(source, file, opened)):
                if not first:
                    check_encoding(source, file, data)
                yield Lines(data=data, file=file.path, first=first)
                first += data.count(b"\n")


def read_lines(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """Each line a row, of `text` and `path`; one that is not UTF-8 is bad."""
    for lines in lines_of(source, piece, pause):
        names = chosen(source, ("text", "path"), lines.file)
        table = pa.table({"text": pa.array(lines.split(), pa.binary())})
        good = sift(table, {"text": pa.string()})
        columns = {"text": good.table["text"], "path": [lines.file] * good.table.num_rows}
        bad = zip(good.bad[:NAMED_BAD_ROWS], good.why, strict=False)
        yield Piece(
            table=pa.table({name: columns[name] for name in names}),
            file=lines.file,
            first_row=lines.first,
            numbers=good.kept,
            rows_before=lines.rows_before,
            bad=tuple(
                BadRow(file=lines.file, row=lines.first + row, why="is not UTF-8") for row, _ in bad
            ),
            bad_rows=len(good.bad),
        )


def line_ranges(size: int, target: int) -> list[tuple[int, int]]:
    """Equal ranges of bytes of about `target`.

    >>> line_ranges(100, 40)
    [(0, 34), (34, 67), (67, 100)]
    """
    count = -(-size // target)
    edges = [-(-size * i // count) for i in range(count + 1)]
    return list(pairwise(edges))


def _blocks(stream: pa.NativeFile) -> Iterator[bytes]:
    """Whole lines, about 32 MB at a time."""
    rest: list[bytes] = []
    head = True
    while data := stream.read(_BLOCK_BYTES):
        if head and data.startswith(_BOM):
            data = data[len(_BOM) :]
        head = False
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, data[:end]])
            rest = []
        rest.append(data[end:])
        if sum(map(len, rest)) > _LINE_BYTES:
            raise OSError(f"a line is longer than {_LINE_BYTES} bytes")
    if last := b"".join(rest):
        yield last


def _range(source: Source, file: Input, piece: Slice, pause: Pause) -> Iterator[Lines]:
    with reading(source, file, pause) as opened:
        start = max(piece.start - 1, 0)  # a line begins at `start` where the byte before ends one
        opened.seek(start)
        data = opened.read(piece.stop - start)
        begin = piece.start
        if piece.start:
            end = data.find(b"\n") + 1
            begin = start + end
            data = data[end:] if end else b""
        elif data.startswith(_BOM):
            data = data[len(_BOM) :]
        if not data:
            return
        parts = [data]
        while not parts[-1].endswith(b"\n") and (more := opened.read(_REST_BYTES)):
            parts.append(more[: more.find(b"\n") + 1] or more)
            if len(parts) > _LINE_BYTES // _REST_BYTES:
                raise OSError(f"a line is longer than {_LINE_BYTES} bytes")
    yield Lines(
        data=b"".join(parts),
        file=file.path,
        first=0,
        rows_before=_lines_before(source, file, begin, pause),
    )


def _lines_before(source: Source, file: Input, stop: int, pause: Pause) -> Callable[[], int]:
    @cache
    def count() -> int:
        with reading(source, file, pause) as opened:
            found = 0
            for start in range(0, stop, _BLOCK_BYTES):
                found += opened.read(min(_BLOCK_BYTES, stop - start)).count(b"\n")
            return found

    return count
