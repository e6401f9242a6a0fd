"""Buckets of gradients, each of which travels as one message, and the flags beside them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

_FLAGS = 4  # numbers, before those of parameters
_MEASURES = 2  # numbers, after those
_HELD = 4  # memories of a bucket that take turns, at most


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
        self._cut: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
        self.hold(torch.zeros(sum(self._sizes), dtype=first.dtype, device=first.device))

    @property
    def payload_bytes(self) -> int:
        """Bytes of one message."""
        return self.flat.nbytes

    def renew(self) -> None:
        """Take other memory: a broken exchange may still write to what there was."""
        self._cut.clear()
        self.hold(torch.zeros_like(self.flat))

    def hold(self, flat: torch.Tensor) -> None:
        """Have this for `flat`: a few change places, so each is cut once only."""
        self.flat = flat
        known = next((slots for one, slots in self._cut if one is flat), None)
        if known is None:
            known = self.cut(flat)
            self._cut = [*self._cut[-_HELD + 1 :], (flat, known)]
        self.slots = known

    def cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`slots` of a message that is laid out as this one."""
        return tuple(
            part.view(parameter.shape)
            for part, parameter in zip(flat.split(self._sizes), self.parameters, strict=True)
        )


class Flags:
    """What members tell each other with the last gradients of a step: summed, never compressed.

    `message` is what travels: the four, then a number for each parameter, in the order of
    `buckets`; and last, of gradients that are `measured`, two more; all are doubles then.
    """

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, *, measured: bool = False
    ) -> None:
        self._counts = [len(bucket.parameters) for bucket in buckets]
        size, self._measured = _FLAGS + sum(self._counts), measured
        dtype = torch.float64 if measured else torch.float32
        self.message = torch.zeros(size + _MEASURES * measured, dtype=dtype, device=device)

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
        moves: bool,
        used: Sequence[bool],
        measured: tuple[torch.Tensor | float, float] = (0.0, 0.0),
    ) -> None:
        """Write this member's.

        Args:
            behind: The next change is not at hand here.
            astray: Not 0 where what this member has sent is not its part of the step.
            late: It has told that it takes far longer than usual.
            moves: After this step all are to look anew which servers have the tables' rows.
            used: Each parameter that was. The sum tells a gradient of zero from none at all, so
                that an optimizer skips those that it skips in a single process.
            measured: Of gradients that are: w_i |g_i|^2, and 1 where it has a part of the step.
        """
        known = 0.0 if isinstance(astray, torch.Tensor) else astray
        told = [float(behind), known, float(late), float(moves), *map(float, used)]
        told += [0.0, measured[1]] if self._measured else []
        # A GPU would be waited for, also to write a number into a place.
        self.message.copy_(torch.tensor(told), non_blocking=True)
        if isinstance(astray, torch.Tensor):
            self.message[1] = astray
        if self._measured:
            self.message[-_MEASURES] = measured[0]

    def measured(self, numbers: Sequence[float]) -> tuple[float, float] | None:
        """The last two of such sums; None: gradients are not measured."""
        return (numbers[-2], numbers[-1]) if self._measured else None

    def keep(self, measured: tuple[float, float]) -> None:
        """Have these in place of the last two: who commits the step later finds them there."""
        self.message[-_MEASURES:] = torch.tensor(measured, dtype=self.message.dtype)

    def read(
        self, numbers: Sequence[float]
    ) -> tuple[bool, bool, bool, bool, list[Sequence[float]]]:
        """`behind`, `astray`, `late` and `moves` of any, and by bucket what was used, of sums."""
        behind, astray, late, moves = (bool(number) for number in numbers[:_FLAGS])
        ends = list(accumulate(self._counts, initial=_FLAGS))
        return behind, astray, late, moves, [numbers[a:b] for a, b in pairwise(ends)]


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
