"""Rows dealt to partitions by class: each partition is a block of its own, with the mix of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raycloud.data.digest import combined
from raycloud.data.index import Block, Index, Input
from raycloud.data.partition import deal, partition_count, rows_of_bytes
from raycloud.data.recipe import (
    MOST_BAD,
    Made,
    Recipe,
    Work,
    check_columns,
    data_set_of,
    other_columns,
)
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.data.cache import BlockCache, DataSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One partition of a stratified data set, to be made from rows of others' blocks.

    Attributes:
        key: Name of its block in the cache.
        rows: By the place of a block among the `made` of its version: the rows to take of it,
            rising (int32). Rows stand in the partition in the order of blocks, then of rows.
        size: Rows of the partition; 0 where there are fewer rows than lanes.
    """

    key: str
    rows: Mapping[int, npt.NDArray[np.int32]]
    size: int


def labels_of(table: pa.Table, column: str) -> pa.Array:
    """What to deal the rows of a block by: its column, with a dictionary.

    Raises:
        DataError: There is no such column, or it does not hold single values.
    """
    if column not in table.column_names:
        there = ", ".join(table.column_names)
        raise DataError(
            f"data.stratify = {column!r}: preprocessed rows have no such column",
            hint=f"name one of those that preprocess returns: {there}",
        )
    labels = table.column(column)
    if pa.types.is_dictionary(labels.type):
        labels = labels.cast(labels.type.value_type)
    if pa.types.is_null(labels.type):  # all are missing
        labels = labels.cast(pa.bool_())
    if pa.types.is_nested(labels.type) or isinstance(labels.type, pa.BaseExtensionType):
        raise DataError(
            f"data.stratify = {column!r}: the column holds {labels.type}, not single values",
            hint="let preprocess return a column with one number or text for each row",
        )
    encoded: pa.ChunkedArray = labels.combine_chunks().dictionary_encode()
    return encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded


def deal_out(
    recipe: Recipe,
    works: Sequence[Work],
    made: Sequence[Made],
    labels: Sequence[pa.Array],
    lanes: int,
) -> tuple[Share, ...]:
    """Deal the rows of one version to partitions: the shares, in order, some perhaps empty.

    Args:
        recipe: Of the split.
        works: Of one version.
        made: Their blocks.
        labels: Of each block that has rows, by `labels_of`; of others anything.
        lanes: The number of partitions is a multiple of it.

    Raises:
        DataError: There is no row, or blocks differ in their columns.
    """
    check_columns(works, made)
    codes = _codes([part for part, one in zip(labels, made, strict=True) if one.block.rows])
    total_bytes = sum(one.block.bytes for one in made)
    largest = rows_of_bytes(len(codes), total_bytes, recipe.data.partition_bytes)
    starts = np.array([0, *accumulate(one.block.rows for one in made)], dtype=np.int64)
    name = data_set_of(recipe, works, lanes).id
    shares = []
    count = partition_count(len(codes), largest, lanes)
    for number, ids in enumerate(deal(codes, count)):
        edges = np.searchsorted(ids, starts)
        rows = {
            block: (ids[edges[block] : edges[block + 1]] - starts[block]).astype(np.int32)
            for block in np.flatnonzero(np.diff(edges)).tolist()
        }
        shares.append(Share(key=combined("dealt", name, count, number), rows=rows, size=len(ids)))
    return tuple(shares)


def make_partition(share: Share, pieces: Iterable[pa.Table], cache: BlockCache, node: str) -> Block:
    """Write the block of a share.

    Args:
        share: What to make; not an empty one.
        pieces: The rows of `share.rows`, in the order of blocks: as `table.take(rows)` gives them.
        cache: Where to; where it has the block whole, `pieces` are not asked for.
        node: Where this runs.

    Raises:
        MachineError: The cache's disk is full or fails.
    """
    there = cache.whole(share.key)
    if there is None:
        block = cache.add(share.key, pieces)
    else:
        size = cache.path_of(share.key).stat().st_size
        block = Block(key=share.key, rows=len(there), bytes=size)
    return replace(block, nodes=(node,))


def make_stratified_index(
    inputs: Sequence[Input], sets: Sequence[DataSet], blocks: Mapping[str, Block]
) -> Index:
    """The index of a stratified split.

    Args:
        inputs: Of all versions.
        sets: The complete record of each version, in order.
        blocks: The dealt blocks, by key.

    Raises:
        DataError: Versions differ in their columns.
    """
    _check_versions(inputs, sets)
    sizes = [size for one in sets for size in one.sizes]
    return Index(
        blocks=tuple(blocks[key] for one in sets for key in one.keys),
        partitions=tuple(accumulate(sizes, initial=0)),
        inputs=tuple(inputs),
        bad_rows=sum(one.bad_rows for one in sets),
        bad=tuple(bad for one in sets for bad in one.bad)[:MOST_BAD],
    )


def _check_versions(inputs: Sequence[Input], sets: Sequence[DataSet]) -> None:
    """Refuse versions that cannot be read as one data set."""
    firsts: dict[int, str] = {}
    for file in inputs:
        firsts.setdefault(file.version, file.path)
    names = [firsts[version] for version in sorted(firsts)]
    if len(names) != len(sets):  # a version without rows
        names = [one.source for one in sets]
    for name, one in zip(names, sets, strict=True):
        if one.columns != sets[0].columns:
            raise other_columns(sets[0].columns, one.columns, names[0], name)


def _codes(labels: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """The class of each row, numbered as they first appear; a missing value is one of its own."""
    together = pa.chunked_array(labels).unify_dictionaries().combine_chunks()
    if isinstance(together, pa.ChunkedArray):
        together = together.chunk(0)
    indices = together.indices.cast(pa.int64()).fill_null(-1)
    codes: npt.NDArray[np.int64] = indices.to_numpy(zero_copy_only=False)
    return codes
