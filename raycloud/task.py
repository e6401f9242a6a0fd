"""The user's contract: a `Task` says what is trained and on what, and nothing about where.

A task knows nothing of ranks, devices or Ray. raycloud imports its file in every worker, as a plain
loop does, constructs it there from `settings`, calls its methods as described below, and moves
models and batches to the device. What any of them raises, `sys.exit()` too, ends the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from raycloud.metrics import Mean, Metric

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from raycloud.rows import Rows

__all__ = ["Batch", "Format", "Samples", "Source", "Splits", "Task"]

Batch = Any
"""What `Task.batch` returns: tensors, or lists, tuples and mappings of them."""


class Samples(Protocol):
    """A data set that can be indexed: what `torch.utils.data.Dataset` calls map-style.

    A data set that also has `__getitems__(ids: list[int]) -> list` is asked for many samples at
    once.
    """

    def __len__(self) -> int:
        """Number of samples; the same in every worker."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The sample with id `index`, 0 <= index < len; the same in every worker, each time.

        Nothing random belongs here: see `Task.batch`.
        """
        ...


Format = Literal["auto", "text", "csv", "jsonl", "parquet", "arrow", "images"]
"""How files are read; `auto` goes by their suffix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Rows that the pipeline reads, preprocesses and caches as blocks; then each row is a sample.

    Of directories named `name=value`, as Hive, Spark and pandas write them, rows of Parquet, Arrow,
    CSV and JSON have a column `name`, unless their file has one: int64 where all values are whole
    numbers, else text. A JSON file may be one array of objects, in the place of lines.

    Attributes:
        path: A file, a directory, a pattern (`part-*.parquet`), a URL that pyarrow or fsspec
            understands, or several of these. A directory is searched to its depths; names in it
            that begin with `.` or, without `select`, `_` are left out, as is text beside data of
            another format. Files are taken in the order of their paths.
        dataset: In place of `path`: a `ray.data.Dataset`, a Hugging Face `datasets.Dataset`, or a
            `pyarrow.Table`.
        key: A name for what `dataset` holds, so that its blocks are found again by a later run.
            Files need none: they are known by their content.
        format: How files are read.
        unit: What a row of text is: a line, or a whole file. Rows of text have columns `text` (str)
            and `path`; rows of image files have `image` (bytes), `path` and `label` (the name of
            the file's folder).
        columns: Columns to read; None: all.
        types: The type each column must have, by pyarrow's name (`float32`, `int64`, `string`). A
            row that does not convert is a bad row. Columns of CSV and JSON lines without one are
            int64, double, bool or string, as found at the head of the data. Text, CSV and JSON
            lines may be compressed (`.gz`, `.bz2`, `.zst`, `.lz4`).
        required: Columns in which a row must have a value; a row without is a bad row.
        delimiter: What separates the values of CSV; None: what separates the names in the header,
            outside of quotes: a comma, semicolon, tab or vertical bar.
        names: The columns of CSV without a header; None: the first line names them.
        encoding: Of text, CSV and JSON, by Python's name; a byte order mark may stand before it.
        select: Which files to take, asked with each file's path below `path`.
        filesystem: A pyarrow or fsspec file system that `path` belongs to; None: by the URL.
    """

    path: str | Sequence[str] | None = None
    dataset: Any = None
    key: str | None = None
    format: Format = "auto"
    unit: Literal["line", "file"] = "line"
    columns: Sequence[str] | None = None
    types: Mapping[str, str] | None = None
    required: Sequence[str] = ()
    delimiter: str | None = None
    names: Sequence[str] | None = None
    encoding: str = "utf-8"
    select: Callable[[str], bool] | None = None
    filesystem: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The samples to train on, and those held out to measure the result.

    A `Source`, or what may stand in its `dataset`, goes through the pipeline. Anything else is
    indexed as it is, in every worker.
    """

    train: Samples | Source
    held_out: Samples | Source | None = None


class Task(ABC):
    """What is trained.

    Subclass it, and give `model`, `data`, `loss` and `optimizer`. The constructor takes the job's
    `settings` as keyword arguments.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model. Called under the job's seed; must also do on `torch.device("meta")`.

        The model is put into training mode afterwards, and again after each measuring of held-out
        samples: what `eval()` did to a part of it in here is undone. A part that shall stay frozen,
        such as a BatchNorm with fixed statistics, overrides `train` to stay in `eval` mode.

        Lazy modules pass one batch in here, so that their parameters have a shape.
        """

    @abstractmethod
    def data(self, path: str | None) -> Splits:
        """The data sets. `path` is the job's `data.path`; None asks for the task's own default.

        Called in every worker, and has to give the same samples in each: a few of them are compared
        before the first step, with those of a worker that joins, and where a run is resumed. The
        global generators of torch, numpy and Python begin with the job's seed, so that a split or a
        shuffle without a generator is the same everywhere; it follows the number of samples.
        """

    def preprocess(self, rows: Rows) -> Rows | Mapping[str, Any]:
        """Make rows of a `Source` into what is kept: decode, convert, compute. Not random.

        Runs once per row, beside the training on any CPU, in batches of a size of the pipeline's
        choosing; what it returns is cached by the content of the rows' files, this method's code
        and the attributes it reads, and read again in every epoch. Return columns of equal length.
        Where as many rows come out as went in, they are the same rows, in order; otherwise (text
        packed into windows, rows filtered) they are new ones. Where it raises, it is called again
        with fewer rows, down to one, and a row alone with which it raises is a bad row.

        The cache does not see what is in files that this opens (a vocabulary, a tokenizer), nor the
        versions of installed packages. Where those change, let it read an attribute that you then
        change too, such as a class attribute `vocabulary = 2` or a setting of the task: the rows
        are made again.
        """
        return rows

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of one batch: a scalar, the *mean* over the batch's weight (see `weight`).

        It changes no parameter, and calls no `backward()`: both are refused. Buffers may change.
        Those of BatchNorm stay exact; others are averaged over workers after each step, which the
        run's log says. Buffers with `persistent=False` are no state: caches may grow in them.
        """

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer of the model's parameters: one, which goes by their gradients alone.

        What differs from part to part, such as the learning rate, is given by parameter groups. An
        optimizer whose `step` needs a closure, such as LBFGS, is refused. One that has `train` and
        `eval` (schedule-free) is switched around each evaluation.

        What else is to change once a step (a teacher that follows its student, an average of the
        parameters, rows with a limited norm) does so in `optimizer.register_step_post_hook`: it is
        called after each step, with the same model on every worker, and so stays exact.

        A checkpoint, and a worker that joins, get all that `state_dict` gives: numbers, tensors
        and lists of them, with their types, a rate that is a tensor, and numbers and strings among
        the optimizer's attributes. What they cannot hold is refused, at the latest after the first
        step; an object is held as the state of the one that this method has made.

        What it moves must be a part of what `model` returns, and its groups are all there from the
        start: a loss with parameters of its own goes into one `nn.ModuleDict` with the model. What
        requires a gradient, and no group has, stays as it is, and a notice counts it. What is to
        move later requires a gradient from the start, and its part of the model is computed under
        `torch.no_grad()` until then. Anything else is refused, at the step at which it begins.
        """

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:  # noqa: ARG002
        """A learning rate schedule over `steps` steps, stepped once per step; None: constant.

        One that goes by what is measured, such as `ReduceLROnPlateau`, is stepped after each
        measuring of the held-out samples instead: `evaluate.every_steps` says how often. It gets
        the same number on every worker: the metric `loss`, or the only one that there is.

        It may hold other schedules, and objects or callables with state of their own: a checkpoint
        keeps what their `state_dict` gives, else their attributes.

        `steps` are those of the whole job, as it is asked for now. A resumed run restores the
        schedule's own state, so one that holds a length (`OneCycleLR`, `CosineAnnealingLR`) keeps
        that of the run it goes on from; a `LambdaLR` of a function that uses `steps` follows a new
        length.
        """
        return None

    def batch(
        self,
        samples: Sequence[Any],
        rng: np.random.Generator | None,  # noqa: ARG002
    ) -> Batch:
        """Collate samples into one batch, on the CPU. Runs in a thread beside the training.

        Samples of a `Source` come as `Rows`: `samples["image"]` is a column as one array, and
        `samples[0]` a row as a dict.

        `rng` is for augmentation: seeded by the place of these samples in the canonical sequence,
        so that a batch is the same whoever makes it. It belongs to this call: the next one gets it
        begun anew. None for held-out samples: do not augment those.

        Anything random about a sample must draw from `rng`, here and not in the data set. The
        global generators of torch, numpy and Python are not seeded for this thread, and torch's is
        the one that a forward pass draws from meanwhile: a transform that uses them makes the
        result depend on timing. It is refused where the first batches draw from one of them; later
        draws go unseen. For torch, seed a generator:
        `torch.Generator().manual_seed(int(rng.integers(2**63)))`.
        """
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def weight(self, batch: Batch, samples: int) -> float:  # noqa: ARG002
        """How much `batch` counts in the global mean: its samples, or for text its tokens.

        The loss is the mean over what this counts. Of targets that the loss leaves out
        (`ignore_index`, padding) nothing is to be counted.

        A number of any kind, also a tensor with a single one.
        """
        return float(samples)

    def metrics(self, model: nn.Module, batch: Batch, samples: int) -> Mapping[str, Metric | float]:
        """Measure one held-out batch; called without gradients, in `eval` mode.

        It is called on a few held-out samples before the first step, too, so that an error in it
        is found then.

        Returns:
            Mergeable metrics by name. A number (or a tensor without dimensions) is taken as a mean
            over this batch's samples: batches are averaged, each weighted by its samples. The
            default is the weighted mean loss.
        """
        weight = float(self.weight(batch, samples))
        if weight == 0.0:  # nothing in it counts; its mean loss may be 0/0
            return {"loss": Mean(total=0.0, weight=0.0)}
        return {"loss": Mean(total=float(self.loss(model, batch)) * weight, weight=weight)}

    def sample(self, model: nn.Module) -> str | None:  # noqa: ARG002
        """A short text that shows what the trained model does; printed at the end of a run."""
        return None
