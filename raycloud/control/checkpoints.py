"""Checkpoints in flight: several may be, each known by its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Part = Mapping[str, Any]


@dataclass(kw_only=True, slots=True)
class Checkpoints:
    """Collects parts until a checkpoint can be published.

    Attributes:
        last_published: Step of the newest checkpoint that may be restored from; None before the
            first.
        damaged: The newest of which all parts were there cannot be published: they are not sound.
    """

    last_published: int | None = None
    damaged: bool = False
    _parts: dict[int, dict[int, Part]] = field(default_factory=dict)  # by step, by member
    _divided: dict[int, int] = field(default_factory=dict)  # by step, among which generation
    _counts_from: int = 0  # parts of older generations do not
    _publishing: dict[int, dict[int, Part]] = field(default_factory=dict)  # by step, by member
    _failed: int | None = None  # the one of them that could not be published
    _whole: int = -1  # step of the newest of which all parts were there

    def collecting(self, generation: int) -> tuple[int, ...]:
        """Steps of checkpoints of which a part is missing, divided among this one or newer ones."""
        return tuple(sorted(step for step, g in self._divided.items() if g >= generation))

    @property
    def publishing(self) -> tuple[int, ...]:
        """Steps of checkpoints that are complete and not yet published."""
        return tuple(sorted(self._publishing))

    def missing(self, step: int, group: tuple[int, ...]) -> tuple[int, ...]:
        """Members of `group` whose part of `step` is missing."""
        return tuple(m for m in group if m not in self._parts.get(step, {}))

    def add(
        self, step: int, member: int, part: Part, group: tuple[int, ...], generation: int = 0
    ) -> dict[int, Part] | None:
        """Take in a part; all parts, by member in order of rank, if it was the last one.

        Members that meet anew write the checkpoint before their first step again: without effect
        where all of its parts were there before.

        Args:
            step: Of the checkpoint.
            member: Whose part it is.
            part: What it has written.
            group: Among whom the checkpoint is divided.
            generation: As which they met.
        """
        if step <= self._whole or generation < self._counts_from:
            return None
        self._divided[step] = generation
        parts = self._parts.setdefault(step, {})
        parts[member] = part
        if len(parts) < len(group) or any(m not in parts for m in group):
            return None
        for older in [at for at in self._divided if at <= step]:  # each writes in order
            self._parts.pop(older, None)
            del self._divided[older]
        if self._failed is not None:
            del self._publishing[self._failed]
            self._failed = None
        self._publishing[step] = {m: parts[m] for m in group}
        self._whole, self.damaged = step, False
        return self._publishing[step]

    def lack(self, step: int, generation: int) -> bool:
        """A member could not write its part of this one; it may still come. False: nobody waits."""
        if step <= self._whole or generation < self._counts_from:
            return False
        self._divided[step] = generation
        return True

    def failed(self, step: int, *, damaged: bool) -> None:
        """It could not be published; it is to be published again, if no newer one is there."""
        if step == self._whole:
            self._failed, self.damaged = step, damaged
        else:
            del self._publishing[step]

    def again(self) -> tuple[int, dict[int, Part]] | None:
        """The step and the parts of what is to be published again, once it was; None: nothing."""
        step = self._failed
        if step is None or self.damaged:
            return None
        self._failed = None
        return step, self._publishing[step]

    def drop(self) -> None:
        """Forget those of which a part is missing: one who was to write a part is gone."""
        self._parts.clear()
        self._divided.clear()

    def drop_before(self, generation: int) -> None:
        """The same for those divided among older generations, and for parts still to come."""
        for step in [step for step, g in self._divided.items() if g < generation]:
            self._parts.pop(step, None)
            del self._divided[step]
        self._counts_from = generation

    def go_back(self, step: int) -> None:
        """That of this step is whole, and newer ones are written again."""
        self.drop()
        if self._failed is not None:
            del self._publishing[self._failed]
        self._failed, self.damaged = None, False
        self._whole = step
        self.last_published = step or None

    def published(self, step: int) -> None:
        """The checkpoint of `step` may be restored from."""
        del self._publishing[step]
        self.last_published = max(step, self.last_published or 0)
