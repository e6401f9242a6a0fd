"""The training loop of the peers: plain DistributedDataParallel, as fast as it honestly goes.

In-memory batches, gradients as views of the buckets, a static graph; the workers' mean loss is
exchanged only for every tenth step, where it is logged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from benchmarks.marks import Marker
from benchmarks.workload import (
    CLIP_NORM,
    WORKERS,
    Batches,
    build_model,
    build_optimizer,
    load_text,
    loss_of,
)

LOG_EVERY = 10
# `static_graph`: the same parameters take part in every step.
DDP_SETTINGS: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
}


def train(wrap: Callable[[nn.Module], nn.Module], *, rank: int, steps: int, marks: Path) -> float:
    """Train for `steps` steps as worker `rank`; returns the mean loss that was logged last.

    Args:
        wrap: Makes the model data-parallel.
        rank: Which worker this is.
        steps: Number of steps.
        marks: Where the worker's marks go.
    """
    torch.set_num_threads(1)
    batches = Batches(load_text(), rank=rank, steps=steps)
    model = wrap(build_model())
    parameters = list(model.parameters())
    optimizer = build_optimizer(model)
    marker = Marker(marks, steps)
    marker.attach(optimizer)
    logged = torch.tensor(float("nan"))
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, batches[step])
        marker.saw(loss)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        if (step + 1) % LOG_EVERY == 0 or step + 1 == steps:
            logged = loss.detach() / WORKERS
            dist.all_reduce(logged)
            if rank == 0:
                print(f"step {step + 1}: loss {float(logged):.4f}", flush=True)
    return float(logged)
