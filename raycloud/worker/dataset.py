"""The data set of a worker: the samples it reads, their order, and what a checkpoint keeps of them.

Samples are the task's own, or rows in blocks that a pipeline provides, which may grow while the
training goes on. Control computes the same sizes from the checkpoint's ledger: see
`ControlSettings.steps`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from raycloud.data.index import Prepared
from raycloud.data.provider import Provided
from raycloud.errors import CheckpointError, DataError, InternalError, RaycloudError, TaskError
from raycloud.events import DataPrepared
from raycloud.order import EpochSizes, Layout, Order, Position, Steps, lanes_of
from raycloud.step.contract import cut, raised
from raycloud.task import Source, Splits, Task

if TYPE_CHECKING:
    from raycloud.checkpoint import Manifest
    from raycloud.data.index import Index
    from raycloud.data.provider import Provider
    from raycloud.data.samples import BlockSamples
    from raycloud.spec import Job
    from raycloud.task import Samples

_GOLDEN = 0.618034  # multiples of it, modulo 1, keep apart
DATA, LAYOUT = "data", "layout"  # names among a checkpoint's values

# Recognised by name: a task that returns one has imported its package, others need not.
_DATASETS = frozenset({("ray", "Dataset"), ("datasets", "Dataset"), ("pyarrow", "Table")})
_MAP_STYLE = "return a data set with __len__ and __getitem__ (map-style), or a raycloud.Source"


class DataRequest:
    """Asks the task for its data; what has to be prepared is prepared in a thread of its own.

    Raises:
        JobError: The data cannot be read, or is nothing that can be trained on.
    """

    def __init__(self, task: Task, job: Job, provider: Provider | None) -> None:
        """Begin to prepare, if there is something to prepare."""
        splits = task_splits(task, job)
        self._future: Future[Provided] = Future()
        if not isinstance(splits.train, Source):
            self._future.set_result(own_samples(splits))
            return
        if provider is None:
            raise InternalError("Task.data returned a Source, and nothing here can prepare one")
        # What `Task.model` sets on the task meanwhile must not change what is prepared.
        args = (provider, copy.copy(task), splits)
        threading.Thread(target=self._prepare, args=args, name="prepare", daemon=True).start()

    def result(self, waiting: Callable[[], None], every_s: float) -> Provided:
        """The samples once they are there, or why not; `waiting` is called every so often."""
        while True:
            with contextlib.suppress(TimeoutError):
                return self._future.result(every_s)
            if self._future.done():  # a TimeoutError of the preparing itself
                return self._future.result()
            waiting()

    def _prepare(self, provider: Provider, task: Task, splits: Splits) -> None:
        own = splits.held_out  # a `Source` only where the training samples are one
        try:
            sourced = splits if isinstance(own, Source) else replace(splits, held_out=None)
            found = provider.provide(task, sourced)
            if not isinstance(own, Source):
                found = replace(found, held_out=own)
            self._future.set_result(found)
        except BaseException as error:  # noqa: BLE001 - raised to who asks for the samples
            self._future.set_exception(error)


def task_splits(task: Task, job: Job) -> Splits:
    """The task's splits, with what goes through the pipeline as a `Source`.

    Raises:
        RaycloudError: The data cannot be read, or is nothing that can be trained on.
    """
    try:
        splits = task.data(job.data.path)
    except RaycloudError:
        raise
    except OSError as error:
        raise DataError(
            f"the data set could not be read: {error}", hint="check data.path"
        ) from error
    except BaseException as error:
        raise TaskError(raised("Task.data", error).message) from error
    if not isinstance(splits, Splits):
        raise TaskError(
            f"Task.data returned {type(splits).__name__}", hint="return raycloud.Splits(train=...)"
        )
    splits = Splits(train=as_source(splits.train), held_out=as_source(splits.held_out))
    if isinstance(splits.train, Source) and not isinstance(splits.held_out, Source | None):
        _count("held-out samples", splits.held_out)
    if isinstance(splits.held_out, Source) and not isinstance(splits.train, Source):
        raise TaskError(
            "Task.data returned a Source of held-out samples, but training samples of its own",
            hint="return a Source for both, or for the training samples alone",
        )
    return splits


def as_source(value: Any) -> Any:
    """The value; as a `Source` where it is one of the data sets that a source may hold.

    >>> import pyarrow as pa
    >>> as_source(pa.table({"x": [1, 2]})).dataset.num_rows
    2
    >>> as_source([1, 2])
    [1, 2]
    """
    return Source(dataset=value) if _kinds(value) & _DATASETS else value


def _kinds(value: Any) -> set[tuple[str, str]]:
    """The top-level package and the name of each class that a value is of."""
    return {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}


def own_samples(splits: Splits) -> Provided:
    """Samples of the task's own: map-style, and at least one of them to train on."""
    if _count("training samples", splits.train) == 0:
        raise DataError("the data set has no training samples", hint="check data.path")
    if splits.held_out is not None:
        _count("held-out samples", splits.held_out)
    train = cast("Samples", splits.train)
    return Provided(train=train, held_out=cast("Samples | None", splits.held_out))


