"""Provider: makes the sources of a task into samples; nothing is loaded for it but names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from raycloud.data.index import Prepared
    from raycloud.data.samples import BlockSamples
    from raycloud.task import Splits, Task


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
