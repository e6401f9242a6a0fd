"""What a member has computed of a step that is not committed yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycloud.errors import InternalError

if TYPE_CHECKING:
    from raycloud.training.collate import StepWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Its gradients are there, and stay when an exchange breaks.

    Attributes:
        step: Which step.
        micro_batches: Indices in the step of those that it has computed, rising.
        weight: Their weight.
    """

    step: int
    micro_batches: tuple[int, ...] = ()
    weight: float = 0.0

    def and_also(self, work: StepWork) -> Kept:
        """What is kept once `work` is computed too.

        Raises:
            InternalError: It is of another step, or computed already.
        """
        new = [m.index for one in work.passes for m in one.micro_batches]
        both = sorted([*self.micro_batches, *new])
        if self.step != work.span.step or len(set(both)) < len(both):
            raise InternalError(f"{new} of step {work.span.step} were to be computed beside {self}")
        return Kept(step=self.step, micro_batches=tuple(both), weight=self.weight + work.weight)
