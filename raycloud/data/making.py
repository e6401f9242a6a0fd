"""One block, from its slice to the cache: read, clean, preprocess, write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raycloud.data.block import facts_of
from raycloud.data.clean import clean
from raycloud.data.digest import check_unchanged
from raycloud.data.formats import Piece
from raycloud.data.index import BadRow, Block
from raycloud.data.recipe import Made, Recipe, Work
from raycloud.data.slices import read
from raycloud.data.widths import bytes_of_rows

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache
    from raycloud.task import Task


def make_block(
    recipe: Recipe, work: Work, task: Task, cache: BlockCache, clock: Clock, node: str
) -> Made:
    """Read, clean, preprocess and write one block, unless the cache has it whole.

    A damaged block is made again. Safe to run twice at once, and to be killed at any moment.

    Args:
        recipe: Of the split.
        work: What to make.
        task: Preprocesses; the one whose code `recipe` has the digest of.
        cache: Where to.
        clock: For how long reading takes.
        node: Where this runs.

    Raises:
        DataError: The input cannot be read or has changed, or rows are bad and `data.bad_rows`
            refuses them.
        TaskError: `preprocess` broke its contract.
        MachineError: The cache's disk is full or fails, or `preprocess` met a fault that is no
            row's.
    """
    there = cache.whole(work.key)
    if there is not None:
        size = cache.path_of(work.key).stat().st_size
        block = Block(key=work.key, rows=len(there), bytes=size, nodes=(node,))
        return replace(_made(recipe, work, there, block), cached=True)
    read_s = 0.0

    def timed(pieces: Iterator[Piece]) -> Iterator[Piece]:
        nonlocal read_s
        while True:
            before_s = clock.monotonic_s()
            piece = next(pieces, None)
            read_s += clock.monotonic_s() - before_s
            if piece is None:
                return
            yield piece

    skip = recipe.data.bad_rows == "skip"
    cleaned = clean(recipe.source, task.preprocess, timed(_pieces(recipe, work)), skip=skip)
    if work.table is None:
        check_unchanged(work.slice.inputs)
    bad = [_to_fact(work, row) for row in cleaned.bad]
    block = cache.add(work.key, cleaned.tables, {"bad_rows": cleaned.bad_rows, "bad": bad})
    made = _made(recipe, work, cache.open(work.key), replace(block, nodes=(node,)))
    return replace(made, read_s=read_s)


def _pieces(recipe: Recipe, work: Work) -> Iterator[Piece]:
    if work.table is None:
        yield from read(recipe.source, work.slice)  # from here on, so that opening is timed
    else:
        name, start = work.slice.inputs[0].path, work.slice.start
        yield Piece(table=work.table, file=name, numbers=np.arange(start, start + len(work.table)))


def _made(recipe: Recipe, work: Work, table: pa.Table, block: Block) -> Made:
    facts = facts_of(table)
    by_bytes = recipe.data.partition_by == "bytes" and recipe.stratify is None
    columns = [f"{field.name}: {field.type}" for field in table.schema]
    return Made(
        block=block,
        schema="\n".join(columns) if len(table) else "",
        bad_rows=facts["bad_rows"],
        bad=tuple(_from_fact(work, fact) for fact in facts["bad"]),
        row_bytes=bytes_of_rows(table) if by_bytes else None,
    )


def _to_fact(work: Work, bad: BadRow) -> list[Any]:
    """A bad row by the place of its file among the inputs: files that are moved keep their block.

    Where it is of none of them, by what its file is called.
    """
    names = [one.path for one in work.slice.inputs]
    return [names.index(bad.file) if bad.file in names else bad.file, bad.row, bad.why]


def _from_fact(work: Work, fact: list[Any]) -> BadRow:
    file, row, why = fact
    return BadRow(
        file=work.slice.inputs[file].path if isinstance(file, int) else file, row=row, why=why
    )
