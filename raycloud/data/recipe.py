"""What passes between the steps of the pipeline: what to make, and what was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from raycloud.data.cache import DataSet
from raycloud.data.code_digest import code_digest
from raycloud.data.digest import combined
from raycloud.data.filesystems import plain
from raycloud.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.data.formats import Slice
    from raycloud.data.index import BadRow, Block
    from raycloud.spec.job import Job
    from raycloud.spec.sections import DataSection
    from raycloud.task import Source, Task

FORMAT = 1  # of what a key stands for: rises where the same recipe gives other rows
_DEALING = 2  # of how dealt blocks are named and recorded
MOST_BAD = 20  # bad rows that are named

_WITH_PATHS = frozenset({"text", "images"})  # formats whose rows say which file they came from


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides what the blocks of a split hold, besides the files. Picklable.

    Attributes:
        source: Where rows come from; its `dataset` is None (see `plan_table`).
        code: Digest of the task's preprocessing.
        data: The job's section.
        task: Name of the task, for people.
        split: `"train"` or `"held_out"`; only `"train"` is stratified.
    """

    source: Source
    code: str
    data: DataSection
    task: str
    split: str = "train"

    @property
    def stratify(self) -> str | None:
        """The column by which rows are dealt to partitions."""
        return self.data.stratify if self.split == "train" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One block to make.

    Attributes:
        slice: What to read.
        key: Name of the block in the cache.
        table: The rows, where they are in hand: of a `Source` with a `dataset`. A view of all of
            them, which pickles as a whole: send `compacted(work.table)`.
    """

    slice: Slice
    key: str
    table: pa.Table | None = field(default=None, compare=False, repr=False)

    @property
    def version(self) -> int:
        """Version of the inputs."""
        return self.slice.inputs[0].version


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A block that is in a cache. Small and picklable: it travels, the rows do not.

    Attributes:
        block: Its key, rows, bytes, and the node that made or had it.
        schema: Names and types of its columns, as text; empty where there was no row.
        bad_rows: Rows that were left out.
        bad: The first of them, at most 20.
        read_s: How long reading took, up to rows in memory; 0 where the block was cached.
        cached: Whether the block was in the cache already.
        row_bytes: Bytes of each row where `data.partition_by` is bytes: one number where all rows
            are of one size, else an array of int64.
    """

    block: Block
    schema: str
    bad_rows: int = 0
    bad: tuple[BadRow, ...] = ()
    read_s: float = 0.0
    cached: bool = False
    row_bytes: Any = field(default=None, compare=False)


def recipe_of(task: Task, source: Source, job: Job, split: str = "train") -> Recipe:
    """The recipe of a split. `source.dataset` is dropped from it.

    Raises:
        TaskError: `preprocess` reads an attribute that cannot be told apart from another.
    """
    return Recipe(
        source=replace(source, dataset=None),
        code=code_digest(task),
        data=job.data,
        task=type(task).__qualname__,
        split=split,
    )


def key_of(recipe: Recipe, slice_: Slice) -> str:
    """The name of a slice's block: the digest of all that decides what it holds."""
    source = recipe.source
    named = slice_.format in _WITH_PATHS or bool(slice_.folders)
    how = [source.delimiter, list(source.names or ()), source.encoding, slice_.folders]
    return combined(
        FORMAT,
        [[one.digest, one.path if named else ""] for one in slice_.inputs],
        [slice_.format, slice_.start, slice_.stop, slice_.types],
        [source.unit, None if source.columns is None else list(source.columns)],
        [dict(source.types or {}), list(source.required)],
        [recipe.code, recipe.data.bad_rows],
        *([how] if how != [None, [], "utf-8", ()] else []),  # as it was before they could be given
    )


def by_version(works: Sequence[Work]) -> list[range]:
    """The places of each version's works, rising; a version without works is left out."""
    places: dict[int, list[int]] = {}
    for number, work in enumerate(works):
        places.setdefault(work.version, []).append(number)
    return [range(place[0], place[-1] + 1) for place in places.values()]


def data_set_of(recipe: Recipe, works: Sequence[Work], lanes: int) -> DataSet:
    """The cache's record of the works of one version: what to claim before making them.

    Where the split is stratified, the id also follows from `lanes` and the partition's size, and a
    complete record of that id (`cache.find(id)`) names the dealt blocks: then neither works nor
    dealing are needed.
    """
    keys = tuple(work.key for work in works)
    dealing = None
    if recipe.stratify is not None:
        dealing = [_DEALING, recipe.stratify, lanes, recipe.data.partition_bytes]
    return DataSet(
        id=combined(FORMAT, keys, dealing)[:16],
        task=recipe.task,
        split=recipe.split,
        source=_source_text(recipe.source, works),
        keys=keys,
    )


def finished(
    data_set: DataSet, made: Sequence[Made], dealt: Sequence[Block | None] | None = None
) -> DataSet:
    """The record once its blocks are there, for `cache.complete`.

    Args:
        data_set: By `data_set_of`.
        made: What its works gave.
        dealt: Where it is stratified, the block of each share; None for an empty one.
    """
    told = replace(
        data_set,
        rows=sum(one.block.rows for one in made),
        bad_rows=sum(one.bad_rows for one in made),
        bad=tuple(bad for one in made for bad in one.bad)[:MOST_BAD],
        columns=next((one.schema for one in made if one.schema), ""),
        complete=True,
    )
    if dealt is None:
        return told
    return replace(
        told,
        keys=tuple(block.key for block in dealt if block is not None),
        parts=data_set.keys,
        sizes=tuple(0 if block is None else block.rows for block in dealt),
    )


def check_columns(works: Sequence[Work], made: Sequence[Made]) -> None:
    """Refuse blocks that cannot be read as one data set.

    Raises:
        DataError: There is no row, or columns differ; names two files.
    """
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
            raise other_columns(kind, one.schema, first.slice.inputs[0].path, where)


def other_columns(before: str, after: str, first: str, other: str) -> DataError:
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


def _source_text(source: Source, works: Sequence[Work]) -> str:
    if source.path is None:
        return source.key or (works[0].slice.inputs[0].path if works else "")
    paths = [source.path] if isinstance(source.path, str) else list(source.path)
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return plain(str(paths[0])) + more if paths else ""
