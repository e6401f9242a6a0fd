"""The control lane: a few numbers per step beside the gradients, on the CPU, never compressed.

At the start of step s every member gives what the others must know before its gradients can be
scaled (the weight of its share of s) and what they want to know of the step before (its loss).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raycloud.sync.transport import Transport, Work, finish


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneReport:
    """What one member gives, or (as `Lane.read` returns it) the sums over all members.

    Attributes:
        weight: Weight of the micro-batches of the step that begins.
        loss: Sum of weight * loss of the step before; 0 at the first step.
    """

    weight: float
    loss: float = 0.0


class Lane:
    """One small all-reduce a step."""

    def __init__(self, transport: Transport) -> None:
        """Use a transport of the lane's own, so that its order is free of the gradients'."""
        self._transport = transport
        self._work: Work | None = None
        self._buffer = torch.zeros(2, dtype=torch.float64)

    def send(self, report: LaneReport) -> None:
        """Start this step's exchange; returns at once."""
        self._buffer = torch.tensor([report.weight, report.loss], dtype=torch.float64)
        self._work = self._transport.all_reduce(self._buffer) if self._transport.size > 1 else None

    def read(self, abandoned: Callable[[], bool]) -> LaneReport:
        """The sums over members of what was sent last."""
        if self._work is not None:
            finish(self._work, abandoned)
            self._work = None
        weight, loss = self._buffer.tolist()
        return LaneReport(weight=weight, loss=loss)

    def sum(self, values: Sequence[float], abandoned: Callable[[], bool]) -> list[float]:
        """Sums over members of as many numbers from each; nothing that was sent is unread."""
        numbers = torch.tensor(values, dtype=torch.float64)
        if self._transport.size > 1:
            finish(self._transport.all_reduce(numbers), abandoned)
        return list(numbers.tolist())
