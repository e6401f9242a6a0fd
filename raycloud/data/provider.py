"""Provider: makes the sources of a task into samples; nothing is loaded for it but names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from raycloud.data.index import Prepared
    from raycloud.data.samples import BlockSamples
    from raycloud.task import Samples, Splits, Task

Least = Literal["each", "one", "none"]  # of shards, that have to have a server


@dataclass(frozen=True, kw_only=True, slots=True)
class Provided:
    """Samples to train on, and those that measure the result; `prepared` is by split."""

    train: Samples
    held_out: Samples | None
    prepared: Mapping[str, Prepared] = field(default_factory=dict)


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
        """The samples to train on with the files of a `DataGrew` event: the first ids are the same.

        Version 0 is what `provide` gave.
        """
        ...

    @property
    def layout(self) -> int:
        """The number of the newest layout of servers: in how many shards, by which of them."""
        ...

    def servers(self, layout: int = 0, *, least: Least = "each") -> Sequence[Sequence[Any]]:
        """The `net.stream.Place` of each server of each shard of a layout; None: it is silent.

        It waits where a shard has none; or where all have none, if `one` is enough; or not at all.

        Raises:
            TransportError: None comes.
        """
        ...
