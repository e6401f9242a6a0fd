"""A member that is alone: started, fed with blocks, told of growth, and what it leaves."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from raycloud.checkpoint import Manifest, load, open_store, publish
from raycloud.checkpoint.payload import load_tensors
from raycloud.commands import Extend, Publish
from raycloud.control.data import Progress
from raycloud.data.index import Input
from raycloud.events import Event, MemberDone, MemberFailed, MemberReady, PartWritten
from raycloud.net.stream import Place
from raycloud.on_ray.checkpoints import manifest_of
from raycloud.order import Ledger, Order, Position, Steps
from raycloud.recovery.rendezvous import Meeting
from raycloud.spec import Job
from raycloud.worker.context import MemberConfig
from raycloud.worker.dataset import block_layout
from raycloud.worker.member import Member
from tests.blocks import SEEN, Here, write_points

ROWS, MORE = 83, 30  # 83: five steps of 16, and a short one
POLL_S = 30.0

NOWHERE = Place("", 0, 0)  # who is alone asks nobody


def two_files(folder: Path) -> Path:
    """Points in two files of a new folder."""
    points = folder / "points"
    points.mkdir()
    write_points(points / "a.parquet", 0, 50)
    write_points(points / "b.parquet", 50, ROWS - 50)
    return points


class Run:
    """A member that is alone, and what it leaves."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        *,
        provider: Any = None,
        known: Mapping[str, Sequence[Input]] | None = None,
        resume: int | None = None,
    ) -> None:
        self.job, self.tag = job, str(job.settings.get("tag", ""))
        self.checkpoints = str(folder / "checkpoints")
        self.provider = provider or Here(job, folder / "cache", known)
        self.events: list[Event] = []
        config = MemberConfig(
            member=0,
            node="",
            address="127.0.0.1",
            job=job,
            task=job.task,  # type: ignore[arg-type]
            checkpoints=self.checkpoints,
            resume_step=resume,
        )
        self.member = Member(config, provider=self.provider)
        self.until(MemberReady)
        SEEN[self.tag] = []

    def until(self, kind: type[Event]) -> None:
        """Wait for such an event, or for a failure."""
        while not any(isinstance(event, (kind, MemberFailed)) for event in self.events):
            found = self.member.poll(POLL_S)
            assert found, f"nothing happened for {POLL_S} s"
            self.events += found

    def grow(self, change: Extend) -> None:
        """Send a change ahead; returns when it is at hand."""
        self.member.prepare(1, change)
        for thread in threading.enumerate():
            if thread.name == "grow":
                thread.join(POLL_S)

    def finish(self) -> list[int]:
        """Compute to the end; the ids that were computed, in order."""
        meeting = Meeting(
            place=NOWHERE,
            generation=0,
            rank=0,
            members=(0,),
            shares=(self.job.micro_batches,),
        )
        self.member.form(meeting)
        self.until(MemberDone)
        assert self.failure is None, self.failure
        return list(SEEN[self.tag])

    @property
    def failure(self) -> MemberFailed | None:
        return next((e for e in self.events if isinstance(e, MemberFailed)), None)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def publish(self, step: int, *, progress: Progress | None = None) -> Manifest:
        """Make the checkpoint of `step` one to resume from."""
        (part,) = [e.part for e in self.of(PartWritten) if e.step == step]
        progress = progress or self.progress()
        manifest = manifest_of(
            Publish(step=step, parts={(0, 0): part}),
            self.job,
            samples=ROWS,
            ledger=progress.ledger_at(step),
        )
        publish(open_store(self.checkpoints), manifest)
        return manifest

    def progress(self, *, samples: int = ROWS) -> Progress:
        steps = Steps(
            samples=samples, global_batch=self.job.global_batch, micro_batch=self.job.micro_batch
        )
        ledger = Ledger(samples=samples)
        return Progress(steps=steps, step=0, position=Position(), ledger=ledger, generation=0)


def order_of(run: Run) -> Order:
    index = run.provider.provided.train.index
    return Order(samples=index.rows, seed=run.job.seed, layout=block_layout(run.job, index))


def tensors(run: Run, step: int) -> dict[str, torch.Tensor]:
    store = open_store(run.checkpoints)
    return dict(load_tensors(store, load(store, step)))
