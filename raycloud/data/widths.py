"""How many bytes each row of a table takes, without those of Arrow's own bookkeeping."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Width = int | npt.NDArray[np.int64]  # of every row alike, or of each


def bytes_of_rows(table: pa.Table) -> Width:
    """Bytes of values in each row: one number where all rows are of one size, at least 1.

    >>> bytes_of_rows(pa.table({"x": pa.array([1, 2], pa.int32()), "s": ["a", "bcd"]}))
    array([5, 7])
    >>> bytes_of_rows(pa.table({"x": pa.array([1, 2], pa.int32())}))
    4
    """
    total: Width = 0
    for column in table.columns:
        parts = [_width(chunk) for chunk in column.chunks]
        if all(isinstance(part, int) for part in parts) and len(set(map(str, parts))) <= 1:
            total = total + (parts[0] if parts else 0)
        else:
            spread = [
                np.broadcast_to(part, len(chunk))
                for part, chunk in zip(parts, column.chunks, strict=True)
            ]
            total = total + np.concatenate(spread)
    return max(1, total) if isinstance(total, int) else np.maximum(total, 1)


def _width(array: pa.Array) -> Width:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _width(array.storage)
    if pa.types.is_dictionary(kind):
        return _width(array.indices)
    if pa.types.is_struct(kind):
        return sum((_width(part) for part in array.flatten()), start=0)
    if pa.types.is_fixed_size_list(kind):
        below = _width(array.flatten())
        if isinstance(below, int):
            return below * int(kind.list_size)
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind):
        return -(-int(kind.bit_width) // 8)
    if pa.types.is_null(kind):
        return 0
    return _lengths(array) * _each(array)


def _lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each text, or values of each list; of a missing one none."""
    import pyarrow.compute as pc  # noqa: PLC0415 - few need it

    kind = array.type
    count = pc.list_value_length if _is_list(kind) else pc.binary_length
    lengths: Any = pc.fill_null(count(array), 0)
    return np.asarray(lengths, dtype=np.int64)


def _each(array: pa.Array) -> int:
    """Bytes of a value of a list: of lists of texts or lists the mean, rounded up."""
    if not _is_list(array.type):
        return 1
    values = array.flatten()
    width = _width(values)
    return width if isinstance(width, int) else -(-int(width.sum()) // max(1, len(values)))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
