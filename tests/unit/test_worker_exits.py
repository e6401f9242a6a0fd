"""`sys.exit()` and KeyboardInterrupt in the task's code end the run as an error of the task."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from raycloud.commands import Form
from raycloud.errors import TaskError
from raycloud.events import EvaluationPart, Event, MemberFailed
from raycloud.on_ray.block_store import answer
from raycloud.spec import Job
from raycloud.task import Source, Splits
from raycloud.worker.member import Member, MemberConfig
from tests.fellows import WAIT_S, Fellows
from tests.lockstep import NetTask, job

AFTER = 20  # micro-batches: more than are tried out before the first step


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Points(Dataset[Any]):
    """Points that end the process where they are read, or counted."""

    def __init__(self, where: str, points: Sequence[Any]) -> None:
        self.where, self.points = where, points

    def __len__(self) -> int:
        if self.where == "length":
            sys.exit("bye from length")
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        if self.where == "sample":
            sys.exit("bye from sample")
        return self.points[index]


class Leaves(NetTask):
    """Ends the process in one of its methods."""

    def __init__(self, *, where: str, how: str = "exit") -> None:
        super().__init__()
        self.where, self.how, self.made = where, how, 0
        self.end("constructor")

    def end(self, where: str) -> None:
        if where == self.where:
            if self.how == "exit":
                sys.exit(f"bye from {where}")
            raise KeyboardInterrupt(f"bye from {where}")

    def data(self, path: str | None) -> Splits:
        self.end("data")
        points: Any = super().data(path).train
        return Splits(train=Points(self.where, points), held_out=points[:8])

    def model(self) -> nn.Module:
        self.end("model")
        return super().model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.end("optimizer")
        return super().optimizer(model)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        self.end("scheduler")
        return super().scheduler(optimizer, steps)

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        self.made += 1
        self.end("batch")
        if self.made > AFTER:
            self.end("later batch")
        return super().batch(samples, rng)

    def weight(self, batch: Any, samples: int) -> float:
        self.end("weight")
        return super().weight(batch, samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.end("loss")
        loss = super().loss(model, batch)
        if self.where == "backward":
            loss.register_hook(lambda _: self.end("backward"))
        return loss

    def metrics(self, model: nn.Module, batch: Any, samples: int) -> Any:
        self.end("metrics")
        return super().metrics(model, batch, samples)

    def sample(self, model: nn.Module) -> str | None:
        self.end("showing")
        return None


BEFORE_THE_FIRST_STEP = {
    "constructor": "could not be made from settings ['how', 'where']",
    "data": "Task.data raised",
    "length": "the length of Task.data raised",
    "sample": "reading the samples raised",
    "model": "Task.model raised",
    "optimizer": "Task.optimizer raised",
    "scheduler": "Task.scheduler raised",
    "batch": "Task.batch raised",
    "weight": "Task.weight raised",
    "loss": "Task.loss raised",
    "backward": "the backward pass raised",
    "metrics": "measuring the held-out samples raised",
}


@pytest.mark.parametrize("where", BEFORE_THE_FIRST_STEP)
def test_before_the_first_step(tmp_path: Path, where: str) -> None:
    failed = _failure(_begun(tmp_path, where=where))
    assert failed.error == "TaskError"
    assert BEFORE_THE_FIRST_STEP[where] in failed.message
    assert f"SystemExit: bye from {where}" in failed.message


def test_an_interrupt_of_its_own(tmp_path: Path) -> None:
    failed = _failure(_begun(tmp_path, where="data", how="interrupt"))
    assert failed.error == "TaskError"
    assert failed.message.startswith("Task.data raised KeyboardInterrupt: bye from data")


@pytest.mark.parametrize(
    "skips", [False, True], ids=["in the feed", "where samples may be skipped"]
)
def test_while_it_trains(tmp_path: Path, *, skips: bool) -> None:
    errors = {"on_error": "skip", "most_skipped": 100} if skips else {}
    fellows = _training(tmp_path, errors=errors, settings={"where": "later batch"})
    failed = _failure(fellows.members[0])
    assert failed.error == "TaskError"
    assert "Task.batch raised SystemExit: bye from later batch" in failed.message


def test_what_it_shows_at_the_end_spoils_nothing(tmp_path: Path) -> None:
    fellows = _training(tmp_path, settings={"where": "showing"})
    said = _until(fellows.members[0], EvaluationPart)
    shown = [event for event in said if isinstance(event, EvaluationPart)]
    assert shown[-1].sample == "Task.sample raised SystemExit: bye from showing"


def test_an_actor_of_the_pipeline_goes_on() -> None:
    told = answer(sys, "exit", "no such bucket")
    assert isinstance(told, TaskError)
    assert "SystemExit: no such bucket" in told.message


def test_which_files_to_take(tmp_path: Path) -> None:
    from raycloud.data.location import locate

    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(TaskError, match=r"Source\.select raised SystemExit: bye"):
        locate(Source(path=str(tmp_path), select=lambda _: sys.exit("bye")))


def _begun(folder: Path, **settings: Any) -> Member:
    return Member(_config(folder, job(task=Leaves, settings={"how": "exit", **settings})))


def _training(folder: Path, **changes: Any) -> Fellows:
    fellows = Fellows(folder, job(task=Leaves, steps=10, **changes), 1, joining=0, task=Leaves)
    fellows.form(Form(generation=0, members=(0,), shares=(8,), step=0))
    return fellows


def _config(folder: Path, asked: Job) -> MemberConfig:
    return MemberConfig(
        member=0, node="", address="", job=asked, task=Leaves, checkpoints=str(folder)
    )


def _until(member: Member, kind: type[Event]) -> list[Event]:
    """What it says until it has said so; a member that says nothing fails the test."""
    said: list[Event] = []
    while not any(isinstance(event, kind) for event in said):
        more = member.poll(WAIT_S)
        assert more, f"it says nothing, and not {kind.__name__}: {said}"
        said += more
    return said


def _failure(member: Member) -> MemberFailed:
    return next(e for e in _until(member, MemberFailed) if isinstance(e, MemberFailed))
