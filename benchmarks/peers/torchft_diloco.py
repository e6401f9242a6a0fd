"""One replica group of torchft, of one worker: DiLoCo.

As torchft's own `train_diloco.py`: twenty inner steps of AdamW, then the mean of what the groups
have moved becomes the gradient of an outer SGD with Nesterov momentum. An update is an outer step,
with all samples of its inner ones.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from benchmarks.peers.course import Course, parse, place
from benchmarks.peers.torchft_ddp import add_replica, join, keep, prepare, restore
from benchmarks.workload import CLIP_NORM, loss_of

INNER_STEPS = 20
OUTER_RATE = 0.7
OUTER_MOMENTUM = 0.9


def main() -> None:
    """Join the others and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_replica(parser)
    asked = parser.parse_args()
    train(parse(asked), replica=asked.replica, replicas=asked.replicas)


def train(course: Course, *, replica: int, replicas: int) -> NoReturn:
    """Train until this process is ended."""
    prepare()
    stream, journal = course.stream(), course.journal()
    model = course.model()
    inner = course.optimizer(model)
    outer = torch.optim.SGD(
        model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True
    )
    optimizers = {"inner": inner, "outer": outer}
    manager = join(model, optimizers, replica=replica, inner=True)
    restore(course, manager, model, optimizers)
    round_samples = INNER_STEPS * replicas * course.per_worker
    with DiLoCo(
        manager,
        [model],
        inner,
        outer,
        sync_every=INNER_STEPS,
        backup_device=torch.device("cpu"),
        pin_memory=False,  # there is no accelerator to copy to
        use_bucketization=True,
    ):
        while True:
            rounds = manager.current_step()
            for number in range(INNER_STEPS):
                first, _ = place(
                    samples=rounds * round_samples + number * replicas * course.per_worker,
                    world=replicas,
                    rank=replica,
                    per_worker=course.per_worker,
                )
                inner.zero_grad(set_to_none=True)
                loss_of(model, stream.batch(first, course.per_worker)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
                inner.step()  # the last one of a round exchanges, too
            update = manager.current_step()
            if update == rounds:
                continue  # somebody failed: the round is discarded
            samples = manager.num_participants() * INNER_STEPS * course.per_worker
            journal.note(update=update, samples=samples)
            journal.snapshot(model, update, every=1)
            keep(course, manager, model, optimizers, every=1)


if __name__ == "__main__":
    main()
