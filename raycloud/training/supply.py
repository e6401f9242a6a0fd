"""What a member trains on: the task's own samples, or those that a pipeline provides."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from raycloud.errors import DataError, InternalError, RaycloudError, TaskError
from raycloud.step.contract import raised
from raycloud.task import Source, Splits, Task

if TYPE_CHECKING:
    from raycloud.data.provide import Prepared, Provider
    from raycloud.spec import Job
    from raycloud.task import Samples

# Recognised by name: a task that returns one has imported its package, others need not.
_DATASETS = frozenset({("ray", "Dataset"), ("datasets", "Dataset"), ("pyarrow", "Table")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """Samples that can be read.

    `prepared` says by split how those of a `Source` were made ready.
    """

    train: Samples
    held_out: Samples | None
    prepared: Mapping[str, Prepared] = field(default_factory=dict)


class Supplying:
    """Asks the task for its data; what has to be prepared is prepared in a thread of its own.

    Args:
        task: Is asked at once, in this thread.
        job: Says where the data is.
        provider: Prepares a `Source`.

    Raises:
        JobError: The data cannot be read, or is nothing that can be trained on.
    """

    def __init__(self, task: Task, job: Job, provider: Provider | None) -> None:
        """Begin to prepare, if there is something to prepare."""
        splits = asked(task, job)
        self._future: Future[Supply] = Future()
        if not isinstance(splits.train, Source):
            self._future.set_result(_indexed(splits))
            return
        if provider is None:
            raise InternalError("Task.data returned a Source, and nothing here can prepare one")
        # What `Task.model` sets on the task meanwhile must not change what is prepared.
        args = (provider, copy.copy(task), splits)
        threading.Thread(target=self._prepare, args=args, name="prepare", daemon=True).start()

    def result(self, waiting: Callable[[], None], every_s: float) -> Supply:
        """The samples, once they are there.

        Args:
            waiting: Called each time that so long has passed and they are not.
            every_s: How long that is, in seconds.

        Raises:
            RaycloudError: Why they are not.
        """
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
            provided = provider.provide(task, sourced)
            held_out = provided.held_out if isinstance(own, Source) else own
            self._future.set_result(
                Supply(train=provided.train, held_out=held_out, prepared=provided.prepared)
            )
        except BaseException as error:  # noqa: BLE001 - raised to who asks for the samples
            self._future.set_exception(error)


def asked(task: Task, job: Job) -> Splits:
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
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}
    return Source(dataset=value) if kinds & _DATASETS else value


def _indexed(splits: Splits) -> Supply:
    """Samples of the task's own: map-style, and at least one of them to train on."""
    if _count("training samples", splits.train) == 0:
        raise DataError("the data set has no training samples", hint="check data.path")
    if splits.held_out is not None:
        _count("held-out samples", splits.held_out)
    train = cast("Samples", splits.train)
    return Supply(train=train, held_out=cast("Samples | None", splits.held_out))


def _count(what: str, samples: Any) -> int:
    """How many there are.

    Raises:
        TaskError: They are no data set that can be indexed.
    """
    kinds = {(k.__module__.partition(".")[0], k.__name__) for k in type(samples).__mro__}
    if ("torch", "DataLoader") in kinds:
        raise TaskError(
            f"Task.data returned a DataLoader of {what}",
            hint="return its data set: raycloud makes the batches, with Task.batch in the place "
            "of collate_fn, and global_batch and micro_batch in that of batch_size",
        )
    name = type(samples).__name__
    if ("torch", "IterableDataset") in kinds or not hasattr(samples, "__getitem__"):
        raise TaskError(
            f"Task.data returned {what} that cannot be indexed: {name}",
            hint="return a data set with __len__ and __getitem__ (map-style), or a raycloud.Source",
        )
    try:
        return len(samples)
    except TypeError as error:
        raise TaskError(
            f"Task.data returned {what} without a length: {error}",
            hint="return a data set with __len__ and __getitem__ (map-style), or a raycloud.Source",
        ) from error
    except BaseException as error:
        raise TaskError(raised("the length of Task.data", error).message) from error
