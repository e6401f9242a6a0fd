"""Ingest of one split: what is cached is found on any node, the rest is read and indexed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raycloud.data.cache import DataSet
from raycloud.data.digest import combined
from raycloud.data.index import Block, Index, Input, Prepared
from raycloud.data.prepare import deal_shares, make_index, make_stratified_index
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
from raycloud.data.slices import Slice
from raycloud.errors import DataError, InternalError
from raycloud.on_ray.read_tasks import Readers, ReadSpec, with_works
from raycloud.order import Order, lanes_of
from raycloud.worker.dataset import block_layout

if TYPE_CHECKING:
    from raycloud.on_ray.block_store import ClusterBlocks
    from raycloud.spec import Job
    from raycloud.task import Source, Task

_LEAST_S = 5.0
_READ_BYTES_PER_S = 20e6  # that a core reads and prepares, about
_SMALL_BYTES = _LEAST_S * _READ_BYTES_PER_S


class SplitIngest:
    """One split, from a `Source` to an index; again for files that were added."""

    def __init__(
        self,
        task: Task,
        source: Source,
        split: str,
        blocks: ClusterBlocks,
        known: Sequence[Input] = (),
    ) -> None:
        job = blocks.own.job
        self.source = source
        self.inputs: tuple[Input, ...] = tuple(known)
        self.works: tuple[Work, ...] = ()
        self.records: list[DataSet] = []  # by version
        self._blocks = blocks
        self._lanes = lanes_of(job.global_batch, job.micro_batch)
        self._recipe = recipe_of(task, source, job, split)
        self._spec = ReadSpec(job=job, task=blocks.own.code, recipe=self._recipe)
        self._made: dict[str, Made] = {}  # by key
        self._dealt: dict[str, Block] = {}
        self._fresh: set[str] = set()  # keys of blocks that were not cached

    def run(self, readers: Readers) -> Prepared:
        """Look for files, and make what is not cached; again: for the files that were added.

        Where it raises, the split is as it was: files that could not be taken up are new again.

        Raises:
            RaycloudError: Nothing is there, it cannot be read, or rows are bad.
        """
        clock = self._blocks.own.clock
        before_s = clock.monotonic_s()
        inputs, works_before, sets = self.inputs, self.works, len(self.records)
        try:
            index = self._run(readers)
        except BaseException:
            self.inputs, self.works = inputs, works_before
            del self.records[sets:]
            raise
        fresh = sum(block.key in self._fresh for block in index.blocks)
        return Prepared(
            index=index,
            cached_blocks=len(index.blocks) - fresh,
            made_blocks=fresh,
            seconds=clock.monotonic_s() - before_s,
            read_s=sum(one.read_s for one in self._made.values()),
        )

    def _run(self, readers: Readers) -> Index:
        blocks = self._blocks.own
        if _is_ray(self.source.dataset):
            self._tables(readers)
        else:
            self.inputs, self.works = plan(
                self._recipe, self.source, blocks.cache, blocks.clock, self.inputs
            )
        for works in self._versions()[len(self.records) :]:
            self.records.append(self._version(works, readers))
        if self._recipe.stratify is not None:
            return make_stratified_index(self.inputs, self.records, self._dealt)
        made = [self._made[work.key] for work in self.works]
        return make_index(self._recipe, self.inputs, self.works, made, self._lanes)

    def _versions(self) -> list[tuple[Work, ...]]:
        return [self.works[places.start : places.stop] for places in by_version(self.works)]

    def remake(self, key: str, readers: Readers) -> Block | None:
        """Make a block again that no node has any more; None where it is none of this split's."""
        # While growth is being prepared, there are works of more versions than are complete.
        for works, data_set in zip(self._versions(), self.records, strict=False):
            if wanted := [work for work in works if work.key == key]:
                self._fill(wanted, readers)
                return self._made[key].block
            if key in data_set.keys:
                self._dealt.pop(key, None)
                self._deal(works, data_set, readers)
                return self._dealt[key]
        return None

    def _tables(self, readers: Readers) -> None:
        """A `ray.data.Dataset` says what is in it when it is run, unless a record of it is kept."""
        if self.records:
            return
        record = keyed(self._recipe, self.source)
        kept = self._kept(record.id) if record is not None else None
        works = self._recalled(kept) if kept is not None else []
        if not works:
            self.inputs, works = self._tabled(readers)
        if not works:
            raise DataError(
                "the data set has no rows: Source.dataset is empty",
                hint="give one with rows, or name files in Source.path",
            )
        if record is not None:
            named = Input(path=record.source, bytes=0, digest=record.id)
            self.inputs = (named,)
            works = [replace(w, slice=replace(w.slice, inputs=self.inputs)) for w in works]
            if kept is None:
                made = [self._made[work.key] for work in works]
                keys = tuple(work.key for work in works)
                self._blocks.tell("complete", [completed(replace(record, keys=keys), made)])
        self.works = tuple(works)

    def _tabled(self, readers: Readers) -> tuple[tuple[Input, ...], list[Work]]:
        inputs: list[Input] = []
        works: list[Work] = []
        for table in readers.tables(self._spec, self.source.dataset):
            path = f"{table.input.path}, block {len(inputs)}"
            inputs.append(replace(table.input, path=path))
            works += [replace(w, slice=replace(w.slice, inputs=(inputs[-1],))) for w in table.works]
            for one in table.made:
                self._keep(one)
        return tuple(inputs), works

    def _recalled(self, kept: DataSet) -> list[Work]:
        """The works of a record; none where a block of it is on no node any more."""
        source = (Input(path=kept.source, bytes=0, digest=kept.id),)
        piece = Slice(inputs=source, format="table", start=0, stop=0)
        works = [Work(slice=piece, key=key) for key in kept.keys]
        self._look(works)
        return works if all(work.key in self._made for work in works) else []

    def _kept(self, id_: str) -> DataSet | None:
        here = self._blocks.here("find", id_)
        found = [here] if here is not None else self._asked("find", id_).values()
        return next((record for record in found if record is not None), None)

    def _version(self, works: Sequence[Work], readers: Readers) -> DataSet:
        """Have all blocks of one version made, or found; returns the record of it, complete."""
        data_set = data_set_of(self._recipe, works, self._lanes)
        self._blocks.tell("claim", [data_set])
        if self._recipe.stratify is not None:
            known = self._kept(data_set.id)
            if known is not None and self._found(known.keys):
                return known
            whole = self._deal(works, data_set, readers)
        else:
            self._fill(works, readers)
            whole = completed(data_set, [self._made[work.key] for work in works])
        self._blocks.tell("complete", [whole])
        return whole

    def _found(self, keys: Sequence[str]) -> bool:
        """Whether all of these dealt blocks are somewhere."""
        missing = [key for key in keys if key not in self._dealt]
        self._take_sizes({self._blocks.own.node: self._blocks.here("sizes", missing)})
        if still := [key for key in missing if key not in self._dealt]:
            self._take_sizes(self._asked("sizes", still))
        return all(key in self._dealt for key in keys)

    def _take_sizes(self, found: Mapping[str, Mapping[str, tuple[int, int]]]) -> None:
        for node, sizes in found.items():
            for key, (rows, size) in sizes.items():
                nodes = self._dealt[key].nodes if key in self._dealt else ()
                self._dealt[key] = Block(key=key, rows=rows, bytes=size, nodes=(*nodes, node))

    def _look(self, works: Sequence[Work]) -> None:
        """Find the blocks of works: of each on this node, else on others."""
        bare = [replace(work, table=None) for work in works]
        for work in works:
            self._made.pop(work.key, None)
        for one in self._blocks.here("made", self._recipe, bare).values():
            self._keep(one)
        if still := [work for work in bare if work.key not in self._made]:
            for found in self._asked("made", self._recipe, still).values():
                for one in found.values():
                    self._keep(one)

    def _fill(self, works: Sequence[Work], readers: Readers) -> None:
        """Find the blocks of works on any node; read those that are on none."""
        self._look(works)
        missing = {w.key: n for n, w in enumerate(works) if w.key not in self._made}
        numbers = list(missing.values())
        for _, made in readers.run(with_works(self._spec, works, numbers), numbers):
            self._keep(made)

    def _deal(self, works: Sequence[Work], data_set: DataSet, readers: Readers) -> DataSet:
        """Deal the rows of works to partitions, `self._dealt` by key: the complete record."""
        column = self._recipe.stratify
        if column is None:
            raise InternalError("rows were to be dealt without a column to deal them by")
        self._fill(works, readers)
        made = [self._made[work.key] for work in works]
        keys = [one.block.key for one in made if one.block.rows]
        labels: dict[str, Any] = dict(self._blocks.here("labels", keys, column))
        if still := [key for key in keys if key not in labels]:
            holders = {node for key in still for node in self._made[key].block.nodes}
            for found in self._blocks.others("labels", still, column, nodes=holders).values():
                labels |= found
        of_works = [labels.get(work.key) for work in works]
        shares = deal_shares(self._recipe, works, made, of_works, self._lanes)
        self._found([share.key for share in shares if share.size])
        todo = [n for n, s in enumerate(shares) if s.size and s.key not in self._dealt]
        blocks, handles = [one.block for one in made], self._blocks.handles
        small = sum(block.bytes for block in blocks) <= _SMALL_BYTES
        spec = replace(self._spec, shares=shares, blocks=blocks, handles=handles)
        # Each partition has rows of all blocks: whoever makes some would fetch every block first.
        for _, block in readers.run(spec, todo, alone=small):
            self._dealt[block.key] = block
            self._fresh.add(block.key)
        dealt = [self._dealt[share.key] if share.size else None for share in shares]
        return completed(data_set, made, dealt)

    def _asked(self, method: str, *args: Any) -> Mapping[str, Any]:
        """What other nodes say of what they hold, as long as making it again takes no longer.

        On a slow node a process that could say so starts for half a minute: where all is made again
        in the least time that one has to wait for it, nobody is asked.
        """
        size = sum(one.bytes for one in self.inputs)
        if 0 < size <= _SMALL_BYTES:
            return {}
        return self._blocks.others(method, *args, patience_s=_LEAST_S + size / _READ_BYTES_PER_S)

    def _keep(self, made: Made) -> None:
        key = made.block.key
        there = self._made.get(key)
        if there is not None:
            nodes = tuple(dict.fromkeys((*there.block.nodes, *made.block.nodes)))
            made = replace(there, block=replace(there.block, nodes=nodes))
        elif not made.cached:
            self._fresh.add(key)
        self._made[key] = made


