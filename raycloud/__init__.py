"""raycloud: train PyTorch models on whatever machines are there, on Ray.

    import raycloud

    run = raycloud.train(raycloud.Job(task="gpt.py:Gpt", steps=200))
    run.metrics

Names are loaded when they are first used, so that `import raycloud` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycloud.embedding import Embedding
    from raycloud.metrics import Accuracy, Auc, Mean, Metric
    from raycloud.on_ray.dry_run import plan
    from raycloud.on_ray.run import train
    from raycloud.on_ray.session import Run, RunHandle
    from raycloud.on_ray.sweep import Found, sweep, trainable
    from raycloud.rows import Rows
    from raycloud.spec import Job, load_job
    from raycloud.task import Source, Splits, Task

__version__ = "0.1.0"

__all__ = [
    "Accuracy",
    "Auc",
    "Embedding",
    "Found",
    "Job",
    "Mean",
    "Metric",
    "Rows",
    "Run",
    "RunHandle",
    "Source",
    "Splits",
    "Task",
    "load_job",
    "plan",
    "sweep",
    "train",
    "trainable",
]

_HOMES = {
    "raycloud.embedding": {"Embedding"},
    "raycloud.metrics": {"Accuracy", "Auc", "Mean", "Metric"},
    "raycloud.on_ray.dry_run": {"plan"},
    "raycloud.on_ray.run": {"train"},
    "raycloud.on_ray.session": {"Run", "RunHandle"},
    "raycloud.on_ray.sweep": {"Found", "sweep", "trainable"},
    "raycloud.rows": {"Rows"},
    "raycloud.spec": {"Job", "load_job"},
    "raycloud.task": {"Source", "Splits", "Task"},
}


def __getattr__(name: str) -> Any:
    """Load a public name where it is first used."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'raycloud' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*__all__, "__version__"])
