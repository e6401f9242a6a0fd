"""What a worker notes about itself after each step, the same way in every contestant.

A mark is taken right after the optimizer's step: wall seconds, this process's CPU seconds (user
and system, all threads), those of the thread that takes the mark, which is the one that computes,
and the loss of the worker's own samples. Wall seconds are those of the
machine's monotonic clock, which all of its processes share on Linux.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

FORMAT = 2
LAST_LOSSES = 10  # steps that `final_loss` is the mean of


@dataclass(frozen=True, kw_only=True)
class WorkerMarks:
    """One worker's marks, one per step."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    computing_s: tuple[float, ...]
    loss: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What all workers' marks come to.

    Attributes:
        samples_per_s: Global samples per wall second in the window, by the last worker's marks.
        typical_samples_per_s: The same from the median step: what a quiet machine would show.
        cpu_s_per_sample: CPU seconds of all workers in the window per global sample.
        cpu_over_computing: The same over those of the threads that compute alone: what all others
            cost, whatever the machine's speed is at the moment.
        first_step_s: From `began_s` until the last worker has done its first step.
        final_loss: Mean over workers and the last ten steps.
        steps: Steps in the window.
        samples: Global samples in the window.
        wall_s: Wall seconds of the window.
    """

    samples_per_s: float
    typical_samples_per_s: float
    cpu_s_per_sample: float
    cpu_over_computing: float
    first_step_s: float
    final_loss: float
    steps: int
    samples: int
    wall_s: float


class Marker:
    """Takes the marks of this process and writes them when the last step is done.

    Args:
        directory: Where the file goes, named after the process.
        steps: Number of steps.
    """

    def __init__(self, directory: Path, steps: int) -> None:
        self._path = directory / f"worker-{os.getpid()}.json"
        self._steps = steps
        self._wall_s: list[float] = []
        self._cpu_s: list[float] = []
        self._computing_s: list[float] = []
        self._loss: list[float] = []
        self._last: Tensor | None = None

    def attach(self, optimizer: Optimizer) -> None:
        """Mark each step of `optimizer` from now on."""
        optimizer.register_step_post_hook(lambda *_: self._mark())

    def saw(self, loss: Tensor) -> None:
        """Remember the loss of the step under way."""
        self._last = loss.detach()

    def _mark(self) -> None:
        self._wall_s.append(time.monotonic())
        self._cpu_s.append(time.process_time())
        self._computing_s.append(time.thread_time())
        self._loss.append(float("nan") if self._last is None else float(self._last))
        if len(self._wall_s) == self._steps:
            self._write()

    def _write(self) -> None:
        record = {
            "format": FORMAT,
            "wall_s": self._wall_s,
            "cpu_s": self._cpu_s,
            "computing_s": self._computing_s,
            "loss": self._loss,
        }
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(record))
        draft.rename(self._path)


def read_marks(directory: Path) -> tuple[WorkerMarks, ...]:
    """The marks of all workers that finished."""
    found = []
    for path in sorted(directory.glob("worker-*.json")):
        record = json.loads(path.read_text())
        found.append(
            WorkerMarks(
                wall_s=tuple(record["wall_s"]),
                cpu_s=tuple(record["cpu_s"]),
                computing_s=tuple(record["computing_s"]),
                loss=tuple(record["loss"]),
            )
        )
    return tuple(found)


def measure(
    workers: Sequence[WorkerMarks], *, began_s: float, warm_up: int, global_batch: int
) -> Measured:
    """What the marks come to, over the steps after the first `warm_up`.

    Args:
        workers: All workers' marks.
        began_s: Monotonic second at which the command was started.
        warm_up: Steps left out, at least 1: the window begins with a mark.
        global_batch: Samples per step of all workers together.

    Raises:
        ValueError: Workers disagree on the number of steps, or none is left after the warm-up.
    """
    counts = {len(worker.wall_s) for worker in workers}
    if len(counts) != 1 or warm_up < 1 or min(counts) <= warm_up:
        raise ValueError(f"marks of {sorted(counts)} steps, of which {warm_up} are warm-up")
    ends_s = [max(walls) for walls in zip(*(worker.wall_s for worker in workers), strict=True)]
    window = ends_s[warm_up - 1 :]
    took_s = sorted(after - before for before, after in itertools.pairwise(window))
    steps = len(took_s)
    samples = steps * global_batch
    wall_s = window[-1] - window[0]
    cpu_s = sum(worker.cpu_s[-1] - worker.cpu_s[warm_up - 1] for worker in workers)
    computing_s = sum(w.computing_s[-1] - w.computing_s[warm_up - 1] for w in workers)
    typical_s = (took_s[(steps - 1) // 2] + took_s[steps // 2]) / 2
    last = [loss for worker in workers for loss in worker.loss[-LAST_LOSSES:]]
    return Measured(
        samples_per_s=samples / wall_s,
        typical_samples_per_s=global_batch / typical_s,
        cpu_s_per_sample=cpu_s / samples,
        cpu_over_computing=cpu_s / computing_s,
        first_step_s=ends_s[0] - began_s,
        final_loss=sum(last) / len(last),
        steps=steps,
        samples=samples,
        wall_s=wall_s,
    )
