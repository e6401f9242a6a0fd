"""How the gradients of all members become one mean: strategies, of which the loop knows none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from raycloud.spec.sizes import ring_bytes

if TYPE_CHECKING:
    from raycloud.net.transport import Transport, Work
    from raycloud.sync.buckets import Bucket


class SyncStrategy(Protocol):
    """Sums gradients over the members of a generation, bucket by bucket.

    Order of calls: `connect` for each generation; in each step `start` for each bucket, in the same
    order everywhere, while the last backward pass goes on; then, once the works of all have
    arrived, `finish` for each. From `start` to `finish` a bucket is the strategy's. An exchange
    that breaks has no `finish`: `connect` follows, and the buckets are others where messages were
    on their way. Flags travel beside all that, in a message of their own.
    """

    def connect(self, transport: Transport) -> None:
        """Exchange over `transport` from now on."""

    def start(self, bucket: Bucket) -> Work | None:
        """Begin to sum `bucket.flat`, this member's part of the mean; None: nothing travels.

        Raises:
            TransportError: The connections are broken.
        """

    def finish(self, bucket: Bucket) -> None:
        """Its messages have arrived: `bucket.flat` is the sum from now on, the same everywhere."""

    def bytes_sent(self, bucket: Bucket) -> int:
        """Bytes that this member has sent of it in a step."""


class AllReduce:
    """The exact sum, by an all-reduce of each bucket as it is."""

    def __init__(self) -> None:
        self._transport: Transport | None = None

    def connect(self, transport: Transport) -> None:
        """See `SyncStrategy.connect`."""
        self._transport = transport

    def start(self, bucket: Bucket) -> Work | None:
        """See `SyncStrategy.start`."""
        transport = self._transport
        if transport is None or transport.size == 1:
            return None
        return transport.all_reduce(bucket.flat)

    def finish(self, bucket: Bucket) -> None:
        """Nothing: the sum has come where the part was."""

    def bytes_sent(self, bucket: Bucket) -> int:
        """See `SyncStrategy.bytes_sent`: those of a ring."""
        size = 1 if self._transport is None else self._transport.size
        return ring_bytes(bucket.payload_bytes, size)


# By what a job calls them; `exact` is what it gets where it says nothing.
STRATEGIES: dict[str, Callable[[], SyncStrategy]] = {"exact": AllReduce}
