"""`train --try` goes through every room and keeps nothing; a new project runs at once."""

from __future__ import annotations

from pathlib import Path

import pytest

import raycloud
from raycloud.checkpoint import open_store
from raycloud.errors import MachineError, RaycloudError, TaskError
from raycloud.events import (
    CheckpointPublished,
    Evaluated,
    Event,
    GenerationFormed,
    MemberFailed,
    PartWritten,
    RunStarted,
    StepsCommitted,
)
from raycloud.on_ray.dry_run import try_out
from raycloud.spec import Job
from tests.checkpoints import drafts
from tests.live import RAYCLOUD, asked, check_result, of_kind, ran
from tests.live_tasks import Steady

CPUS = 2

HELD_OUT = """
import torch
from raycloud import Splits
from tests.live_tasks import Steady


class Held(Steady):
    def data(self, path):
        train = super().data(path).train
        return Splits(train=train, held_out=train)

    def scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps - 900)
"""
CHANGING = """
import os

import torch
from tests.live_tasks import Steady
from tests.checkpoints import drafts


class Changing(Steady):
    def model(self):
        model = super().model()
        model.add_module(f"layer{os.getpid()}", torch.nn.Linear(2, 2).double())
        return model
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def task(tmp_path: Path, text: str) -> str:
    """The class in a file of its own."""
    (tmp_path / "task.py").write_text(text)
    return f"{tmp_path / 'task.py'}:{text.partition('class ')[2].partition('(')[0]}"


@pytest.mark.full
def test_every_room_is_seen_and_nothing_is_left(here: Path, tmp_path: Path, cluster: str) -> None:
    """The task refuses a schedule of two steps, and the place of its checkpoints is made anew."""
    seen: list[Event] = []
    kept = {"every_steps": 9, "path": str(here / "not" / "there")}
    job = asked("Steady", [5, 3], steps=1000, checkpoint=kept)
    job = job.model_copy(update={"task": task(tmp_path, HELD_OUT)})
    tried = try_out(job, observer=seen.append)
    assert (tried.status, tried.steps, tried.workers, tried.samples) == ("finished", 2, 2, 32)
    assert tried.measures["loss"] > 0
    assert tried.checkpoint_bytes > 0
    assert list(here.iterdir()) == []

    assert [s.resumed_from_step for s in of_kind(RunStarted, seen)] == [None, 2]
    assert [(len(f.members), f.first_step) for f in of_kind(GenerationFormed, seen)] == [
        (2, 0),
        (2, 2),
    ]
    first, second = (set(f.members) for f in of_kind(GenerationFormed, seen))
    assert not first & second  # those that read the checkpoint back are new processes
    assert max(c.last_step for c in of_kind(StepsCommitted, seen)) == 2
    assert [e.step for e in of_kind(Evaluated, seen)] == [2, 2]
    assert [c.step for c in of_kind(CheckpointPublished, seen)] == [2]
    assert {part.member for part in of_kind(PartWritten, seen)} == first


@pytest.mark.full
def test_the_place_of_checkpoints_is_tried_and_left_as_it_was(here: Path, cluster: str) -> None:
    kept = here / "kept"
    job = asked("Steady", steps=4, checkpoint={"path": str(kept)})
    raycloud.train(job, run_dir=here / "run")
    before = sorted(here.rglob("*"))
    assert try_out(job, run_dir=here / "run").checkpoint_place == str(kept)
    assert sorted(here.rglob("*")) == before
    assert drafts(open_store(str(kept))) == []


def fails(job: Job, kind: type[RaycloudError]) -> RaycloudError:
    with pytest.raises(kind) as caught:
        try_out(job)
    assert list(Path.cwd().iterdir()) == []
    assert ".try-" not in str(caught.value)
    return caught.value


@pytest.mark.full
def test_a_task_that_raises(here: Path, cluster: str) -> None:
    settings = {"fault": "loss", "after": 9}
    error = fails(asked("Faulty", 1, settings=settings), TaskError)
    assert "Task.loss raised RuntimeError: the shapes do not match" in error.message


@pytest.mark.full
def test_a_place_that_cannot_be_written(here: Path, tmp_path: Path, cluster: str) -> None:
    (tmp_path / "file").touch()
    job = asked("Steady", 1, checkpoint={"path": str(tmp_path / "file" / "below")})
    fails(job, MachineError)


@pytest.mark.full
def test_a_state_that_cannot_be_read_back(here: Path, tmp_path: Path, cluster: str) -> None:
    """Each process names a layer otherwise: training and saving work, and resuming would not."""
    seen: list[Event] = []
    job = asked("Steady", 1).model_copy(update={"task": task(tmp_path, CHANGING)})
    with pytest.raises(TaskError, match="the checkpoint lacks"):
        try_out(job, observer=seen.append)
    assert [c.step for c in of_kind(CheckpointPublished, seen)] == [2]
    assert len(of_kind(MemberFailed, seen)) == 1
    assert list(here.iterdir()) == []


@pytest.mark.full
def test_allow_goes_on_or_begins(here: Path, cluster: str) -> None:
    """A start that fails before its first checkpoint, then one that ends, then one that goes on."""
    run_dir = here / "run"
    broken = asked("Faulty", 1, settings={"fault": "loss", "after": 9}, steps=6)
    with pytest.raises(TaskError):
        raycloud.train(broken, run_dir=run_dir, resume="allow")
    left = {path.name for path in run_dir.iterdir()}
    job = asked("Steady", 1, steps=6)
    assert raycloud.train(job, run_dir=run_dir, resume="allow").summary["steps"] == 6
    assert {path.name for path in (run_dir / "unsaved-1").iterdir()} == left
    longer = asked("Steady", 1, steps=9)
    again = raycloud.train(longer, run_dir=run_dir, resume="allow")
    assert [s.resumed_from_step for s in of_kind(RunStarted, again.events)] == [None, 6]
    check_result(again, longer, Steady(), 9)


@pytest.mark.full(only="what --try says of a job, on Ray")
def test_the_command(tmp_path: Path, cluster: str) -> None:
    """What it prints, its exit codes, and that the folder is as it was."""
    place = tmp_path / "place"
    code, _ = ran(place, RAYCLOUD, "init", "mine")
    assert code == 0
    (place / "out").unlink()
    words = ("train", "mine/job.yaml", "--set", "steps=70", "--address", cluster)
    code, one = ran(place, RAYCLOUD, *words, "--try")
    assert code == 0, one.err
    lines = one.out.splitlines()
    assert lines[0] == "mine works: 2 steps, 128 samples, 2 workers"
    assert "written to runs and read back" in one.out
    assert lines[-1] == f"train it: raycloud {' '.join(words)}"
    assert sorted(path.name for path in place.iterdir()) == ["err", "mine", "out"]
    code, one = ran(place, RAYCLOUD, *words, "--try", "--resume")
    assert code == 2
    assert "tried from its beginning" in one.err
