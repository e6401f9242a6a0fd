"""Puts the members' measures of the held-out samples together."""

from __future__ import annotations

from collections.abc import Sequence

from raycloud.events import Evaluated, EvaluationPart
from raycloud.metrics import Metric, merge_all


class Measures:
    """Parts of measurements that are not complete."""

    def __init__(self) -> None:
        """None yet."""
        self._parts: dict[int, dict[int, EvaluationPart]] = {}

    def add(self, part: EvaluationPart, members: Sequence[int]) -> Evaluated | None:
        """Take in a part; the whole once every one of `members` has given its own.

        Parts are merged in the order of `members`, so that the result does not depend on who was
        first.
        """
        parts = self._parts.setdefault(part.step, {})
        parts[part.member] = part
        if set(parts) != set(members):
            return None
        del self._parts[part.step]
        merged = merge_all(
            {name: Metric.from_state(state) for name, state in parts[member].states.items()}
            for member in members
        )
        texts = [p.sample for p in parts.values() if p.sample is not None]
        return Evaluated(
            step=part.step,
            metrics={name: metric.value() for name, metric in merged.items()},
            sample=texts[0] if texts else None,
        )
