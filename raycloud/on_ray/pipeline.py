"""The data's pipeline: what is cached is found on any node, the rest is read and indexed.

One `SplitIngest` for each split of a task, and the `Pipeline` of them all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import ray

from raycloud.data.cache import DataSet
from raycloud.data.digest import combined, rows_digest
from raycloud.data.index import HELD_OUT, TRAIN, Block, Index, Input, Prepared
from raycloud.data.location import is_local, locate
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
from raycloud.events import DataGrew
from raycloud.on_ray.block_store import ClusterBlocks, NodeBlocks
from raycloud.on_ray.read_tasks import Readers, ReadSpec, WorkQueue, with_works
from raycloud.order import Order, lanes_of
from raycloud.step.contract import construct
from raycloud.task import Source
from raycloud.worker.dataset import block_layout, task_splits

if TYPE_CHECKING:
    from raycloud.data.location import File
    from raycloud.packing.code import TaskCode
    from raycloud.spec import Job
    from raycloud.task import Splits, Task

Told = tuple[tuple[str, Mapping[str, Any]], ...]  # what should be known: texts and their details

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """What a pipeline is told.

    Attributes:
        job: The job.
        task: The task's class, or its code.
        known: Inputs of the training samples that the run has already, with their versions.
        version: How often the data had grown, of this start of the run, to those inputs.
        wary: One before this has died, perhaps of what it read: leave reading to other processes.
    """

    task: type[Task] | TaskCode  # first: what follows may be of its modules
    job: Job
    known: tuple[Input, ...] = ()
    version: int = 0
    wary: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Data by split, actors that hold its blocks by node, and notices: told to who asks next.

    `records` are of the data sets in it, and `rows` is the `rows_digest` of it.
    """

    prepared: Mapping[str, Prepared]
    records: tuple[DataSet, ...]
    handles: Mapping[str, Any]
    notices: Told
    rows: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshed:
    """The data with the files that were added; None where there are none to take up yet."""

    grown: DataGrew | None
    notices: Told


