"""How the gradients of all members become one mean: buckets, flags, and strategies to sum them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from raycloud.spec.sizes import ring_bytes

if TYPE_CHECKING:
    from raycloud.net.transport import Transport, Work

_FLAGS = 3  # numbers, before those of parameters


class Bucket:
    """Some parameters, of one type and device, whose gradients travel in one message.

    Attributes:
        flat: The gradients one after the other, as one tensor: what travels.
        slots: The same, in the shapes of the parameters.
        missing: Indices of parameters whose gradients are not yet in place.
    """

    def __init__(self, group: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.names = tuple(name for name, _ in group)
        self.parameters = tuple(parameter for _, parameter in group)
        self.missing: set[int] = set()
        self._sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        self._hold(torch.zeros(sum(self._sizes), dtype=first.dtype, device=first.device))

    @property
    def payload_bytes(self) -> int:
        """Bytes of one message."""
        return self.flat.nbytes

    def renew(self) -> None:
        """Take other memory: a broken exchange may still write to what there was."""
        self._hold(torch.zeros_like(self.flat))

    def _hold(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.slots = self.cut(flat)

    def cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`slots` of a message that is laid out as this one."""
        return tuple(
            part.view(parameter.shape)
            for part, parameter in zip(flat.split(self._sizes), self.parameters, strict=True)
        )


class Flags:
    """What members tell each other with the last gradients of a step: summed, never compressed.

    `message` is what travels: the three, then a number for each parameter, in the order of
    `buckets`.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._counts = [len(bucket.parameters) for bucket in buckets]
        device = buckets[-1].flat.device
        self.message = torch.zeros(_FLAGS + sum(self._counts), device=device)

    @property
    def bytes(self) -> int:
        """Of one message."""
        return self.message.nbytes

    def renew(self) -> None:
        """Take other memory: a broken exchange may still write to what there was."""
        self.message = torch.zeros_like(self.message)

    def tell(
        self,
        *,
        behind: bool,
        astray: torch.Tensor | float,
        late: bool,
        used: Sequence[bool],
    ) -> None:
        """Write this member's.

        Args:
            behind: The next change is not at hand here.
            astray: Not 0 where what this member has sent is not its part of the step.
            late: It has told that it takes far longer than usual.
            used: Each parameter that was. The sum tells a gradient of zero from none at all, so
                that an optimizer skips those that it skips in a single process.
        """
        told = [float(behind), 0.0, float(late), *map(float, used)]
        self.message.copy_(torch.tensor(told), non_blocking=True)  # else a GPU is waited for
        self.message[1] = astray

    def read(self, numbers: Sequence[float]) -> tuple[bool, bool, bool, list[Sequence[float]]]:
        """`behind`, `astray` and `late` of any, and by bucket what was used, of such sums."""
        behind, astray, late = (bool(number) for number in numbers[:_FLAGS])
        ends = list(accumulate(self._counts, initial=_FLAGS))
        return behind, astray, late, [numbers[a:b] for a, b in pairwise(ends)]


def lay_out(parameters: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int) -> list[Bucket]:
    """Group parameters into buckets, in the order in which a backward pass tends to finish them.

    That is the reverse of the order of registration. The layout depends on nothing else, so that
    every member, and a resumed run, has the same one. A bucket is closed when it holds
    `bucket_bytes`; the one that fills first takes a quarter, so that the exchange starts early.
    """
    groups: list[list[tuple[str, nn.Parameter]]] = []
    filled, limit = 0, bucket_bytes // 4
    for name, parameter in reversed(parameters):
        last = groups[-1][-1][1] if groups and filled < limit else None
        if last is None or (last.dtype, last.device) != (parameter.dtype, parameter.device):
            limit = bucket_bytes if groups else bucket_bytes // 4
            groups.append([])
            filled = 0
        groups[-1].append((name, parameter))
        filled += parameter.numel() * parameter.element_size()
    return [Bucket(group) for group in groups]


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
