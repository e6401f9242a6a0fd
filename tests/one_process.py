"""The pipeline of data in one process, without Ray: for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycloud.data.index import HELD_OUT, TRAIN, Block, Index, Input, Prepared
from raycloud.data.prepare import (
    deal_shares,
    labels_of,
    make_block,
    make_index,
    make_partition,
    make_stratified_index,
)
from raycloud.data.provider import Provided
from raycloud.data.recipe import (
    Made,
    Recipe,
    Work,
    by_version,
    completed,
    data_set_of,
    plan,
    recipe_of,
)
from raycloud.data.samples import BlockSamples
from raycloud.errors import InternalError
from raycloud.order.layout import lanes_of
from raycloud.task import Source

if TYPE_CHECKING:
    import pyarrow as pa

    from raycloud.clock import Clock
    from raycloud.data.cache import BlockCache, DataSet
    from raycloud.spec.job import Job
    from raycloud.task import Splits, Task


def prepare_here(
    job: Job,
    task: Task,
    splits: Splits,
    cache: BlockCache,
    clock: Clock,
    known: Mapping[str, Sequence[Input]] | None = None,
) -> Provided:
    """Prepare both splits in this process, without Ray.

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
            if all(self._cache.open_whole(key) is not None for key in known.keys):
                self.cached.update(known.keys)
                return (), known
        made = [self._make(recipe, work) for work in works]
        dealt = None if recipe.stratify is None else self._deal(recipe, works, made)
        data_set = completed(data_set, made, dealt)
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
        blocks = {
            key: self._cache.block(key, self._cache.open(key), "here")
            for one in sets
            for key in one.keys
        }
        return make_stratified_index(inputs, sets, blocks)

    def table_of(self, block: Block) -> pa.Table:
        """The block's rows; it is made again where it is not whole."""
        table = self._cache.open_whole(block.key)
        if table is None:
            self._again[block.key]()
            table = self._cache.open_whole(block.key)
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
        assert column is not None
        tables = [self.table_of(one.block) for one in made]
        labels = [
            labels_of(table, column) if one.block.rows else None
            for table, one in zip(tables, made, strict=True)
        ]
        blocks: list[Block | None] = []
        for share in deal_shares(recipe, works, made, labels, self._lanes):
            if self._cache.has(share.key):
                self.cached.add(share.key)
            pieces = (tables[place].take(rows) for place, rows in share.rows.items())
            block = make_partition(share, pieces, self._cache, "here") if share.size else None
            blocks.append(block)
            self._again[share.key] = lambda: self._deal(recipe, works)
        return blocks
