"""The pipeline without an executor: from a `Source` to blocks and their index, as plain functions.

    recipe_of -> plan_work -> make_block for each work -> make_index
                           -> make_block, labels_of -> deal_out -> make_partition for each share
                                                                -> make_stratified_index

What comes out depends on the source, the task's code and the job, and never on who runs which
function where. Inputs have a version: 0, or the number of the growth that brought them. Works, and
the partitions made of them, never mix versions, so that what grows keeps all it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raycloud.data.index import Block, Index, Input
from raycloud.data.making import make_block
from raycloud.data.partition import equal_bytes, equal_rows, partition_count, rows_of_bytes
from raycloud.data.provide import HELD_OUT, TRAIN, Prepared, Provided
from raycloud.data.recipe import (
    MOST_BAD,
    Made,
    Recipe,
    Work,
    by_version,
    check_columns,
    data_set_of,
    finished,
    recipe_of,
)
from raycloud.data.samples import BlockSamples
from raycloud.data.stratify import (
    Share,
    deal_out,
    labels_of,
    make_partition,
    make_stratified_index,
)
from raycloud.data.works import Planned, compacted, plan_table, plan_work
from raycloud.errors import DataError, InternalError
from raycloud.order.layout import lanes_of
from raycloud.task import Source

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache, DataSet
    from raycloud.spec.job import Job
    from raycloud.task import Splits, Task

__all__ = [
    "Made",
    "Recipe",
    "Share",
    "Work",
    "by_version",
    "compacted",
    "data_set_of",
    "deal_out",
    "finished",
    "labels_of",
    "make_block",
    "make_index",
    "make_partition",
    "make_stratified_index",
    "plan",
    "plan_table",
    "plan_work",
    "prepare_here",
    "recipe_of",
]


def plan(
    recipe: Recipe,
    source: Source,
    cache: BlockCache,
    clock: Clock,
    known: Sequence[Input] = (),
) -> Planned:
    """`plan_work` or `plan_table`, as the source asks for.

    Raises:
        DataError: As they do, or the source has both files and a data set, or neither.
    """
    if (source.path is None) == (source.dataset is None):
        both = "both a path and a dataset" if source.path else "neither a path nor a dataset"
        raise DataError(
            f"Source has {both}",
            hint="give one of them; a path may come from data.path, which the job sets",
        )
    if source.dataset is not None:
        return plan_table(recipe, source.dataset, known)
    return plan_work(recipe, cache, clock, known)


def make_index(
    recipe: Recipe,
    inputs: Sequence[Input],
    works: Sequence[Work],
    made: Sequence[Made],
    lanes: int,
) -> Index:
    """The index of a split that is not stratified; its blocks are those that have rows.

    Args:
        recipe: Of the split.
        inputs: Of all versions.
        works: Of all versions, in order.
        made: Their blocks.
        lanes: The number of partitions of each version is a multiple of it.

    Raises:
        DataError: There is no row, or blocks differ in their columns.
    """
    check_columns(works, made)
    partitions = [0]
    for places in by_version(works):
        first = partitions[-1]
        starts = _partitions(recipe, [made[place] for place in places], lanes)
        partitions += [first + start for start in starts[1:]]
    return Index(
        blocks=tuple(one.block for one in made if one.block.rows),
        partitions=tuple(partitions),
        inputs=tuple(inputs),
        bad_rows=sum(one.bad_rows for one in made),
        bad=tuple(bad for one in made for bad in one.bad)[:MOST_BAD],
    )


def _partitions(recipe: Recipe, made: Sequence[Made], lanes: int) -> tuple[int, ...]:
    rows = sum(one.block.rows for one in made)
    if recipe.data.partition_by == "bytes" and rows:
        widths = [np.broadcast_to(one.row_bytes, one.block.rows) for one in made]
        return equal_bytes(np.concatenate(widths), lanes, recipe.data.partition_bytes)
    total_bytes = sum(one.block.bytes for one in made)
    largest = rows_of_bytes(rows, total_bytes, recipe.data.partition_bytes)
    return equal_rows(rows, partition_count(rows, largest, lanes))


def prepare_here(
    job: Job,
    task: Task,
    splits: Splits,
    cache: BlockCache,
    clock: Clock,
    known: Mapping[str, Sequence[Input]] | None = None,
) -> Provided:
    """All of it in this process, without Ray: for tests and small tools.

    Keys, blocks and ids are those that the pipeline on Ray gives. The samples make damaged or
    missing blocks again. The data set is in use, and not evicted, as long as the samples live.

    Args:
        job: The job.
        task: The task, made from its settings.
        splits: What its `data` returned: `Source`s or what may stand in a source's `dataset`.
        cache: Where blocks are kept.
        clock: For durations and for when the cache was used.
        known: By split, the inputs that a run has already.
    """
    samples: dict[str, BlockSamples] = {}
    prepared: dict[str, Prepared] = {}
    for split, given in ((TRAIN, splits.train), (HELD_OUT, splits.held_out)):
        if given is None:
            continue
        before_s = clock.monotonic_s()
        source = given if isinstance(given, Source) else Source(dataset=given)
        recipe = recipe_of(task, source, job, split)
        inputs, works = plan(recipe, source, cache, clock, (known or {}).get(split, ()))
        here = _Here(job, task, cache, clock)
        versions = [
            here.version(recipe, works[places.start : places.stop]) for places in by_version(works)
        ]
        index = here.index(recipe, inputs, works, versions)
        prepared[split] = Prepared(
            index=index,
            cached_blocks=sum(block.key in here.cached for block in index.blocks),
            made_blocks=sum(block.key not in here.cached for block in index.blocks),
            seconds=clock.monotonic_s() - before_s,
            read_s=here.read_s,
        )
        samples[split] = BlockSamples(index, here.table_of)
    cache.evict()
    return Provided(train=samples[TRAIN], held_out=samples.get(HELD_OUT), prepared=prepared)


class _Here:
    """One split, made in this process; it also makes blocks again."""

    def __init__(self, job: Job, task: Task, cache: BlockCache, clock: Clock) -> None:
        self.cached: set[str] = set()
        self.read_s = 0.0
        self._lanes = lanes_of(job.global_batch, job.micro_batch)
        self._who = f"run {job.name}"
        self._task = task
        self._cache = cache
        self._clock = clock
        self._uses: list[Any] = []  # until the samples are gone, which keep this
        self._again: dict[str, Callable[[], object]] = {}

    def version(self, recipe: Recipe, works: Sequence[Work]) -> tuple[Sequence[Made], DataSet]:
        """Make the blocks of one version; where it is stratified and cached, none of its works."""
        data_set = data_set_of(recipe, works, self._lanes)
        self._uses.append(self._cache.use(data_set, self._clock, self._who))
        known = self._cache.find(data_set.id)
        if recipe.stratify is not None and known is not None and known.complete:
            for key in known.keys:
                self._again[key] = lambda: self._deal(recipe, works)
            if all(self._cache.whole(key) is not None for key in known.keys):
                self.cached.update(known.keys)
                return (), known
        made = [self._make(recipe, work) for work in works]
        dealt = None if recipe.stratify is None else self._deal(recipe, works, made)
        data_set = finished(data_set, made, dealt)
        self._cache.complete(data_set)
        return made, data_set

    def index(
        self,
        recipe: Recipe,
        inputs: Sequence[Input],
        works: Sequence[Work],
        versions: Sequence[tuple[Sequence[Made], DataSet]],
    ) -> Index:
        """The index of all versions."""
        if recipe.stratify is None:
            made = [one for makings, _ in versions for one in makings]
            return make_index(recipe, inputs, works, made, self._lanes)
        sets = [data_set for _, data_set in versions]
        blocks = {key: self._block(key) for one in sets for key in one.keys}
        return make_stratified_index(inputs, sets, blocks)

    def table_of(self, block: Block) -> pa.Table:
        """The block's rows; it is made again where it is not whole."""
        table = self._cache.whole(block.key)
        if table is None:
            self._again[block.key]()
            table = self._cache.whole(block.key)
        if table is None:
            raise InternalError(f"the block {block.key} was made again and is not there")
        return table

    def _make(self, recipe: Recipe, work: Work) -> Made:
        made = make_block(recipe, work, self._task, self._cache, self._clock, "here")
        self._again[work.key] = lambda: self._make(recipe, work)
        self.read_s += made.read_s
        if made.cached:
            self.cached.add(work.key)
        return made

    def _deal(
        self, recipe: Recipe, works: Sequence[Work], made: Sequence[Made] | None = None
    ) -> list[Block | None]:
        made = made or [self._make(recipe, work) for work in works]
        column = recipe.stratify
        assert column is not None  # noqa: S101
        tables = [self.table_of(one.block) for one in made]
        labels = [
            labels_of(table, column) if one.block.rows else None
            for table, one in zip(tables, made, strict=True)
        ]
        blocks: list[Block | None] = []
        for share in deal_out(recipe, works, made, labels, self._lanes):
            if self._cache.has(share.key):
                self.cached.add(share.key)
            pieces = (tables[place].take(rows) for place, rows in share.rows.items())
            block = make_partition(share, pieces, self._cache, "here") if share.size else None
            blocks.append(block)
            self._again[share.key] = lambda: self._deal(recipe, works)
        return blocks

    def _block(self, key: str) -> Block:
        size = self._cache.path_of(key).stat().st_size
        return Block(key=key, rows=len(self._cache.open(key)), bytes=size, nodes=("here",))