def _count(what: str, samples: Any) -> int:
    """How many there are; `TaskError` where they are no data set that can be indexed."""
    kinds, name = _kinds(samples), type(samples).__name__
    if ("torch", "DataLoader") in kinds:
        raise TaskError(
            f"Task.data returned a DataLoader of {what}",
            hint="return its data set: raycloud makes the batches, with Task.batch in the place "
            "of collate_fn, and global_batch and micro_batch in that of batch_size",
        )
    if ("torch", "IterableDataset") in kinds or not hasattr(samples, "__getitem__"):
        problem = f"Task.data returned {what} that cannot be indexed: {name}"
        raise TaskError(problem, hint=_MAP_STYLE)
    try:
        return len(samples)
    except TypeError as error:
        problem = f"Task.data returned {what} without a length: {error}"
        raise TaskError(problem, hint=_MAP_STYLE) from error
    except BaseException as error:
        raise TaskError(raised("the length of Task.data", error).message) from error


class DataSet:
    """Samples in the order of the job, from where a checkpoint stands; they may grow.

    Attributes:
        steps: How the sequence is cut, as it is known at the start.
        order: Which sample stands where, as it is known at the start.

    Raises:
        DataError: There are too few samples, or they are not those the checkpoint was trained on.
        CheckpointError: The checkpoint's layout cannot be used.
    """

    def __init__(self, job: Job, data: Provided, manifest: Manifest | None) -> None:
        index = block_index(data.train)
        begun = manifest if manifest is not None and manifest.step else None
        if begun is not None:
            stratified = job.data.stratify is not None
            check_identity(index, begun.values.get(DATA), stratified=stratified)
        self._job, self.data = job, data
        self._blocks = 0 if index is None else len(index.blocks)
        self.steps = steps_of(job, len(data.train), begun)
        self.order = order_of(job, self.steps, block_layout(job, index), begun)

    def extend(self, samples: BlockSamples) -> tuple[Layout | None, Prepared]:
        """The layout of grown samples, and how they were made."""
        layout, index = block_layout(self._job, samples.index), samples.index
        made = len(index.blocks) - self._blocks
        prepared = Prepared(
            index=index, cached_blocks=self._blocks, made_blocks=made, seconds=0.0, read_s=0.0
        )
        self._blocks = len(index.blocks)
        return layout, prepared

    def copy_while(
        self, idle: Callable[[], bool | None], member: int, *, gently: bool = False
    ) -> None:
        """See `BlockSamples.copy_while`: whole lanes, each member from another one on."""
        samples, order = self.data.train, self.order
        lanes = order.lanes_in(order.newest_from)
        if lanes and block_index(samples) is not None:
            first = int(member * _GOLDEN % 1.0 * lanes)
            every = [*range(first, lanes), *range(first)]
            partitions = [order.lane_partitions(order.newest_from, lane) for lane in every]
            wanted = np.concatenate(partitions)
            cast("BlockSamples", samples).copy_while(idle, wanted, gently=gently)

    def lane_bytes(self, nodes: tuple[str, ...], rank: int) -> tuple[float, ...]:
        """See the function of this name: of the data that there is at the start.

        Nothing where no rank can be preferred: ranks are on one node, or one's node is not known.
        With fixed shares copies do not count: when they come is chance, and the deal is to be that
        of another run.
        """
        samples = self.data.train
        index = block_index(samples)
        if index is None or len(set(nodes)) <= 1 or not all(nodes):
            return ()
        fits = self._job.elastic.shares == "auto"
        opened = cast("BlockSamples", samples).opened if fits else ()
        return lane_bytes(index, self.order, nodes[rank], opened)


