"""Preparing a split without an executor: from works to blocks and their index, plain functions.

    recipe_of -> plan -> make_block for each work -> make_index
                      -> make_block, labels_of -> deal_shares -> make_partition for each share
                                                              -> make_stratified_index

What comes out depends on the source, the task's code and the job, and never on who runs which
function where. Works, and the partitions made of them, never mix versions of inputs, so that what
grows keeps all it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raycloud.data.block import facts_of
from raycloud.data.clean import clean
from raycloud.data.digest import check_unchanged, combined
from raycloud.data.formats import NAMED_BAD_ROWS, Piece
from raycloud.data.index import BadRow, Block, Index, Input
from raycloud.data.partition import (
    bytes_of_rows,
    deal,
    equal_bytes,
    equal_rows,
    partition_count,
    rows_of_bytes,
)
from raycloud.data.recipe import Made, Recipe, Work, by_version, data_set_of
from raycloud.data.slices import read
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache, DataSet
    from raycloud.task import Task


def make_block(
    recipe: Recipe, work: Work, task: Task, cache: BlockCache, clock: Clock, node: str
) -> Made:
    """Read, clean, preprocess and write one block, unless the cache has it whole.

    A damaged block is made again. Safe to run twice at once, and to be killed at any moment.

    Raises:
        DataError: The input cannot be read or has changed, or rows are bad and `data.bad_rows`
            refuses them.
        TaskError: `preprocess` broke its contract.
        MachineError: The cache's disk is full or fails, or `preprocess` met a fault that is no
            row's.
    """
    there = cache.open_whole(work.key)
    if there is not None:
        return replace(_made(recipe, work, there, cache.block(work.key, there, node)), cached=True)
    read_s = 0.0

    def pieces() -> Iterator[Piece]:
        nonlocal read_s
        if work.table is not None:
            numbers = work.slice.start + np.arange(len(work.table))
            yield Piece(table=work.table, file=work.slice.inputs[0].path, numbers=numbers)
            return
        before_s = clock.monotonic_s()
        for piece in read(recipe.source, work.slice):
            read_s += clock.monotonic_s() - before_s
            yield piece
            before_s = clock.monotonic_s()
        read_s += clock.monotonic_s() - before_s

    skip = recipe.data.bad_rows == "skip"
    cleaned = clean(recipe.source, task.preprocess, pieces(), skip=skip)
    if work.table is None:
        check_unchanged(work.slice.inputs)
    # A bad row is kept by the place of its file among the inputs, so that files that are moved keep
    # their block; where it is of none of them, by what its file is called.
    places = {one.path: place for place, one in enumerate(work.slice.inputs)}
    bad = [[places.get(row.file, row.file), row.row, row.why] for row in cleaned.bad]
    block = cache.add(work.key, cleaned.tables, {"bad_rows": cleaned.bad_rows, "bad": bad})
    made = _made(recipe, work, cache.open(work.key), replace(block, nodes=(node,)))
    return replace(made, read_s=read_s)


def _made(recipe: Recipe, work: Work, table: pa.Table, block: Block) -> Made:
    facts = facts_of(table)
    by_bytes = recipe.data.partition_by == "bytes" and recipe.stratify is None
    columns = [f"{field.name}: {field.type}" for field in table.schema]
    paths = [one.path for one in work.slice.inputs]
    return Made(
        block=block,
        schema="\n".join(columns) if len(table) else "",
        bad_rows=facts["bad_rows"],
        bad=tuple(
            BadRow(file=paths[file] if isinstance(file, int) else file, row=row, why=why)
            for file, row, why in facts["bad"]
        ),
        row_bytes=bytes_of_rows(table) if by_bytes else None,
    )


def make_index(
    recipe: Recipe,
    inputs: Sequence[Input],
    works: Sequence[Work],
    made: Sequence[Made],
    lanes: int,
) -> Index:
    """The index of a split that is not stratified, of works of all versions and what they made.

    Its blocks are those that have rows. The number of partitions of each version is a multiple of
    `lanes`.

    Raises:
        DataError: There is no row, or blocks differ in their columns.
    """
    _check_columns(works, made)
    partitions = [0]
    for places in by_version(works):
        of_version = made[places.start : places.stop]
        rows, size = _rows(of_version), recipe.data.partition_bytes
        if recipe.data.partition_by == "bytes" and rows:
            widths = [np.broadcast_to(one.row_bytes, one.block.rows) for one in of_version]
            starts = equal_bytes(np.concatenate(widths), lanes, size)
        else:
            starts = equal_rows(rows, _count(recipe, of_version, lanes))
        partitions += [partitions[-1] + start for start in starts[1:]]
    return Index(
        blocks=tuple(one.block for one in made if one.block.rows),
        partitions=tuple(partitions),
        inputs=tuple(inputs),
        bad_rows=sum(one.bad_rows for one in made),
        bad=tuple(bad for one in made for bad in one.bad)[:NAMED_BAD_ROWS],
    )


def _count(recipe: Recipe, made: Sequence[Made], lanes: int) -> int:
    """How many partitions of equal rows the blocks of one version make."""
    rows, total_bytes = _rows(made), sum(one.block.bytes for one in made)
    largest = rows_of_bytes(rows, total_bytes, recipe.data.partition_bytes)
    return partition_count(rows, largest, lanes)


def _rows(made: Sequence[Made]) -> int:
    return sum(one.block.rows for one in made)


def _check_columns(works: Sequence[Work], made: Sequence[Made]) -> None:
    """Refuse blocks that cannot be read as one data set."""
    there = [(work, one) for work, one in zip(works, made, strict=True) if one.schema]
    if not there:
        bad = sum(one.bad_rows for one in made)
        raise DataError(
            f"the data set has no rows: {len(works)} pieces were read, with {bad} bad rows",
            hint="check data.path, Source.types and Source.required, and what preprocess returns",
        )
    first, kind = there[0][0], there[0][1].schema
    for work, one in there:
        if one.schema != kind:
            where = f"{work.slice.inputs[0].path} (from {work.slice.start})"
            raise _other_columns(kind, one.schema, first.slice.inputs[0].path, where)


def _other_columns(before: str, after: str, first: str, other: str) -> DataError:
    """What to raise where the columns of two places, as of `Made.schema`, differ."""
    olds, news = before.split("\n"), after.split("\n")
    odd = next(
        (pair for pair in zip(olds, news, strict=False) if pair[0] != pair[1]),
        (f"{len(olds)} columns", f"{len(news)} columns"),
    )
    return DataError(
        f"files differ in their columns: {odd[1]!r} in {other}, where {first} has {odd[0]!r}",
        hint="name the type of each column in Source.types, choose some with "
        "Source.columns, or return the same columns from every preprocess",
    )


# Stratified: rows are dealt to partitions by class, each a block of its own, with the mix of all.


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One partition of a stratified data set, to be made from `rows` of others' blocks.

    Those are by the place of a block among the `made` of its version, rising (int32). They stand in
    the partition in this order. Its size is 0 where there are fewer rows than lanes.
    """

    key: str
    rows: Mapping[int, npt.NDArray[np.int32]]
    size: int


