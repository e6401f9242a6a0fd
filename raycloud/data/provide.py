"""What a worker gets in place of a `Source`: samples read from blocks, and who provides them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from raycloud.data.index import Index
    from raycloud.data.samples import BlockSamples
    from raycloud.task import Splits, Task

TRAIN, HELD_OUT = "train", "held_out"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """How one split was made ready.

    Attributes:
        index: Its blocks, partitions, inputs and bad rows.
        cached_blocks: Blocks of the index that were in the cache already.
        made_blocks: Blocks of the index that were made.
        seconds: How long it took, from looking for files to the last block.
        read_s: Of all readers together, how long they waited for their source.
    """

    index: Index
    cached_blocks: int
    made_blocks: int
    seconds: float
    read_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Provided:
    """Samples that are ready to be read.

    Attributes:
        train: The samples to train on.
        held_out: The samples that measure the result.
        prepared: By split, `"train"` and `"held_out"`.
    """

    train: BlockSamples
    held_out: BlockSamples | None
    prepared: Mapping[str, Prepared]


class Provider(Protocol):
    """Makes the `Source`s of a task into samples. One per worker; it may block for minutes."""

    def provide(self, task: Task, splits: Splits) -> Provided:
        """The samples of both splits. Called once, before the first step.

        Raises:
            DataError: Nothing is there, it cannot be read, or rows are bad.
            TaskError: `Task.preprocess` broke its contract.
        """
        ...

    def grown(self, version: int) -> BlockSamples:
        """The samples to train on with the files of `version` added: the first ids are the same.

        Args:
            version: As announced in a `DataGrew` event; 0 is what `provide` gave.
        """
        ...