def block_index(samples: Samples) -> Index | None:
    """The index of samples that lie in blocks; None for others."""
    index: Index | None = getattr(samples, "index", None)
    return index if hasattr(samples, "gather") else None


def block_layout(job: Job, index: Index | None) -> Layout | None:
    """How the job reads blocks: a step takes as many rows of every lane."""
    if index is None:
        return None
    lanes, window = lanes_of(job.global_batch, job.micro_batch), job.data.window
    run = job.global_batch // lanes
    try:
        return Layout(partitions=index.partitions, lanes=lanes, run=run, window=window)
    except ValueError as error:
        raise InternalError(f"the data was prepared for another job: {error}") from error


def lane_bytes(
    index: Index, order: Order, node: str, opened: Collection[int] = ()
) -> tuple[float, ...]:
    """The bytes of each lane that a node has, as far as a member there knows.

    Lanes are those of the newest layout; they keep what they have where data grows. Nothing where
    there are none. The bytes of a block count evenly over its rows.

    Args:
        index: Of the blocks.
        order: Which has the lanes.
        node: Whose blocks count.
        opened: Numbers of blocks that the member has opened: they have been copied there.
    """
    epoch = order.newest_from
    lanes = order.lanes_in(epoch)
    if not lanes:
        return ()
    there = [
        block.bytes if node in block.nodes or number in opened else 0
        for number, block in enumerate(index.blocks)
        if block.rows
    ]
    starts = np.cumsum([0, *(block.rows for block in index.blocks if block.rows)])
    before = np.cumsum([0.0, *there])  # bytes that are there of all rows before
    amounts = np.diff(np.interp(index.partitions, starts, before))
    return tuple(float(amounts[order.lane_partitions(epoch, k)].sum()) for k in range(lanes))


def steps_of(job: Job, samples: int, manifest: Manifest | None) -> Steps:
    """How the sequence is cut into steps by a member that sees `samples` samples.

    Samples that the checkpoint does not know of are in all epochs that begin where it stands, or
    after it. `DataError`: there are fewer than it was trained on, or too few for a step.
    """
    if manifest is None or not manifest.step:
        return cut(job, samples)
    sizes = EpochSizes.from_state(manifest.ledger)
    if samples < sizes.most:
        raise DataError(
            f"the data has changed: the checkpoint was trained on {sizes.most} samples per epoch, "
            f"the members see {samples}",
            hint="bring back what is missing from data.path, or start a new run: without --resume, "
            "in another --run-dir",
        )
    sizes = sizes.grown(manifest.position.next_epoch, samples)
    return replace(cut(job, samples), samples=sizes.samples, later=sizes.later)


def order_of(job: Job, steps: Steps, layout: Layout | None, manifest: Manifest | None) -> Order:
    """Which sample stands where, from the checkpoint's position on.

    An epoch that the checkpoint has begun ends as it began, whatever has become of the data, the
    batch sizes or the layout since; `layout` holds for those that begin later.

    Raises:
        CheckpointError: The checkpoint's layout is not one of the epoch it has begun.
    """
    at = Position() if manifest is None else manifest.position
    seed, shuffle, most = job.seed, job.data.shuffle, steps.sizes.most
    if manifest is None or not at.offset:
        return Order(samples=most, seed=seed, shuffle=shuffle, layout=layout)
    samples = steps.samples_in(at.epoch)
    try:
        kept = layout_of(manifest.values.get(LAYOUT))
        begun = Order(samples=samples, seed=seed, shuffle=shuffle, layout=kept)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the layout in the checkpoint of step {manifest.step} cannot be used: {error}",
            hint="resume from another checkpoint",
        ) from error
    if (samples, kept) == (most, layout):
        return begun
    return begun.extended(at.next_epoch, most, layout)


