"""Order: the same sequence of sample ids, whoever reads it, through the feeds of all workers."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.feeding.floors import Verdict
from benchmarks.feeding.setting import Outcome, Setting
from benchmarks.feeding.tasks import Numbered
from raycloud.clock import SystemClock
from raycloud.data.cache import BlockCache
from raycloud.order import Order, Position, Steps
from raycloud.spec import Job
from raycloud.step.collate import Collate
from raycloud.step.contract import construct
from raycloud.step.feed import Feed, Piece, Schedule
from raycloud.worker.dataset import block_layout
from tests.one_process import prepare_here

if TYPE_CHECKING:
    from raycloud.data.samples import BlockSamples
    from raycloud.order import StepSpan

ROWS = 50_000
EPOCHS = 2
WORKERS = (1, 2, 3, 5)
PIECES = ((0, 2), (60, 5), (90, 1), (200, 3))  # (first step, workers): resizes within epochs
STOP = 137  # the step, within an epoch, at which a run is stopped and resumed


def measure(setting: Setting) -> Outcome:
    """Read two epochs in several ways: digests of the sequences of ids."""
    rows = ROWS // 10 if setting.quick else ROWS
    job = job_of(rows)
    with tempfile.TemporaryDirectory(prefix="order") as place:
        samples = _samples(job, Numbered(rows=rows), Path(place))
        steps = Steps(samples=rows, global_batch=job.global_batch, micro_batch=job.micro_batch)
        last = EPOCHS * steps.per_epoch()
        found = {
            f"{count} workers": digest_of(_read(job, samples, steps, [(0, count)], 0, last))
            for count in WORKERS
        }
        pieces = [(first * last // 840, count) for first, count in PIECES]
        found["across resizes"] = digest_of(_read(job, samples, steps, pieces, 0, last))
        stop = STOP * last // 840
        found["across a resume"] = digest_of(
            _read(job, samples, steps, [(0, 2)], 0, stop)
            + _read(job, samples, steps, [(0, 3)], stop, last)
        )
        ids = _read(job, samples, steps, [(0, 1)], 0, last)
    whole = all(
        np.array_equal(np.sort(np.concatenate(ids)[e * rows : (e + 1) * rows]), np.arange(rows))
        for e in range(EPOCHS)
    )
    digests = set(found.values())
    return Outcome(
        record={"rows": rows, "epochs": EPOCHS, "sha256": found, "each_row_once": whole},
        text="\n".join(f"{name:<18}{digest[:16]}" for name, digest in found.items()),
        verdicts=[
            Verdict(
                name="order: different sequences of ids",
                value=float(len(digests)) if whole else float("nan"),
                at_most=1.0,
                note=f"of {', '.join(found)}",
            )
        ],
    )


def job_of(rows: int) -> Job:
    """A job of so many rows, in many small partitions."""
    return Job(
        task="benchmarks.feeding.tasks:Numbered",
        settings={"rows": rows},
        epochs=EPOCHS,
        global_batch=120,
        micro_batch=8,
        data={"partition_bytes": 8192, "window": 4},
    )


def _samples(job: Job, task: Any, place: Path) -> BlockSamples:
    splits = task.data(job.data.path)
    return prepare_here(job, task, splits, BlockCache(place), SystemClock()).train


def _read(
    job: Job,
    samples: BlockSamples,
    steps: Steps,
    pieces: Sequence[tuple[int, int]],
    first: int,
    last: int,
) -> list[np.ndarray[Any, Any]]:
    """The ids of steps [first, last), as the feeds of all workers deliver them, in order.

    `pieces` are numbers of workers and the steps from which they hold. Every worker that ever is
    has a feed of its own, which begins where its piece does.
    """
    order = Order(samples=len(samples), seed=job.seed, layout=block_layout(job, samples.index))
    found: list[np.ndarray[Any, Any]] = []
    edges = [(max(first, begin), count) for begin, count in pieces] + [(last, 0)]
    for (begin, count), (end, _) in pairwise(edges):
        spans = _spans(steps, begin, end)
        schedule = Schedule(Piece(step=begin, generation=0, shares=shares_of(job, count)))
        feeds = [
            Feed(
                Collate(construct(Numbered, job), samples, order, pinned=False),
                lambda span, rank=rank, schedule=schedule: schedule.micro_batches(span, rank),
                spans,
                fuse=lambda: 1,
                depth=2,
                clock=SystemClock(),
            )
            for rank in range(count)
        ]
        for _ in range(end - begin):
            passes = [one for feed in feeds for one in feed.take().passes]
            passes.sort(key=lambda one: one.micro_batches[0].index)
            found += [one.batch.numpy() for one in passes]
        for feed in feeds:
            feed.close()
    return found


def shares_of(job: Job, count: int) -> tuple[int, ...]:
    """Uneven shares of a step's micro-batches, which add up."""
    each, rest = divmod(job.micro_batches, count)
    shares = [each] * count
    shares[0] += rest
    if count > 1 and each > 1:
        shares[0], shares[-1] = shares[0] + 1, shares[-1] - 1
    return tuple(shares)


def _spans(steps: Steps, begin: int, end: int) -> list[StepSpan]:
    at = steps.position_after(begin, Position())
    return [span for _, span in zip(range(end - begin), steps.walk(begin, at), strict=False)]


def digest_of(ids: Sequence[np.ndarray[Any, Any]]) -> str:
    """The digest of a sequence of ids."""
    return hashlib.sha256(np.concatenate(ids).astype("<i8").tobytes()).hexdigest()
