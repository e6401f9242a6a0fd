"""The loop of the peers that train densely and in step: plain DistributedDataParallel.

Gradients as views of the buckets and a static graph, as its documentation advises for speed; one
compute thread; batches made from memory; nothing is exchanged but gradients. Every worker takes
`per_worker` samples, so that a smaller world makes smaller steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch import nn

from benchmarks.peers.checkpoints import Progress
from benchmarks.peers.course import EXCHANGE_LIMIT_S, Course, place
from benchmarks.workload import CLIP_NORM, loss_of

# As large as raycloud's own messages for this model: with DDP's default of 25 MB all but the first
# megabyte of the gradient waits for the end of the backward pass.
BUCKET_MB = 1
# `static_graph`: the same parameters take part in every step.
DDP_SETTINGS: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "bucket_cap_mb": BUCKET_MB,
}


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One worker's way through a course.

    Attributes:
        course: What it trains.
        rank: Which worker it is.
        world: How many there are.
        wrap: Makes the model data-parallel.
        after: Called after each update with the plain model, its optimizer and the progress.
        restore: Called with them before the first; returns the progress that was restored.
    """

    course: Course
    rank: int
    world: int
    wrap: Callable[[nn.Module], nn.Module]
    after: Callable[[nn.Module, torch.optim.Optimizer, Progress], None] = lambda *_: None
    restore: Callable[[nn.Module, torch.optim.Optimizer], Progress] = lambda *_: Progress()


def train(dense: Dense) -> NoReturn:
    """Train until this process is ended."""
    torch.set_num_threads(1)
    course = dense.course
    stream, journal = course.stream(), course.journal()
    plain = course.model()
    optimizer = course.optimizer(plain)
    progress = dense.restore(plain, optimizer)
    model = dense.wrap(plain)
    parameters = list(plain.parameters())
    while True:
        first, samples = place(
            samples=progress.samples,
            world=dense.world,
            rank=dense.rank,
            per_worker=course.per_worker,
        )
        loss = loss_of(model, stream.batch(first, course.per_worker))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        taken = samples - progress.samples
        progress = Progress(update=progress.update + 1, samples=samples)
        journal.note(update=progress.update, samples=taken)
        journal.snapshot(plain, progress.update)
        dense.after(plain, optimizer, progress)


def impatient_group() -> dist.ProcessGroup:
    """A group of all workers that gives up on an exchange after `EXCHANGE_LIMIT_S`.

    The default group keeps its own, long limit: workers that start on a slow node come late.
    """
    group = dist.new_group(timeout=timedelta(seconds=EXCHANGE_LIMIT_S))
    if group is None:
        raise RuntimeError("this worker is not in the group of all workers")
    return group
