"""What a backup knows of the member that it backs up: how far that is, and when it will be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raycloud.sync.notes import Kind

if TYPE_CHECKING:
    from raycloud.sync.notes import Note

_WORTH = 1.5  # times what the backup takes itself: less is gained than was expected, mostly


class Primary:
    """The member that is backed up, in the newest step of which it has told."""

    def __init__(self) -> None:
        """It has told nothing."""
        self._step = -1
        self._left: dict[int, int] = {}  # how many micro-batches a pass has, by its first one
        self._count, self._seconds, self._begun_s = 0, 0.0, 0.0

    def heard(self, note: Note, now_s: float) -> None:
        """It has told this."""
        if note.step != self._step:
            self._step, self._left, self._count = note.step, {}, 0
        if note.kind is Kind.OFFERED:
            self._left[note.index] = note.count
        elif note.kind is Kind.BEGUN:
            self._left.pop(note.index, None)
            self._count, self._seconds, self._begun_s = note.count, note.seconds, now_s

    def next(
        self, step: int, own_s: float | None, now_s: float, *, busy: int = 0
    ) -> tuple[int, int] | None:
        """The last pass that it has not begun, if it is worth while to compute that as well.

        Args:
            step: The present one.
            own_s: What a micro-batch takes here; None: not known.
            now_s: The present moment.
            busy: Micro-batches that are to be computed here before that.

        Returns:
            Its first micro-batch, and how many it has.
        """
        if own_s is None or step != self._step or not self._left:
            return None
        index, count = max(self._left.items())
        needed_s = own_s * (_WORTH * count + busy)
        return (index, count) if self.rest_s(now_s) > needed_s else None

    def started(self, index: int) -> None:
        """The backup computes this pass."""
        self._left.pop(index, None)

    def rest_s(self, now_s: float) -> float:
        """Seconds until it will have done all that the backup has not started.

        What it has begun shows how slow it is only once it takes longer than what was before.
        """
        if not self._count:
            return 0.0
        since_s = now_s - self._begun_s
        one_s = max(self._seconds, since_s / self._count)
        return max(self._count * one_s - since_s, 0.0) + sum(self._left.values()) * one_s
