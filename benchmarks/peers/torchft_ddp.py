"""One replica group of torchft, of one worker: fault-tolerant DistributedDataParallel.

As torchft's own `train_ddp.py`: quorum while the forward pass runs, gradients averaged over whoever
is in it, a step that all of them commit or none. Batches are those of a fixed place, as its
`DistributedSampler` gives them: those of a group that is away are left out. Whoever comes back
takes the state of the others; the checkpoints matter where nobody is left.
"""

# DDP compares the annotations of a hook with types: they must not be strings here.
import argparse
import logging
import os
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.peers import checkpoints
from benchmarks.peers.checkpoints import Optimizers, Progress
from benchmarks.peers.course import (
    CHECKPOINT_EVERY,
    EXCHANGE_LIMIT_S,
    Course,
    add_course,
    parse,
    place,
)
from benchmarks.workload import CLIP_NORM, loss_of

QUORUM_LIMIT_S = 600.0  # the others may be computing DiLoCo's inner steps, or starting


class Model(DistributedDataParallel):
    """torchft's, mended: an exchange that fails discards the step, as is documented.

    In torchft 0.2.0 on Gloo the hook of the original asserts on a future that a failed exchange has
    not got, and every survivor dies with the one that was killed.
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()  # in place; tells the manager of an error
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    """Join the others and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_replica(parser)
    asked = parser.parse_args()
    train(parse(asked), replica=asked.replica, replicas=asked.replicas)


def add_replica(parser: argparse.ArgumentParser) -> None:
    """Add the options of both of torchft's scripts."""
    add_course(parser)
    parser.add_argument("--replica", type=int, required=True, help="which group this is")
    parser.add_argument("--replicas", type=int, required=True, help="how many there may be")


def train(course: Course, *, replica: int, replicas: int) -> NoReturn:
    """Train until this process is ended."""
    prepare()
    stream, journal = course.stream(), course.journal()
    plain = course.model()
    parameters = list(plain.parameters())
    adam = course.optimizer(plain)
    manager = join(plain, {"optimizer": adam}, replica=replica, inner=False)
    restore(course, manager, plain, {"optimizer": adam})
    model = Model(manager, plain, gradient_as_bucket_view=True)
    optimizer = Optimizer(manager, adam)
    while True:
        optimizer.zero_grad()  # asks for the quorum
        step = manager.current_step()
        first, _ = place(
            samples=step * replicas * course.per_worker,
            world=replicas,
            rank=replica,
            per_worker=course.per_worker,
        )
        loss_of(model, stream.batch(first, course.per_worker)).backward()
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        update = manager.current_step()
        if update == step:
            continue  # somebody failed: nobody has stepped
        samples = manager.num_participants() * course.per_worker
        journal.note(update=update, samples=samples)
        journal.snapshot(plain, update)
        keep(course, manager, plain, {"optimizer": adam})


def prepare() -> None:
    """Settings of this process."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)


def join(model: nn.Module, optimizers: Optimizers, *, replica: int, inner: bool) -> Manager:
    """The manager of this group; the state that it gives to whoever comes back.

    Args:
        model: Whose parameters it gives.
        optimizers: Whose state it gives.
        replica: Which group this is.
        inner: Whether there are steps that only this group takes, which needs a synchronous quorum.
    """

    def state_dict() -> dict[str, Any]:
        states = {name: one.state_dict() for name, one in optimizers.items()}
        return {"model": model.state_dict(), **states}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(state[name])

    limit = timedelta(seconds=EXCHANGE_LIMIT_S)
    group = ProcessGroupGloo(timeout=limit)
    return Manager(
        pg=group,
        min_replica_size=1,
        checkpoint_transport=PGTransport(group, timeout=limit, device=torch.device("cpu")),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"race_{replica}",
        timeout=limit,
        world_size=1,  # of the group; Ray Train says the whole world's
        rank=0,
        quorum_timeout=timedelta(seconds=QUORUM_LIMIT_S),
        use_async_quorum=not inner,
        hostname=os.environ["TESTBED_ADDRESS"],
        init_sync=False,  # everyone has the same initial weights
    )


def restore(course: Course, manager: Manager, model: nn.Module, optimizers: Optimizers) -> None:
    """Go on from the newest checkpoint, if there is one; the others may yet be ahead of it."""
    if course.checkpoints is None:
        return
    update = checkpoints.newest(course.checkpoints)
    if update is None:
        return
    path = checkpoints.path_of(course.checkpoints, update)
    progress = checkpoints.read(path, model, optimizers)
    committed = progress.samples // course.per_worker
    manager.load_state_dict({"step": progress.update, "batches_committed": committed})


def keep(
    course: Course,
    manager: Manager,
    model: nn.Module,
    optimizers: Optimizers,
    *,
    every: int = CHECKPOINT_EVERY,
) -> None:
    """Write a checkpoint if it is time and this group is the first of the quorum."""
    update = manager.current_step()
    if course.checkpoints is None or update % every or manager.participating_rank() != 0:
        return
    samples = manager.batches_committed() * course.per_worker
    progress = Progress(update=update, samples=samples)
    checkpoints.keep(course.checkpoints, model, optimizers, progress)


if __name__ == "__main__":
    main()
