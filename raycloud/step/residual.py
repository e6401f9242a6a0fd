"""The residual of error feedback as a part of a replica: see `sync.residual`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from raycloud.errors import TaskError
from raycloud.net.exchange import parts_of
from raycloud.net.transport import finish
from raycloud.step.stateful import Stateful

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from raycloud.net.transport import Transport, Work
    from raycloud.sync.buckets import Bucket
    from raycloud.sync.gradients import GradientExchange
    from raycloud.sync.residual import Residual

_FLAT = "flat"


class ResidualPart(Stateful):
    """What this member keeps of its own, so that no other state may overwrite it but a checkpoint.

    A checkpoint has what each member keeps. As many members take up each their own again, others
    an equal part of the sum. `GradientExchange.commit` commits it, also where the rest of the state
    is still on its way to this member.

    Args:
        residual: What is kept.
        buckets: All, in their order.
        seat: This member's rank, and how many members there are.
    """

    name = "residual"

    def __init__(
        self, residual: Residual, buckets: Sequence[Bucket], seat: Callable[[], tuple[int, int]]
    ) -> None:
        self._residual, self._buckets, self._seat = residual, tuple(buckets), seat

    @classmethod
    def of(
        cls, gradients: GradientExchange, seat: Callable[[], tuple[int, int]]
    ) -> ResidualPart | None:
        """That of an exchange; None where nothing is lost."""
        kept = gradients.residual
        return None if kept is None else cls(kept, gradients.buckets, seat)

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """See `Stateful.own_tensors`; none where nothing is kept, as of what travels as it is."""
        if self._residual.passing and self._residual.empty:
            return {}
        kept = [self._residual.kept(bucket) for bucket in self._buckets]
        return {_FLAT: torch.cat([one.float().cpu() for one in kept])}

    def check_fits(self, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]) -> None:  # noqa: ARG002 - it has none
        """See `Stateful.check_fits`."""
        count = sum(bucket.flat.numel() for bucket in self._buckets)
        for name, shape in shapes.items():
            if not name.startswith(f"{_FLAT}/") or shape != (count,):
                raise TaskError(
                    f"the checkpoint has a residual {name!r} of shape {shape}, not ({count},)",
                    hint="resume with the task that the run was started with, or sync.codec none",
                )

    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """See `Stateful.load`."""
        if not tensors:  # another member's state
            return
        by_number = {int(name.rpartition("/")[2]): tensor for name, tensor in tensors.items()}
        self._residual.clear()
        self._residual.of_updates = bool(values.get("of_updates", False))
        rank, size = self._seat()
        if sorted(by_number) == list(range(size)):
            self._keep(by_number[rank])
        else:
            self._keep_part(sum_of(by_number[number] for number in sorted(by_number)), rank, size)

    def begin(self) -> None:
        """See `Stateful.begin`: a checkpoint of a run without a codec."""
        self._residual.clear()

    def encode(self, *, of_updates: bool) -> None:
        """What is encoded next is of such a kind: what is kept of the other kind is left behind."""
        if of_updates != self._residual.of_updates:
            self._residual.of_updates = of_updates
            self._residual.clear()

    def values(self) -> dict[str, Any]:
        """See `Stateful.values`."""
        return {"of_updates": self._residual.of_updates}

    @property
    def of_updates(self) -> bool:
        """What is kept is of what rounds have moved; else of gradients."""
        return self._residual.of_updates

    @property
    def norm(self) -> float:
        """Of what is kept."""
        return self._residual.norm

    def forget(self) -> None:
        """This member has another's state, which counts what it has sent."""
        self._residual.clear()

    def give(self, transport: Transport, leaving: Sequence[int]) -> Handover:
        """Begin to hand what members of ranks `leaving` keep to the others; all call this.

        `TransportError`: it broke, and what this member keeps is as before.
        """
        staying = [rank for rank in range(transport.size) if rank not in leaving]
        kept = [self._residual.kept(bucket) for bucket in self._buckets]
        if transport.rank in leaving:
            sums, then = [one.clone() for one in kept], self._residual.clear
        else:
            sums = [torch.zeros_like(one) for one in kept]
            rank, size = staying.index(transport.rank), len(staying)

            def then() -> None:
                self._keep_part(torch.cat([one.float().cpu() for one in sums]), rank, size)

        return Handover([transport.all_reduce(one) for one in sums], then)

    def _keep(self, flat: torch.Tensor) -> None:
        sizes = [bucket.flat.numel() for bucket in self._buckets]
        for bucket, one in zip(self._buckets, flat.split(sizes), strict=True):
            self._residual.keep(bucket, self._residual.kept(bucket) + one.to(bucket.flat))

    def _keep_part(self, flat: torch.Tensor, rank: int, size: int) -> None:
        """Add the part of `rank`, and nothing of the others'."""
        own = torch.zeros_like(flat)
        parts_of(own, size)[rank].copy_(parts_of(flat, size)[rank])
        self._keep(own)


class Handover:
    """What members that leave keep, on its way to those that stay."""

    def __init__(self, works: Sequence[Work], then: Callable[[], None]) -> None:
        self._works, self._then = works, then

    def finish(self, abandoned: Callable[[], bool]) -> None:
        """Wait for it; `TransportError`: it broke, or was abandoned, and nothing has changed."""
        for work in self._works:
            finish(work, abandoned)
        self._then()


def sum_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their sum, in this order."""
    first, *others = tensors
    total = first.clone()
    for one in others:
        total += one
    return total
