"""What of a step is still to be computed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from raycloud.training.collate import Pass


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
