"""To whom a run's numbers are told beside TensorBoard: MLflow, Weights & Biases."""

from __future__ import annotations

from raycloud.report.tracking.trackers import Trackers, require

__all__ = ["Trackers", "require"]
