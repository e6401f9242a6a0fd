"""Error feedback: what encoding has lost of gradients is kept, and added to those of the next step.

e <- e + g; send c(e); e <- e - decode(c(e)), per member (Seide et al., "1-bit stochastic gradient
descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019). What the
owner of a part loses by encoding the sum is kept there, too: so what all members keep, and what
they have applied, adds up to all gradients.

A step is a transaction here as elsewhere: the new residual is staged beside the one there is, and
takes its place where the step is committed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from raycloud.sync.buckets import Bucket


class Residual:
    """This member's, by bucket. Three buffers of a bucket's size change places; none is copied.

    Attributes:
        of_updates: It is of what rounds have moved; else of gradients.
        passing: Nothing is encoded any more: what is kept goes with the next gradients, whole.
    """

    def __init__(self) -> None:
        self.of_updates = self.passing = False
        self._kept: dict[Bucket, torch.Tensor] = {}
        self._staged: dict[Bucket, torch.Tensor | None] = {}
        self._spare: dict[Bucket, torch.Tensor] = {}
        self._before: dict[Bucket, torch.Tensor | None] = {}  # what was kept before `count`

    def add_to(self, bucket: Bucket) -> None:
        """Add what is kept to the bucket's gradients."""
        kept = self._kept.get(bucket)
        if kept is not None:
            bucket.flat.add_(kept)

    def stage(self, bucket: Bucket, left: torch.Tensor | None) -> None:
        """What is left of this step's gradients; it is the residual's memory from now on."""
        again = self._staged.get(bucket)
        if again is not None:  # the step is exchanged once more
            self._spare[bucket] = again
        self._staged[bucket] = left

    def room(self, bucket: Bucket) -> torch.Tensor:
        """Memory for the bucket's sum, which is the caller's from now on."""
        spare = self._spare.pop(bucket, None)
        return torch.empty_like(bucket.flat) if spare is None else spare

    def count(self) -> None:
        """What is staged counts as long as the round does that it is a part of."""
        for bucket, left in self._staged.items():
            before = self._kept.pop(bucket, None)
            if bucket not in self._before:
                self._before[bucket] = before
            elif before is not None:
                self._spare[bucket] = before
            if left is not None:
                self._kept[bucket] = left
        self._staged.clear()

    def commit(self) -> None:
        """The step counts."""
        self.count()
        self._spare |= {b: before for b, before in self._before.items() if before is not None}
        self._before.clear()

    def discard(self) -> None:
        """The step does not count: what was kept before it stays."""
        for bucket, left in self._staged.items():
            if left is not None:
                self._spare[bucket] = left
        self._staged.clear()
        for bucket, before in self._before.items():
            left = self._kept.pop(bucket, None)
            if left is not None:
                self._spare[bucket] = left
            if before is not None:
                self._kept[bucket] = before
        self._before.clear()

    def abandon(self) -> None:
        """An exchange broke, and may still write to what was staged or lent: leave it behind."""
        self._staged.clear()
        self.discard()
        self._spare.clear()

    def kept(self, bucket: Bucket) -> torch.Tensor:
        """What is kept of a bucket's, not to be changed."""
        kept = self._kept.get(bucket)
        return torch.zeros_like(bucket.flat) if kept is None else kept

    def keep(self, bucket: Bucket, left: torch.Tensor) -> None:
        """Keep this in the place of what is kept, outside a step."""
        self._kept[bucket] = left

    def clear(self) -> None:
        """Keep nothing: the state is another one now."""
        self.abandon()
        self._kept.clear()

    @property
    def empty(self) -> bool:
        """Nothing is kept, as before the first step that was encoded."""
        return not self._kept

    @property
    def norm(self) -> float:
        """Of what is kept."""
        return math.hypot(*(float(torch.linalg.vector_norm(one)) for one in self._kept.values()))
