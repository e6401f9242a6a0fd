"""What a member has computed of a step that is not committed yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raycloud.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from raycloud.step.collate import Pass, StepWork


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Its gradients are there, and stay when an exchange breaks.

    Attributes:
        step: Which step.
        micro_batches: Indices in the step of those that it has computed, rising.
        weight: Their weight.
        rows: Sum over the samples that were read for them; see `collate.row_sum`.
        skipped: Those among them that cannot be computed, and are not to be tried again.
    """

    step: int
    micro_batches: tuple[int, ...] = ()
    weight: float = 0.0
    rows: int = 0
    skipped: tuple[int, ...] = ()

    def and_also(self, work: StepWork) -> Kept:
        """What is kept once `work` is computed too.

        Raises:
            InternalError: It is of another step, or computed already.
        """
        new = work.indices
        both = sorted([*self.micro_batches, *new])
        if self.step != work.span.step or len(set(both)) < len(both):
            raise InternalError(f"{new} of step {work.span.step} were to be computed beside {self}")
        weight, rows = self.weight + work.weight, self.rows + work.rows
        return replace(self, micro_batches=tuple(both), weight=weight, rows=rows)

    def without(self, index: int) -> Kept:
        """The same, where `index` is one that cannot be computed."""
        return replace(self, skipped=tuple(sorted({*self.skipped, index})))


class Todo:
    """Passes, one after the other.

    Args:
        passes: In the order in which they are to be computed.

    Attributes:
        begun: One of them was.
    """

    def __init__(self, passes: Iterable[Pass]) -> None:
        """All of them."""
        self._left = deque(passes)
        self.begun = False

    def begin(self) -> Pass | None:
        """The next one, which is computed now; None: there is none."""
        self.begun = self.begun or bool(self._left)
        return self._left.popleft() if self._left else None

    def instead(self, passes: Iterable[Pass]) -> None:
        """The one that was begun is not computed; these are in its place."""
        self._left.extendleft(reversed(tuple(passes)))

    def more(self) -> bool:
        """Whether something may follow the one that is begun. Once it is False that is final."""
        return bool(self._left)
