"""Measures the held-out samples: each member its part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycloud.errors import RaycloudError, TaskError
from raycloud.metrics import Metric, merge_all
from raycloud.order import stream_seed
from raycloud.training.contract import raised
from raycloud.training.device import move
from raycloud.training.mutation import preserved
from raycloud.training.randomness import seed_compute

if TYPE_CHECKING:
    from raycloud.spec import Job
    from raycloud.task import Samples, Task


_EVALUATION_STREAM = 5


def evaluate(  # the measured model and who measures which part of what
    job: Job,
    task: Task,
    model: torch.nn.Module,
    samples: Samples,
    *,
    rank: int,
    size: int,
) -> dict[str, Metric]:
    """Metrics of every `size`-th held-out batch, from batch `rank` on.

    Batches are cut by `job.evaluate.batch` alone, so that merged metrics do not depend on the
    number of members, and random numbers are seeded by batch. The model's state is as it was
    afterwards.

    Raises:
        TaskError: The task's code raised.
    """
    device = next(model.parameters()).device
    count = len(samples)
    if job.evaluate.max_samples is not None:
        count = min(count, job.evaluate.max_samples)
    cut = job.evaluate.batch
    read = _reader(samples)
    parts = []
    model.eval()
    try:
        with preserved(model, "measuring the held-out samples"):
            for start in range(rank * cut, count, size * cut):
                stop = min(start + cut, count)
                seed_compute(stream_seed(job.seed, _EVALUATION_STREAM, start), device)
                batch = task.batch(read(start, stop), None)
                with torch.no_grad(), _cast(job, device):
                    metrics = task.metrics(model, move(batch, device), stop - start)
                parts.append(_checked(metrics))
    except RaycloudError:
        raise
    except BaseException as error:
        raise TaskError(raised("measuring the held-out samples", error).message) from error
    finally:
        model.train()
    return merge_all(parts)


def _reader(samples: Samples) -> Callable[[int, int], Any]:
    """How to read samples [start, stop): as rows at once, or one by one."""
    gather = getattr(samples, "gather", None)
    if gather is not None:
        return lambda start, stop: gather(np.arange(start, stop))
    return lambda start, stop: [samples[i] for i in range(start, stop)]


def _checked(metrics: Mapping[str, object]) -> dict[str, Metric]:
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise TaskError(
                f"Task.metrics gave {name!r} as {type(metric).__name__}",
                hint="give a raycloud.Metric, such as Mean(total=..., weight=...)",
            )
    return {name: metric for name, metric in metrics.items() if isinstance(metric, Metric)}


def show(job: Job, task: Task, model: torch.nn.Module) -> str | None:
    """What `Task.sample` shows, or the error it raised: that does not spoil a finished run."""
    model.eval()
    try:
        device = next(model.parameters()).device
        with preserved(model, "Task.sample"), torch.no_grad(), _cast(job, device):
            return task.sample(model)
    except BaseException as error:  # noqa: BLE001 - the user's code, after the work is done
        return raised("Task.sample", error).message
    finally:
        model.train()


def _cast(job: Job, device: torch.device) -> Any:
    if job.precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
