"""Merges what members measured of the held-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycloud.errors import TaskError
from raycloud.events import Evaluated, EvaluationPart, WorkerKey
from raycloud.metrics import Metric, merge_all


class Evaluations:
    """Parts of measurements that are not complete."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[WorkerKey, EvaluationPart]] = {}
        self._done = -1

    def add(
        self, part: EvaluationPart, keys: Sequence[WorkerKey], generation: int = 0
    ) -> Evaluated | None:
        """Take in a part; the whole once there is one of each of these workers.

        Parts are merged in the order of `keys`, so that the result does not depend on who was
        first. Members that were lost divided the samples otherwise: what was measured with them is
        measured again, unless it was complete.

        Args:
            part: The part.
            keys: Of those that measure: replica and position.
            generation: As which they met.
        """
        if part.generation < generation or part.step <= self._done:
            return None
        before = self._parts.get(part.step, {}).values()
        parts = {(p.replica, p.position): p for p in (*before, part) if p.generation >= generation}
        self._parts[part.step] = parts
        if set(parts) != set(keys):
            return None
        self._done = part.step
        self._parts = {step: some for step, some in self._parts.items() if step > part.step}
        texts = [p.sample for p in parts.values() if p.sample is not None]
        return Evaluated(
            step=part.step,
            metrics=_values([parts[key].states for key in keys]),
            sample=texts[0] if texts else None,
        )


def _values(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    try:
        merged = merge_all(
            {name: Metric.from_state(state) for name, state in states.items()} for states in parts
        )
        return {name: float(metric.value()) for name, metric in merged.items()}
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"merging the metrics raised {type(error).__name__}: {error}",
            hint="check merge, value, to_values and from_values of the task's own metrics",
        ) from error
