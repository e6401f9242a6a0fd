"""One worker of torchrun on the testbed: DistributedDataParallel, with a hook or without.

Where faults are to come, its first worker writes a checkpoint every few updates into a directory
that all nodes share, and a restarted group goes on from the newest one, as torchrun's documentation
asks of a script: "make sure to checkpoint; on restart all workers are restarted".
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import checkpoints
from benchmarks.peers.checkpoints import Progress
from benchmarks.peers.course import CHECKPOINT_EVERY, Course, add_course, parse
from benchmarks.peers.dense import DDP_SETTINGS, Dense, impatient_group, train

HOOKS = ("none", "fp16", "powersgd")
POWERSGD_RANK = 2
POWERSGD_START = 10  # steps of plain exchange first; the least that is allowed is 2
# The hook starts exchanges from callbacks, one after another per bucket. With two buckets Gloo sees
# them in another order on another worker, which ends the process; so all gradients are one bucket.
POWERSGD_BUCKET_MB = 64


def main() -> None:
    """Join the others and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_course(parser)
    parser.add_argument("--hook", choices=HOOKS, default="none")
    asked = parser.parse_args()
    course = parse(asked)
    dist.init_process_group("gloo")
    elastic = course.checkpoints is not None
    train(
        Dense(
            course=course,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            wrap=partial(wrap, hook=asked.hook, elastic=elastic),
            after=partial(keep, course),
            restore=partial(restore, course),
        )
    )


def wrap(model: nn.Module, *, hook: str, elastic: bool) -> nn.Module:
    """The data-parallel model with its hook."""
    group = impatient_group() if elastic else None
    settings = dict(DDP_SETTINGS)
    if hook == "powersgd":
        settings["bucket_cap_mb"] = POWERSGD_BUCKET_MB
    wrapped = DistributedDataParallel(model, process_group=group, **settings)
    if hook == "fp16":
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_START,
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def restore(course: Course, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Go on from the newest checkpoint that the first worker sees, if there is one."""
    if course.checkpoints is None:
        return Progress()
    found = checkpoints.newest(course.checkpoints) if dist.get_rank() == 0 else None
    chosen = torch.tensor([-1 if found is None else found])
    dist.broadcast(chosen, src=0)
    update = int(chosen)
    if update < 0:
        return Progress()
    path = checkpoints.path_of(course.checkpoints, update)
    return checkpoints.read(path, model, {"optimizer": optimizer})


def keep(
    course: Course, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Write a checkpoint if it is time and this is the first worker."""
    due = progress.update % CHECKPOINT_EVERY == 0
    if due and course.checkpoints is not None and dist.get_rank() == 0:
        checkpoints.keep(course.checkpoints, model, {"optimizer": optimizer}, progress)


if __name__ == "__main__":
    main()