def _is_ray(dataset: Any) -> bool:
    return any(
        kind.__module__.startswith("ray.data") and kind.__name__ == "Dataset"
        for kind in type(dataset).__mro__
    )


def keyed(recipe: Recipe, source: Source) -> DataSet | None:
    """The record by which a `ray.data.Dataset` that has a name is found again."""
    if source.key is None:
        return None
    options = [list(source.columns or ()), dict(source.types or {}), list(source.required)]
    name = combined("keyed", source.key, options, recipe.code, recipe.data.bad_rows)
    return DataSet(id=name[:16], task=recipe.task, split=recipe.split, source=source.key, keys=())


def keys_first_read(indexes: Sequence[Index], job: Job) -> list[str]:
    """The keys of all blocks, each once: those of the training samples as an epoch reads them."""
    train = indexes[0]
    layout, shuffle = block_layout(job, train), job.data.shuffle
    order = Order(samples=train.rows, seed=job.seed, shuffle=shuffle, layout=layout)
    starts, keys = train.starts, list[str]()
    for partition in order.partitions(0).tolist():
        first, last = train.partitions[partition], train.partitions[partition + 1] - 1
        touched = range(bisect_right(starts, first) - 1, bisect_right(starts, last))
        keys += [train.blocks[number].key for number in touched]
    return list(dict.fromkeys([*keys, *(b.key for index in indexes for b in index.blocks)]))
