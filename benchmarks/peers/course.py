"""What one worker of a peer on the testbed is to train, and the command line that says so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.journal import Journal
from benchmarks.workload import Stream, build_model, build_optimizer, load_text

if TYPE_CHECKING:
    import argparse

    import torch
    from torch import nn

CHECKPOINT_EVERY = 10  # updates
# How long a worker waits for the others within one exchange before it takes them for dead, in every
# peer that has such a setting: six times the slowest exchange of the scenarios, and longer than the
# longest freeze, which all of them then sit out.
EXCHANGE_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a worker trains and where it writes.

    Attributes:
        journals: Directory of the journals.
        snapshots: Directory of the parameters.
        checkpoints: Directory to restart from; None: neither written nor read.
        per_worker: Samples of a step of one worker.
        learning_rate: Of AdamW.
        small: Whether the model is the tiny one.
    """

    journals: Path
    snapshots: Path
    checkpoints: Path | None
    per_worker: int
    learning_rate: float
    small: bool

    def arguments(self) -> list[str]:
        """The command line from which `parse` makes this."""
        return [
            *("--journals", str(self.journals), "--snapshots", str(self.snapshots)),
            *("--per-worker", str(self.per_worker), "--learning-rate", repr(self.learning_rate)),
            *(() if self.checkpoints is None else ("--checkpoints", str(self.checkpoints))),
            *(("--small",) if self.small else ()),
        ]

    def model(self) -> nn.Module:
        """The model with its initial weights."""
        return build_model(small=self.small)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Its optimizer."""
        return build_optimizer(model, learning_rate=self.learning_rate)

    def stream(self) -> Stream:
        """The samples; reads the text."""
        return Stream(load_text())

    def journal(self) -> Journal:
        """The journal of this process."""
        return Journal(self.journals, snapshots=self.snapshots)


def add_course(parser: argparse.ArgumentParser) -> None:
    """Add the options that `parse` reads."""
    parser.add_argument("--journals", type=Path, required=True)
    parser.add_argument("--snapshots", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--per-worker", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--small", action="store_true")


def parse(asked: argparse.Namespace) -> Course:
    """The course that a command line asks for."""
    return Course(
        journals=asked.journals,
        snapshots=asked.snapshots,
        checkpoints=asked.checkpoints,
        per_worker=asked.per_worker,
        learning_rate=asked.learning_rate,
        small=asked.small,
    )


def place(*, samples: int, world: int, rank: int, per_worker: int) -> tuple[int, int]:
    """Which samples a worker takes in the step after `samples`, and how many there are then.

    Workers take `per_worker` each, in the order of their ranks, whatever the size of the world:

    >>> [place(samples=64, world=4, rank=r, per_worker=16) for r in range(4)]
    [(64, 128), (80, 128), (96, 128), (112, 128)]
    >>> [place(samples=128, world=3, rank=r, per_worker=16) for r in range(3)]
    [(128, 176), (144, 176), (160, 176)]
    """
    return samples + rank * per_worker, samples + world * per_worker
