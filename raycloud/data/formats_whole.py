"""Files that are a row each: images, and texts that are not cut into lines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pyarrow as pa

from raycloud.data.convert import sift
from raycloud.data.formats import codec_of
from raycloud.data.index import BadRow, Input
from raycloud.data.location import is_local
from raycloud.data.pieces import NAMED_BAD_ROWS, Piece, Slice
from raycloud.data.reading import chosen, reading

if TYPE_CHECKING:
    from raycloud.data.patience import Pause
    from raycloud.task import Source

_UNPACKED_BYTES = 64 * 2**20  # a few bytes can unpack to a file without end
_READ_BYTES = 2**20
_AT_ONCE = 16  # files of another machine, each of which is mostly waited for


def read_images(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """Each file a row, of `image` (bytes), `path` and `label` (its folder's name)."""
    paths = [file.path for file in piece.inputs]
    columns = {
        "image": pa.array(_contents(source, piece, pause), pa.binary()),
        "path": paths,
        "label": [path.rpartition("/")[0].rpartition("/")[2] for path in paths],
    }
    names = chosen(source, tuple(columns), paths[0])
    table = pa.table({name: columns[name] for name in names})
    yield Piece(table=table, file=paths[0], files=paths)


def read_texts(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """Each file a row, of `text` and `path`; one that is not UTF-8 is bad."""
    paths = [file.path for file in piece.inputs]
    names = chosen(source, ("text", "path"), paths[0])
    contents = pa.array(_contents(source, piece, pause), pa.binary())
    good = sift(pa.table({"text": contents}), {"text": pa.string()})
    kept = range(len(paths)) if good.kept is None else good.kept.tolist()
    paths_kept = [paths[row] for row in kept]
    columns = {"text": good.table["text"], "path": paths_kept}
    yield Piece(
        table=pa.table({name: columns[name] for name in names}),
        file=paths[0],
        files=paths_kept,
        bad=tuple(
            BadRow(file=paths[row], row=0, why="is not UTF-8") for row in good.bad[:NAMED_BAD_ROWS]
        ),
        bad_rows=len(good.bad),
    )


def _contents(source: Source, piece: Slice, pause: Pause) -> list[bytes]:
    def content(file: Input) -> bytes:
        codec = codec_of(file.path)
        with reading(source, file, pause) as opened:
            if codec is None:
                return bytes(opened.read())
            return _unpacked(pa.CompressedInputStream(opened, codec))

    if all(is_local(file.path) for file in piece.inputs):
        return [content(file) for file in piece.inputs]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="raycloud-read") as pool:
        return list(pool.map(content, piece.inputs))


def _unpacked(stream: pa.NativeFile) -> bytes:
    """The whole content; in an array of its own, which is not joined from parts."""
    content = bytearray()
    while data := stream.read(_READ_BYTES):
        content += data
        if len(content) > _UNPACKED_BYTES:
            raise OSError(f"it unpacks to more than {_UNPACKED_BYTES} bytes")
    return bytes(content)
