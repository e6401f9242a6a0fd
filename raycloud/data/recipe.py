"""Recipe of a split, and the works to do by it: which files, in which slices, under which keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raycloud.data.cache import DataSet
from raycloud.data.digest import code_digest, combined, inputs_of, table_digest
from raycloud.data.filesystems import paths_of, without_credentials
from raycloud.data.formats import NAMED_BAD_ROWS, Slice
from raycloud.data.index import Input
from raycloud.data.location import locate
from raycloud.data.slices import cut
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache
    from raycloud.data.index import BadRow, Block
    from raycloud.spec.job import Job
    from raycloud.spec.sections import DataSection
    from raycloud.task import Source, Task

FORMAT = 1  # of what a key stands for: rises where the same recipe gives other rows
_DEALING = 2  # of how dealt blocks are named and recorded

_WITH_PATHS = frozenset({"text", "images"})  # formats whose rows say which file they came from
_SLICE_BYTES = 32 * 2**20
_PART_ROWS = 65536  # that are digested at a time: how a table is chunked must not matter


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides what the blocks of a split hold, besides the files. Picklable.

    Attributes:
        source: Where rows come from; its `dataset` is None (see `plan_table`).
        code: Digest of the task's preprocessing.
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
    """One block to make: what to read, and its name in the cache.

    `table` has the rows, where they are in hand: of a `Source` with a `dataset`. It is a view of
    all of them, which pickles as a whole: send `compacted(work.table)`.
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
        schema: Names and types of its columns, as text; empty where there was no row.
        bad: The first of the `bad_rows` that were left out, at most 20.
        read_s: How long reading took, up to rows in memory; 0 where the block was cached.
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
    """The recipe of a split, without `source.dataset`; raises as `code_digest` does."""
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
    if source.unit == "file" and source.encoding != "utf-8":
        how.append("decoded")  # which whole files were not, before
    return combined(
        FORMAT,
        [[one.digest, one.path if named else ""] for one in slice_.inputs],
        [slice_.format, slice_.start, slice_.stop, slice_.types],
        [source.unit, None if source.columns is None else list(source.columns)],
        [dict(source.types or {}), list(source.required)],
        [recipe.code, recipe.data.bad_rows],
        *([how] if how != [None, [], "utf-8", ()] else []),  # as it was before they could be given
    )


Planned = tuple[tuple[Input, ...], tuple[Work, ...]]


def plan(
    recipe: Recipe, source: Source, cache: BlockCache, clock: Clock, known: Sequence[Input] = ()
) -> Planned:
    """`plan_work` or `plan_table`, as the source asks for; a `DataError` for both, or neither."""
    if (source.path is None) == (source.dataset is None):
        has = "both a path and a dataset" if source.path else "neither a path nor a dataset"
        hint = "give one of them; a path may come from data.path, which the job sets"
        raise DataError(f"Source has {has}", hint=hint)
    if source.dataset is not None:
        return plan_table(recipe, source.dataset, known)
    return plan_work(recipe, cache, clock, known)


def plan_work(
    recipe: Recipe, cache: BlockCache, clock: Clock, known: Sequence[Input] = ()
) -> Planned:
    """Find the files, digest them, and cut them into works, in the order of their rows.

    The inputs that a run has already, `known`, keep their place and version; new ones follow, with
    the next version.

    Raises:
        DataError: Nothing is there, or a known input is gone or has changed.
    """
    source = recipe.source
    inputs = _placed(inputs_of(source, locate(source), cache.root, clock), known)
    works = [
        Work(slice=piece, key=key_of(recipe, piece))
        for version in sorted({one.version for one in inputs})
        for piece in cut(source, [one for one in inputs if one.version == version])
    ]
    return inputs, tuple(works)


