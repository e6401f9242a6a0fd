"""Parquet and Arrow files: cut at row groups and record batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raycloud.data.formats import Piece, Slice, chosen
from raycloud.data.location import reading

if TYPE_CHECKING:
    from raycloud.data.index import Input
    from raycloud.data.retry import Pause
    from raycloud.task import Source

_BATCH_BYTES = 8 * 2**20  # of decoded rows at once
_BATCH_ROWS = 65536
_MAGIC = b"ARROW1"


def holds_bytes(source: Source, file: Input, format_: str, pause: Pause) -> bool:
    """Whether rows hold bytes, such as images, which grow when they are decoded."""
    with reading(source, file, pause) as opened:
        if format_ == "parquet":
            schema = pq.ParquetFile(opened).schema_arrow
        else:
            schema = _arrow_reader(opened).schema
        names = chosen(source, schema.names, file.path)
        return any(_has_bytes(schema.field(name).type) for name in names)


def parquet_parts(source: Source, file: Input, pause: Pause) -> list[int]:
    """Encoded bytes of the columns to read of each row group."""
    with reading(source, file, pause) as opened:
        parquet = pq.ParquetFile(opened)
        names = set(chosen(source, parquet.schema_arrow.names, file.path))
        groups = map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups))
        return [_encoded_bytes(group, names) for group in groups]


def arrow_parts(source: Source, file: Input, pause: Pause) -> list[int]:
    """About how many bytes each record batch has; of a stream, which has no index, one part."""
    with reading(source, file, pause) as opened:
        count = getattr(_arrow_reader(opened), "num_record_batches", 1)
        return [file.bytes // max(count, 1)] * count


def read_parquet(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """The rows of some row groups, or of whole files."""
    for file in piece.inputs:
        with reading(source, file, pause) as opened:
            parquet = pq.ParquetFile(opened, pre_buffer=True)
            metadata = parquet.metadata
            names = chosen(source, parquet.schema_arrow.names, file.path)
            row = sum(metadata.row_group(g).num_rows for g in range(piece.start))
            for group in range(piece.start, piece.stop or metadata.num_row_groups):
                part = metadata.row_group(group)
                size = max(1, _BATCH_BYTES * part.num_rows // max(1, part.total_byte_size))
                for batch in parquet.iter_batches(
                    batch_size=min(size, _BATCH_ROWS),
                    row_groups=[group],
                    columns=names,
                    use_threads=False,
                ):
                    table = pa.Table.from_batches([batch]).select(names)
                    numbers = np.arange(row, row + batch.num_rows)
                    yield Piece(table=table, file=file.path, numbers=numbers)
                    row += batch.num_rows


def read_arrow(source: Source, piece: Slice, pause: Pause) -> Iterator[Piece]:
    """The rows of some record batches, or of whole files or streams."""
    for file in piece.inputs:

        def before(file: Input = file) -> int:
            with reading(source, file, pause) as opened:
                reader = pa.ipc.open_file(opened)
                return sum(reader.get_batch(number).num_rows for number in range(piece.start))

        with reading(source, file, pause) as opened:
            reader = _arrow_reader(opened)
            names = chosen(source, reader.schema.names, file.path)
            row = 0
            for batch in _batches(reader, piece):
                batch.validate(full=True)  # else texts may lie where the file has ended
                yield Piece(
                    table=pa.Table.from_batches([batch]).select(names),
                    file=file.path,
                    numbers=np.arange(row, row + batch.num_rows),
                    before=before if piece.start else int,
                )
                row += batch.num_rows


def _batches(reader: Any, piece: Slice) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(piece.start, piece.stop or reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def _arrow_reader(opened: pa.NativeFile) -> Any:
    """A reader of a file or of a stream, whichever it is."""
    head = opened.read(len(_MAGIC))
    opened.seek(0)
    return pa.ipc.open_file(opened) if head == _MAGIC else pa.ipc.open_stream(opened)


def _encoded_bytes(group: Any, names: set[str]) -> int:
    columns = map(group.column, range(group.num_columns))
    return sum(
        column.total_compressed_size
        for column in columns
        if column.path_in_schema.partition(".")[0] in names
    )


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return any(_has_bytes(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
