"""One peer of Hivemind: its Optimizer, synchronous with a global batch, everything local together.

Peers add up gradients until all of them together have `target_batch_size` samples, then average
them and step. How many samples a peer gives to an update depends on its speed, so the workers note
their own samples; they are to be summed.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import NoReturn

import hivemind
import torch
from torch import nn

from benchmarks.peers.course import Course, add_course, parse
from benchmarks.workload import CLIP_NORM, loss_of

# What its documentation gives for "small local runs", at the short end. With 1 s, some updates
# averaged two peers of four; it asks to raise it when that is frequent.
MATCHMAKING_S = 3.0
AVERAGING_LIMIT_S = 30.0
STATE_EVERY = 10  # updates between two averagings of the parameters
START_LIMIT_S = 300.0
_POLL_S = 0.1


def main() -> None:
    """Join the swarm and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_course(parser)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--replica", type=int, required=True, help="which place in the sequence")
    parser.add_argument("--replicas", type=int, required=True, help="how many there may be")
    parser.add_argument("--welcome", type=Path, required=True, help="the first peer's addresses")
    asked = parser.parse_args()
    course = parse(asked)
    torch.set_num_threads(1)
    dht = hivemind.DHT(
        initial_peers=first_peers(asked.welcome),
        host_maddrs=[f"/ip4/{os.environ['TESTBED_ADDRESS']}/tcp/0"],
        start=True,
        startup_timeout=START_LIMIT_S,
    )
    model = course.model()
    optimizer = wrap(course, model, dht, asked.global_batch)
    optimizer.load_state_from_peers()
    train(course, model, optimizer, place=asked.replica, places=asked.replicas)


def wrap(course: Course, model: nn.Module, dht: hivemind.DHT, batch: int) -> hivemind.Optimizer:
    """The collaborative optimizer; delays are off, so that updates are synchronous."""
    adam = course.optimizer(model)
    parameters = list(model.parameters())

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)

    adam.register_step_pre_hook(clip)
    return hivemind.Optimizer(
        dht=dht,
        run_id="race",
        batch_size_per_step=course.per_worker,
        target_batch_size=batch,
        optimizer=adam,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_LIMIT_S,
        average_state_every=STATE_EVERY,
        grad_compression=hivemind.compression.Float16Compression(),
        state_averaging_compression=hivemind.compression.Float16Compression(),
        verbose=True,
    )


def train(
    course: Course, model: nn.Module, optimizer: hivemind.Optimizer, *, place: int, places: int
) -> NoReturn:
    """Train until this process is ended; an update counts where this peer stepped with the others.

    Gradients of a peer that lags behind are thrown away with its state: they are not noted.
    """
    stream, journal = course.stream(), course.journal()
    stepped: list[bool] = []
    optimizer.state_averager.optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    taken, epoch, number = 0, optimizer.local_epoch, optimizer.local_epoch
    while True:
        first = (number * places + place) * course.per_worker
        number, taken = number + 1, taken + course.per_worker
        optimizer.zero_grad()
        loss_of(model, stream.batch(first, course.per_worker)).backward()
        optimizer.step()
        if optimizer.local_epoch == epoch:
            continue
        epoch = optimizer.local_epoch
        if stepped:
            journal.note(update=epoch, samples=taken)
            journal.snapshot(model, epoch)
        taken = 0
        stepped.clear()


def first_peers(path: Path) -> list[str]:
    """The addresses that the first peer wrote, once it has.

    Raises:
        TimeoutError: It did not within `START_LIMIT_S`.
    """
    until_s = time.monotonic() + START_LIMIT_S
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{path}: no first peer within {START_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)
    return path.read_text().split()


if __name__ == "__main__":
    main()