def layout_record(layout: Layout | None) -> dict[str, Any] | None:
    """A layout as plain values; for a checkpoint.

    >>> layout_record(Layout(partitions=(0, 4, 8), lanes=2, run=2, window=1))
    {'partitions': [0, 4, 8], 'lanes': 2, 'run': 2, 'window': 1}
    """
    return None if layout is None else {**asdict(layout), "partitions": list(layout.partitions)}


def layout_of(record: dict[str, Any] | None) -> Layout | None:
    """The layout whose `layout_record` this is."""
    if record is None:
        return None
    return Layout(**{**record, "partitions": tuple(record["partitions"])})


def data_values(samples: Samples) -> dict[str, Any]:
    """What a checkpoint keeps to know the data again."""
    index = block_index(samples)
    return {} if index is None else {DATA: identity(index)}


def identity(
    index: Index, *, blocks: int | None = None, files: int | None = None
) -> dict[str, Any]:
    """What tells a data set, or its first blocks and files, from another; for a checkpoint."""
    keys = [block.key for block in index.blocks][:blocks]
    digests = [file.digest for file in index.inputs][:files]
    return {
        "blocks": len(keys),
        "rows": sum(block.rows for block in index.blocks[:blocks]),
        "keys": _digest(keys),
        "files": len(digests),
        "digests": _digest(digests),
    }


def check_identity(
    index: Index | None, kept: Mapping[str, Any] | None, *, stratified: bool = False
) -> None:
    """Refuse data other than what a checkpoint has `kept`; it may have grown at its end.

    An index or identity is None where samples are the task's own. Where `stratified`, rows are
    dealt to partitions by a column. `DataError` says what has changed.
    """
    if index is None and kept is None:
        return
    if index is None or kept is None:
        was, now = ("samples of the task's own", "a Source")[:: 1 if kept is None else -1]
        raise DataError(
            f"Task.data returned {was} when the checkpoint was made, and {now} now",
            hint="resume with the task the run was started with, or start a new run",
        )
    found = identity(index, blocks=kept["blocks"], files=kept["files"])
    if found == kept:
        return
    if (found["files"], found["digests"]) != (kept["files"], kept["digests"]):
        raise DataError(
            f"the files of the data set have changed: the first {kept['files']} are not those that "
            f"the checkpoint was trained on",
            hint="bring them back, or start a new run: only files that are added can be taken up",
        )
    dealt = ", global_batch / micro_batch (rows are dealt by it)" if stratified else ""
    raise DataError(
        f"the rows made of the data set's files have changed: there are {found['rows']} in the "
        f"place of the {kept['rows']} that the checkpoint was trained on, or they are others",
        hint=f"undo the change to Task.preprocess, to the Source's options{dealt} or to raycloud's "
        "version, or start a new run",
    )


def _digest(names: Iterable[str]) -> str:
    """A digest of names in their order: 32 hex digits."""
    lines = "".join(f"{name}\n" for name in names)
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def prepared_event(job: Job, split: str, prepared: Prepared, **more: Any) -> DataPrepared:
    """What a member tells of a split that is ready; `more` are other fields."""
    index = prepared.index
    return DataPrepared(
        split=split,
        rows=index.rows,
        bytes=index.bytes,
        blocks=len(index.blocks),
        cached_blocks=prepared.cached_blocks,
        partitions=len(index.partitions) - 1,
        bad_rows=index.bad_rows,
        bad=tuple(f"{bad.file}, row {bad.row}: {bad.why}" for bad in index.bad),
        inputs=tuple(asdict(file) for file in index.inputs),
        files=len(index.inputs),
        seconds=prepared.seconds,
        read_s=prepared.read_s,
        price_per_gb_month=job.data.cache.price_per_gb_month,
        **more,
    )
