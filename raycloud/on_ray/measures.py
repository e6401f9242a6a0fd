"""Puts the members' measures of the held-out samples together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycloud.errors import TaskError
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
        texts = [p.sample for p in parts.values() if p.sample is not None]
        return Evaluated(
            step=part.step,
            metrics=_values([parts[member].states for member in members]),
            sample=texts[0] if texts else None,
        )


def _values(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    try:
        merged = merge_all(
            {name: Metric.from_state(state) for name, state in states.items()} for states in parts
        )
        return {name: float(metric.value()) for name, metric in merged.items()}
    except Exception as error:
        raise TaskError(
            f"merging the metrics raised {type(error).__name__}: {error}",
            hint="check merge, value, to_values and from_values of the task's own metrics",
        ) from error
