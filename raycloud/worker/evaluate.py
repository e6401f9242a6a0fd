"""Measures the held-out samples: each member its share."""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycloud.errors import RaycloudError, TaskError
from raycloud.metrics import Mean, Metric, merge_all
from raycloud.order import stream_seed
from raycloud.step.collate import reader
from raycloud.step.contract import raised
from raycloud.step.device import move
from raycloud.step.mutation import preserved
from raycloud.step.randomness import Randomness

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
    shares: Sequence[float],
) -> dict[str, Metric]:
    """Metrics of the held-out batches that fall to member `rank` of those with these shares.

    Batches are cut by `job.evaluate.batch` alone, so that merged metrics do not depend on the
    members, and random numbers are seeded by batch. The model's state is as it was afterwards.
    `TaskError`: the task's code raised.
    """
    count = len(samples)
    if job.evaluate.max_samples is not None:
        count = min(count, job.evaluate.max_samples)
    cut = job.evaluate.batch
    starts = range(0, count, cut)
    mine = [
        start for start, to in zip(starts, dealt(len(starts), shares), strict=True) if to == rank
    ]
    spans = [(start, min(start + cut, count)) for start in mine]
    return merge_all(_measured(job, task, model, samples, spans))


def dealt(batches: int, shares: Sequence[float]) -> list[int]:
    """The rank that measures each batch: batches are dealt in proportion to shares of a step.

    >>> dealt(5, [1, 1]), dealt(4, [18, 8, 3, 3]), dealt(2, [0, 0])
    ([0, 1, 0, 1, 0], [0, 0, 1, 0], [0, 1])
    """
    if not any(shares):
        shares = [1] * len(shares)
    done_at = [(1 / share, rank) for rank, share in enumerate(shares) if share]
    heapq.heapify(done_at)
    found = []
    for _ in range(batches):
        at, rank = done_at[0]
        found.append(rank)
        heapq.heapreplace(done_at, (at + 1 / shares[rank], rank))
    return found


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Metric]:
    """Metrics of all members, of whose states this is."""
    parts = [{n: Metric.from_state(state) for n, state in one.items()} for one in states]
    return merge_all(parts)


def measured_value(metrics: Mapping[str, Metric]) -> float:
    """What a schedule goes by that is stepped after each measuring: `loss`, or the only one."""
    name = next(iter(metrics)) if len(metrics) == 1 else "loss"
    if name not in metrics:
        listed = ", ".join(metrics) or "none"
        raise TaskError(
            f"Task.scheduler goes by what is measured, and Task.metrics gave {listed}",
            hint='let it give what the schedule is to go by under the name "loss", or alone',
        )
    return float(metrics[name].value())


def try_metrics(
    job: Job, task: Task, model: torch.nn.Module, samples: Samples
) -> dict[str, Metric]:
    """Measure as many held-out samples as a micro-batch has, and merge, without any effect.

    Raises:
        TaskError: The task's code raised, or gave what cannot be merged.
    """
    count = min(len(samples), job.micro_batch, job.evaluate.batch)
    if job.evaluate.max_samples is not None:
        count = min(count, job.evaluate.max_samples)
    if count == 0:
        return {}
    [part] = _measured(job, task, model, samples, [(0, count)])
    states = json.loads(json.dumps(states_of(part)))
    try:
        found = merge_states([states, states])
        for metric in found.values():
            float(metric.value())
    except BaseException as error:
        raise TaskError(
            raised("merging what Task.metrics gave", error).message,
            hint="check merge, value, to_values and from_values of the task's own metrics",
        ) from error
    return found


def states_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """What is told of metrics, by name; `TaskError` names one whose state is no plain value."""
    states: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            states[name] = metric.state()
            json.dumps(states[name])
        except BaseException as error:
            raise TaskError(
                raised(f"to_values of {name!r} ({type(metric).__name__})", error).message,
                hint="it is to give plain numbers, strings, lists and dictionaries",
            ) from error
    return states


def _measured(
    job: Job,
    task: Task,
    model: torch.nn.Module,
    samples: Samples,
    spans: Iterable[tuple[int, int]],
) -> list[dict[str, Metric]]:
    """Metrics of the held-out samples [start, stop) of each of `spans`."""
    device = next(model.parameters()).device
    read = reader(samples)
    parts, randomness = [], Randomness(device)
    model.eval()
    try:
        with preserved(model, "measuring the held-out samples"):
            for start, stop in spans:
                seed = stream_seed(job.seed, _EVALUATION_STREAM, start)
                randomness.seed(seed, everything=True)
                batch = task.batch(read(np.arange(start, stop)), None)
                with torch.no_grad(), _cast(job, device):
                    metrics = task.metrics(model, move(batch, device), stop - start)
                parts.append(_checked(metrics, stop - start))
    except RaycloudError:
        raise
    except BaseException as error:
        raise TaskError(raised("measuring the held-out samples", error).message) from error
    finally:
        randomness.release()
        model.train()
    return parts


def _checked(metrics: object, samples: int) -> dict[str, Metric]:
    """What the task gave, with numbers as means over the batch's samples."""
    remedy = "a number, a tensor without dimensions, or a raycloud.Metric such as Mean"
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"Task.metrics returned {type(metrics).__name__}",
            hint=f"return a mapping from names to metrics: each {remedy}",
        )
    found: dict[str, Metric] = {}
    for name, given in metrics.items():
        if not isinstance(name, str):
            raise TaskError(
                f"Task.metrics gave the name {name!r}, a {type(name).__name__}",
                hint="name each metric by a string",
            )
        if isinstance(given, Metric):
            found[name] = given
        elif (number := _number(given)) is not None:
            found[name] = Mean(total=number * samples, weight=samples)
        else:
            shape = f" of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else ""
            raise TaskError(
                f"Task.metrics gave {name!r} as {type(given).__name__}{shape}",
                hint=f"give {remedy}",
            )
    return found


def _number(given: object) -> float | None:
    """What a number of any kind comes to; None: it is none."""
    if isinstance(given, torch.Tensor):
        real = given.dim() == 0 and not given.is_complex()
        return float(given) if real else None
    if isinstance(given, int | float | np.integer | np.floating | np.bool_):
        return float(given)
    return None


def show_sample(job: Job, task: Task, model: torch.nn.Module) -> str | None:
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