def plan_table(recipe: Recipe, dataset: Any, known: Sequence[Input] = ()) -> Planned:
    """The same for a `pyarrow.Table` or a `datasets.Dataset`; works carry their rows, about 32 MB.

    Raises:
        DataError: It is something else, has no rows, or is not what `known` says.
    """
    rows, size, between = _tabular(dataset)
    source = recipe.source
    if not rows:
        raise DataError(
            "the data set has no rows: Source.dataset is empty",
            hint="give one with rows, or name files in Source.path",
        )
    named = source.key is not None
    digest = (
        combined("key", source.key) if named else table_digest(_parts(between, rows, _PART_ROWS))
    )
    found = Input(path=source.key or "Source.dataset", bytes=size, digest=digest)
    inputs = _placed([found], known)
    works: list[Work] = []
    start = 0
    for table in _parts(between, rows, max(1, _SLICE_BYTES * rows // max(1, size))):
        piece = Slice(inputs=inputs, format="table", start=start, stop=start + len(table))
        held = table if source.columns is None else _selected(table, source.columns)
        works.append(Work(slice=piece, key=key_of(recipe, piece), table=held))
        start = piece.stop
    return inputs, tuple(works)


def compacted(table: pa.Table) -> pa.Table:
    """The same rows without the rest of what they are a view of, which would be pickled too."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def by_version(works: Sequence[Work]) -> list[range]:
    """The places of each version's works, rising; a version without works is left out."""
    versions = [work.version for work in works]
    starts = [versions.index(version) for version in dict.fromkeys(versions)]
    return [range(*edges) for edges in pairwise([*starts, len(works)])]


def _placed(found: Sequence[Input], known: Sequence[Input]) -> tuple[Input, ...]:
    """Known inputs in their places, then new ones in the order of their paths."""
    by_path = {one.path: one for one in found}
    kept = []
    for one in known:
        now = by_path.pop(one.path, None)
        if now is None or (now.bytes, now.digest) != (one.bytes, one.digest):
            what = "is gone" if now is None else "has changed"
            raise DataError(
                f"{one.path} {what} since this run read it",
                hint="put the file back as it was, or start a new run: without --resume, in "
                "another --run-dir. Files may be added to a run's data, not taken away",
            )
        kept.append(replace(one, modified_ns=now.modified_ns))
    version = max((one.version for one in known), default=-1) + 1
    new = sorted(by_path.values(), key=lambda one: one.path)
    return (*kept, *(replace(one, version=version) for one in new))


def _tabular(dataset: Any) -> tuple[int, int, Callable[[int, int], pa.Table]]:
    """Rows and bytes of a data set in hand, and what gives the rows from one to another."""
    if isinstance(dataset, pa.Table):
        table = dataset
        return len(table), table.nbytes, lambda start, stop: table.slice(start, stop - start)
    if hasattr(dataset, "with_format") and hasattr(dataset, "num_rows"):  # Hugging Face
        view = dataset.with_format("arrow")  # with its own order and choice of rows
        size = view.data.nbytes * view.num_rows // max(1, view.data.num_rows)
        return view.num_rows, size, lambda start, stop: view[start:stop]
    raise DataError(
        f"Source.dataset is a {type(dataset).__name__}, which is not known here",
        hint="give a pyarrow.Table, a datasets.Dataset (not a streamed one) or a ray.data.Dataset",
    )


def _parts(between: Callable[[int, int], pa.Table], rows: int, size: int) -> Iterator[pa.Table]:
    return (between(start, min(start + size, rows)) for start in range(0, rows, size))


def _selected(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise DataError(
            f"Source.columns names {missing[0]!r}, which Source.dataset does not have",
            hint=f"it has {', '.join(table.column_names)}",
        )
    return table.select(list(columns))


def data_set_of(recipe: Recipe, works: Sequence[Work], lanes: int) -> DataSet:
    """The cache's record of the works of one version: what to claim before making them.

    Where the split is stratified, a complete record of this id names the dealt blocks.
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


def completed(
    data_set: DataSet, made: Sequence[Made], dealt: Sequence[Block | None] | None = None
) -> DataSet:
    """The record of `data_set_of` once its works have `made` their blocks.

    Where it is stratified, `dealt` is the block of each share; None for an empty one.
    """
    told = replace(
        data_set,
        rows=sum(one.block.rows for one in made),
        bad_rows=sum(one.bad_rows for one in made),
        bad=tuple(bad for one in made for bad in one.bad)[:NAMED_BAD_ROWS],
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


def _source_text(source: Source, works: Sequence[Work]) -> str:
    if source.path is None:
        return source.key or (works[0].slice.inputs[0].path if works else "")
    first, *others = paths_of(source)
    return without_credentials(first) + (f" and {len(others)} more" if others else "")