def labels_of(table: pa.Table, column: str) -> pa.Array:
    """What to deal the rows of a block by: its column of single values, with a dictionary."""
    if column not in table.column_names:
        there = ", ".join(table.column_names)
        what = f"data.stratify = {column!r}: preprocessed rows have no such column"
        raise DataError(what, hint=f"name one of those that preprocess returns: {there}")
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
    return labels.combine_chunks().dictionary_encode()


def deal_shares(
    recipe: Recipe,
    works: Sequence[Work],
    made: Sequence[Made],
    labels: Sequence[pa.Array],
    lanes: int,
) -> tuple[Share, ...]:
    """Deal the rows of one version to partitions: the shares, in order, some perhaps empty.

    `labels` are those of each block that has rows, by `labels_of`; of others anything. The number
    of partitions is a multiple of `lanes`.

    Raises:
        DataError: There is no row, or blocks differ in their columns.
    """
    _check_columns(works, made)
    codes = codes_of([part for part, one in zip(labels, made, strict=True) if one.block.rows])
    starts = np.array([0, *accumulate(one.block.rows for one in made)], dtype=np.int64)
    name = data_set_of(recipe, works, lanes).id
    count = _count(recipe, made, lanes)
    shares = []
    for number, ids in enumerate(deal(codes, count)):
        edges = np.searchsorted(ids, starts)
        rows = {
            block: (ids[edges[block] : edges[block + 1]] - starts[block]).astype(np.int32)
            for block in np.flatnonzero(np.diff(edges)).tolist()
        }
        shares.append(Share(key=combined("dealt", name, count, number), rows=rows, size=len(ids)))
    return tuple(shares)


def codes_of(labels: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """The class of each row, numbered as they first appear; a missing value is one of its own."""
    together = pa.chunked_array(labels).unify_dictionaries().combine_chunks()
    if isinstance(together, pa.ChunkedArray):
        together = together.chunk(0)
    indices = together.indices.cast(pa.int64()).fill_null(-1)
    codes: npt.NDArray[np.int64] = indices.to_numpy(zero_copy_only=False)
    return codes


def make_partition(share: Share, pieces: Iterable[pa.Table], cache: BlockCache, node: str) -> Block:
    """Write the block of a share that is not empty.

    `pieces` are its rows, in the order of blocks, as `table.take(rows)` gives them; where the cache
    has the block whole, they are not asked for.
    """
    there = cache.open_whole(share.key)
    if there is not None:
        return cache.block(share.key, there, node)
    return replace(cache.add(share.key, pieces), nodes=(node,))


def make_stratified_index(
    inputs: Sequence[Input], sets: Sequence[DataSet], blocks: Mapping[str, Block]
) -> Index:
    """The index of a stratified split, by the complete record of each version, in order."""
    firsts = {file.version: file.path for file in reversed(inputs)}
    names = [firsts[version] for version in sorted(firsts)]
    if len(names) != len(sets):  # a version without rows
        names = [one.source for one in sets]
    for name, one in zip(names, sets, strict=True):
        if one.columns != sets[0].columns:
            raise _other_columns(sets[0].columns, one.columns, names[0], name)
    return Index(
        blocks=tuple(blocks[key] for one in sets for key in one.keys),
        partitions=tuple(accumulate((s for one in sets for s in one.sizes), initial=0)),
        inputs=tuple(inputs),
        bad_rows=sum(one.bad_rows for one in sets),
        bad=tuple(bad for one in sets for bad in one.bad)[:NAMED_BAD_ROWS],
    )