class Pipeline:
    """Prepares data once for all who ask, and again where it has grown. Thread-safe.

    `me` is the actor that others ask for the blocks of `own`, and for work.
    """

    def __init__(self, config: PipelineConfig, own: NodeBlocks, me: Any) -> None:
        self._config = config
        self.queue = WorkQueue(me)
        self._turn = Lock()  # one change at a time
        self._remaking = Lock()  # not held up by growth, which may take long
        self._asking = Lock()
        self._looking = Lock()
        self._ready: Future[dict[str, Prepared]] | None = None
        self._notices: list[tuple[str, Mapping[str, Any]]] = []
        self._blocks = ClusterBlocks(own, me, self._notice)
        self._places: tuple[list[str] | None] | None = None  # nodes that read; None: not known yet
        self._rows: str | None = None
        self._splits: dict[str, SplitIngest] = {}
        self._versions: dict[int, Index] = {}  # of the training samples
        self._seen: list[File] = []

    def prepare(self) -> Ready:
        """The data of the task, ready to be read. The first who asks has it prepared.

        Raises:
            RaycloudError: Why it cannot be; the same to all who ask.
        """
        prepared = self._prepared()
        return Ready(
            prepared=prepared,
            records=tuple(one for split in self._splits.values() for one in split.records),
            handles=dict(self._blocks.handles),
            notices=self._take_notices(),
            rows=self._rows,
        )

    def begin(self) -> None:
        """Have the data prepared, before there are members to ask for it."""
        self._prepared()

    def refresh(self) -> Refreshed:
        """Look for files that were added, and read those that nobody is writing to any more.

        A file is taken up once it was seen twice, of the same size and time.

        Raises:
            RaycloudError: They cannot be read, or a known one is gone or has changed.
        """
        with self._turn:
            grown = self._grow()
        return Refreshed(grown=grown, notices=self._take_notices())

    def grown(self, version: int) -> Index:
        """The index of the training samples of a version.

        Raises:
            InternalError: There is none.
        """
        self._prepared()
        if version not in self._versions:
            raise InternalError(
                f"the data of version {version} was asked for; there are {sorted(self._versions)}"
            )
        return self._versions[version]

    def remake(self, key: str) -> Block:
        """Make a block again that is on no node any more.

        Raises:
            RaycloudError: It cannot be.
        """
        self._prepared()
        with self._remaking:
            for split in self._splits.values():
                block = split.remake(key, self._readers(1))
                if block is not None:
                    return block
        raise InternalError(f"the block {key} was asked for, which belongs to no data of this run")

    def _prepared(self) -> dict[str, Prepared]:
        with self._asking:
            first = self._ready is None
            ready = self._ready = self._ready or Future()
        if first:
            try:
                with self._turn:
                    ready.set_result(self._prepare())
            except BaseException as error:  # noqa: BLE001 - raised to all who ask
                ready.set_exception(error)
        return ready.result()

    def _prepare(self) -> dict[str, Prepared]:
        config, job = self._config, self._config.job
        task = construct(config.task, job)
        splits = task_splits(task, job)
        if not isinstance(splits.train, Source):
            raise InternalError("the task's training samples need no pipeline")
        train = SplitIngest(task, splits.train, TRAIN, self._blocks, config.known)
        self._splits = {TRAIN: train}
        if isinstance(splits.held_out, Source):
            self._splits[HELD_OUT] = SplitIngest(task, splits.held_out, HELD_OUT, self._blocks)
        self._rows = rows_of(task, splits)
        self._train = splits.train
        prepared = {name: split.run(self._readers(None)) for name, split in self._splits.items()}
        self._versions[config.version] = prepared[TRAIN].index
        self._pin([one.index for one in prepared.values()])
        return prepared

    def _grow(self) -> DataGrew | None:
        train = self._splits.get(TRAIN)
        if train is None or train.source.path is None:
            return None
        known = {one.path for one in train.inputs}
        new = [file for file in locate(train.source) if file.path not in known]
        seen, self._seen = self._seen, new
        if not new or new != seen:
            return None
        prepared = train.run(self._readers(1))
        newest = max(self._versions)
        if prepared.index.rows == self._versions[newest].rows:
            return None  # files without a row
        version = newest + 1
        self._versions[version] = prepared.index
        self._pin([prepared.index])
        return DataGrew(
            samples=prepared.index.rows,
            version=version,
            inputs=tuple(file.path for file in new),
            partitions=prepared.index.partitions,
        )

    def _readers(self, most: int | None) -> Readers:
        """Readers on all CPUs, or on `most` of them; never on more than the job allows."""
        cpus, own = self._config.job.data.cpus, self._blocks.own
        total = max(1, int(ray.cluster_resources().get("CPU", 1)))
        if cpus == "auto":
            cpus = most or total
        return Readers(
            self.queue,
            min(cpus, total),
            own.clock,
            here=self._reads_here,
            notice=self._notice,
            places=self._reading,
        )

    def _reads_here(self) -> bool:
        """Whether this process may read: it sees the files, and none before it has died of them."""
        if self._config.wary:
            return False
        file = self._on_disk
        return file is None or bool(self._blocks.here("sees", file.path, file.bytes))

    def _reading(self) -> list[str] | None:
        """The nodes where others may read; None: all."""
        with self._looking:
            if self._places is None:
                self._blocks.begin()  # what is made on a node is asked of its process
                self._places = (self._seeing(),)
            return self._places[0]

    @cached_property
    def _on_disk(self) -> File | None:
        """A file of the training samples that not all nodes may see; None: there is none."""
        source = self._train
        if self._blocks.alone or source.path is None or source.filesystem is not None:
            return None
        first = locate(source)[0]
        return first if is_local(first.path) else None

    def _seeing(self) -> list[str] | None:
        """The nodes that see the files; None: all do, or it does not matter."""
        first = self._on_disk
        if first is None:
            return None
        seen = self._blocks.ask("sees", first.path, first.bytes)
        nodes = [node for node, sees in seen.items() if sees]
        if len(nodes) == len(seen):
            return None
        self._notice(
            "not all nodes see the data's files, so only those that do read them",
            file=first.path,
            nodes=nodes,
        )
        return nodes

    def _pin(self, indexes: list[Index]) -> None:
        """Pin what is read first, everywhere."""
        self._blocks.tell("pin", keys_first_read(indexes, self._config.job))

    def _take_notices(self) -> Told:
        with self._asking:
            notices, self._notices = tuple(self._notices), []
        return notices

    def _notice(self, what: str, **detail: Any) -> None:
        with self._asking:
            self._notices.append((what, detail))


def rows_of(task: Task, splits: Splits) -> str | None:
    """The `rows_digest` of a task's splits that go through a pipeline."""
    named = {TRAIN: splits.train, HELD_OUT: splits.held_out}
    return rows_digest(task, {n: one for n, one in named.items() if isinstance(one, Source)})
