"""A member over blocks that are not those of its checkpoint, or not there: it says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycloud.data.provider import Provided
from raycloud.errors import DataError
from raycloud.events import MemberFailed
from raycloud.task import Splits, Task
from tests.alone import ROWS, Run, two_files
from tests.blocks import BlockTask, Here, asked, write_points
from tests.lockstep import NetTask


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return two_files(tmp_path)


def refused(run: Run, error: str) -> MemberFailed:
    assert run.failure is not None
    assert run.failure.error == error, run.failure
    return run.failure


def stopped(folder: Path, files: Path) -> Run:
    run = Run(folder, asked(files, steps=3))
    run.finish()
    run.publish(3)
    return run


def test_other_rows_than_the_checkpoint_was_trained_on_are_refused(
    tmp_path: Path, files: Path
) -> None:
    first = stopped(tmp_path, files)
    other = asked(files, steps=6, settings={"scale": 2.0})
    failure = refused(Run(tmp_path, other, known=first.provider.inputs(), resume=3), "DataError")
    assert f"in the place of the {ROWS} that the checkpoint was trained on" in failure.message
    assert "undo the change to Task.preprocess" in failure.hint


def test_other_files_than_the_checkpoint_was_trained_on_are_refused(
    tmp_path: Path, files: Path
) -> None:
    first = stopped(tmp_path, files)
    write_points(files / "b.parquet", 60, ROWS - 50)
    failure = refused(Run(tmp_path, asked(files, steps=6), resume=3), "DataError")
    assert "the first 2 are not those that the checkpoint" in failure.message
    known = first.provider.inputs()
    failure = refused(Run(tmp_path, asked(files, steps=6), known=known, resume=3), "DataError")
    assert "b.parquet has changed since this run read it" in failure.message


class Listed(BlockTask):
    """The same points as samples of the task's own."""

    def data(self, path: str | None) -> Splits:
        return Splits(train=NetTask(samples=ROWS).data(None).train)

    def batch(self, samples: Sequence[Any], rng: np.random.Generator | None) -> Any:
        return (*NetTask.batch(self, samples, rng), np.zeros(0))


def test_another_kind_of_samples_than_the_checkpoint_was_trained_on_is_refused(
    tmp_path: Path, files: Path
) -> None:
    stopped(tmp_path, files)
    other = asked(files, steps=6).model_copy(update={"task": Listed})
    failure = refused(Run(tmp_path, other, resume=3), "DataError")
    assert "a Source when the checkpoint was made, and samples of the task's own now" in (
        failure.message
    )


class Fails(Here):
    """A provider that finds nothing."""

    def provide(self, task: Task, splits: Splits) -> Provided:
        raise DataError("there is no file", hint="check data.path")


def test_what_preparing_raises_is_what_fails(tmp_path: Path, files: Path) -> None:
    job = asked(files)
    failure = refused(Run(tmp_path, job, provider=Fails(job, tmp_path)), "DataError")
    assert (failure.message.splitlines()[0], failure.hint) == (
        "there is no file",
        "check data.path",
    )
