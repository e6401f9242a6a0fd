"""How many micro-batches a pass has, at most: as many as were tried, and more step by step.

Memory that a pass does not find ends a process on a CPU: the system kills it, and nothing can be
caught. So a share that has grown, since members went, is not fused whole at once. Passes become
twice as large from one step to the next, while memory for that is at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raycloud.training.room import process_bytes, room_bytes


class PassSize:
    """The size of passes of one member.

    Args:
        most: What the job allows and is exact.
        stepwise: It is not the user who has asked for that many.
        holds_twice: Whether there is memory for passes twice as large as the largest so far.
        notice: Tells a person what is done in another way.

    Attributes:
        most: The same; it becomes less where a pass turns out not exact, or not to fit.
    """

    def __init__(
        self,
        most: int,
        *,
        stepwise: bool,
        holds_twice: Callable[[], bool],
        notice: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        """Nothing is tried: passes are as large as is asked."""
        self.most = most
        self._stepwise, self._holds_twice, self._notice = stepwise, holds_twice, notice
        self._bound = self._proven = most
        self._begun = False
        self._grows = True
        self._refused = 0  # the share for which memory was not at hand

    @property
    def now(self) -> int:
        """Micro-batches of a pass, at most."""
        return min(self.most, self._bound)

    def begin(self, tried: int) -> None:
        """So many have been computed at once: more than that only step by step."""
        if self._stepwise:
            self._proven = max(tried, self._proven if self._begun else 1)
            self._bound, self._begun = self._proven, True

    def resume(self, size: int) -> None:
        """Passes have been this large before the checkpoint: so they are, and round, again."""
        if self._stepwise:
            self._bound = self._proven = size
            self._begun = True

    def committed(self, sizes: Sequence[int]) -> bool:
        """A step is committed of which this member has computed passes of such sizes.

        Returns:
            Passes of the steps to come are larger.
        """
        bound, largest = self._bound, max(sizes, default=0)
        self._proven = max(self._proven, min(largest, self.now))
        if len(sizes) <= 1 or largest < bound or bound >= self.most:
            return False
        if bound < self._proven:  # it was this large before
            self._bound = min(2 * bound, self._proven)
        elif self._may_grow(sum(sizes)):
            self._bound = 2 * bound
        return self._bound > bound

    def _may_grow(self, share: int) -> bool:
        """Whether larger passes than ever may be computed."""
        if not self._grows or share == self._refused:
            return False
        if self._holds_twice():
            return True
        self._refused = share
        what = f"passes stay at {self._bound} micro-batches of {share}: there is no memory for more"
        self._notice(what, {"share": share})
        return False

    def lost(self) -> None:
        """A member was lost, and it may have been for memory: no pass is larger than ever before.

        All have grown alike. Where this one was about to compute, or has just computed, a larger
        pass than in any step that was committed, so was the one that is lost.
        """
        if self._bound > self._proven:
            what = f"a member was lost as passes became larger: they stay at {self._proven}"
            self._notice(what, {"was": self._bound})
            self._bound, self._grows = self._proven, False

    def be_careful(self) -> None:
        """Members are lost that compute this step: each micro-batch alone takes least memory."""
        self._bound = 1


class Memory:
    """What passes take of it, and what is left.

    Args:
        device: Where they are computed.
        reserved_bytes: What this process is to get along with; None: what there is.
        root: Where the system's files lie.
    """

    def __init__(
        self, device: torch.device, reserved_bytes: int | None, root: Path = Path("/")
    ) -> None:
        """No pass was computed: what the process has now is no pass's."""
        self._device, self._reserved_bytes, self._root = device, reserved_bytes, root
        self._before_bytes = self._bytes()[0]

    def holds_twice(self) -> bool:
        """Whether there is memory for passes twice as large as the largest so far.

        A pass twice as large takes at most as much more as the one before has taken in all. Other
        members of a node grow at the same time: of the machine's memory a quarter is this one's.
        """
        _, peak_bytes = self._bytes()
        more_bytes = peak_bytes - self._before_bytes
        if self._device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            kept_bytes = torch.cuda.memory_reserved(self._device)
            return more_bytes <= free_bytes + kept_bytes - self._bytes()[0]
        return peak_bytes > 0 and more_bytes <= room_bytes(self._reserved_bytes, self._root)

    def _bytes(self) -> tuple[int, int]:
        """Now, and at most so far; (0, 0) where the system does not tell."""
        if self._device.type == "cuda":
            now_bytes = torch.cuda.memory_allocated(self._device)
            return now_bytes, torch.cuda.max_memory_allocated(self._device)
        return process_bytes(self._root)
