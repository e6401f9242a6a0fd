"""A member over blocks, from its data to its end: prepared, resumed, grown."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycloud.checkpoint import decode
from raycloud.commands import Extend
from raycloud.data.provider import Provided
from raycloud.errors import DataError
from raycloud.events import DataPrepared, MemberDone, MemberFailed, MemberReady, PartWritten
from raycloud.step.collate import Collate, Passes
from raycloud.task import Splits, Task
from tests.alone import MORE, POLL_S, ROWS, Run, order_of, tensors, two_files
from tests.blocks import BlockTask, Here, asked, write_points
from tests.lockstep import NetTask


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return two_files(tmp_path)


def test_a_member_tells_what_was_prepared_and_computes_it_in_order(
    tmp_path: Path, files: Path
) -> None:
    run = Run(tmp_path, asked(files, steps=9))
    (told,) = run.of(DataPrepared)
    index = run.provider.provided.train.index
    assert (told.split, told.rows, told.version, told.files) == ("train", ROWS, 0, 2)
    assert (told.blocks, told.cached_blocks) == (len(index.blocks), 0)
    assert told.partitions == len(index.partitions) - 1
    assert [Path(file["path"]).name for file in told.inputs] == ["a.parquet", "b.parquet"]
    assert run.of(MemberReady)[0].samples == ROWS
    assert run.events.index(told) < run.events.index(run.of(MemberReady)[0])
    order = order_of(run)
    assert run.finish() == [*order.ids(0, 0, ROWS).tolist(), *order.ids(1, 0, 48).tolist()]
    assert order.lanes_in(0) == 8
    again = Run(tmp_path, asked(files, steps=9))
    assert again.of(DataPrepared)[0].cached_blocks == told.blocks


@pytest.mark.parametrize("stop", [6, 9], ids=["between epochs", "in an epoch"])
def test_a_resumed_run_is_the_uninterrupted_run(stop: int, tmp_path: Path, files: Path) -> None:
    ahead = {"threads": 3, "prefetch_steps": 4}
    whole = Run(tmp_path / "whole", asked(files, steps=14, data=ahead))
    ids = whole.finish()
    whole.publish(14)
    first = Run(tmp_path, asked(files, steps=stop))
    before = first.finish()
    first.publish(stop)
    second = Run(tmp_path, asked(files, steps=14), known=first.provider.inputs(), resume=stop)
    assert before + second.finish() == ids
    second.publish(14)
    mine, theirs = tensors(second, 14), tensors(whole, 14)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_an_epoch_ends_as_it_began_under_another_global_batch(tmp_path: Path, files: Path) -> None:
    first = Run(tmp_path, asked(files, steps=3))
    before, order = first.finish(), order_of(first)
    first.publish(3)
    wider = asked(files, steps=3 + 2 + 2, global_batch=24)  # 12 lanes in the place of 8
    second = Run(tmp_path, wider, known=first.provider.inputs(), resume=3)
    after = second.finish()
    assert before + after[:35] == order.ids(0, 0, ROWS).tolist()
    others = order_of(second)
    assert (order.lanes_in(0), others.lanes_in(0)) == (8, 12)
    assert after[35:] == others.ids(1, 0, 48).tolist()


def test_added_files_are_there_from_the_next_epoch_on(tmp_path: Path, files: Path) -> None:
    first = Run(tmp_path, asked(files, steps=3))
    before, order = first.finish(), order_of(first)
    first.publish(3)
    write_points(files / "0.parquet", ROWS, MORE)  # sorted before the others, and yet behind them
    longer = asked(files, epochs=2, steps=None)
    second = Run(tmp_path, longer, known=first.provider.inputs(), resume=3)
    assert second.of(MemberReady)[0].samples == ROWS + MORE
    after = second.finish()
    assert before + after[: ROWS - 48] == order.ids(0, 0, ROWS).tolist()
    assert Counter(after[ROWS - 48 :]) == Counter(range(ROWS + MORE))


def test_a_finished_run_goes_on_with_added_files(tmp_path: Path, files: Path) -> None:
    first = Run(tmp_path, asked(files, epochs=1, steps=None))
    first.finish()
    first.publish(6)
    write_points(files / "c.parquet", ROWS, MORE)
    longer = asked(files, epochs=2, steps=None)
    second = Run(tmp_path, longer, known=first.provider.inputs(), resume=6)
    assert Counter(second.finish()) == Counter(range(ROWS + MORE))


def test_data_grows_while_a_member_trains(tmp_path: Path, files: Path) -> None:
    every = {"every_steps": 1}
    run = Run(tmp_path, asked(files, epochs=2, steps=None, checkpoint=every))
    order = order_of(run)
    write_points(files / "c.parquet", ROWS, MORE)
    run.grow(Extend(version=1, samples=ROWS + MORE))
    ids = run.finish()
    assert ids[:ROWS] == order.ids(0, 0, ROWS).tolist()
    assert Counter(ids[ROWS:]) == Counter(range(ROWS + MORE))
    told = run.of(DataPrepared)
    assert [(e.version, e.rows) for e in told] == [(0, ROWS), (1, ROWS + MORE)]
    assert told[1].cached_blocks == told[0].blocks
    progress = run.progress()
    progress.grow(ROWS + MORE, 4)
    run.publish(8, progress=progress)
    resumed = Run(
        tmp_path, asked(files, epochs=2, steps=None), known=run.provider.inputs(), resume=8
    )
    assert ids[: ROWS + 32] + resumed.finish() == ids


def test_growth_that_cannot_be_read_fails_the_member(tmp_path: Path, files: Path) -> None:
    run = Run(tmp_path, asked(files, steps=3))
    run.grow(Extend(version=1, samples=ROWS + MORE))
    run.until(MemberDone)
    assert run.failure is not None
    assert run.failure.error == "InternalError"
    assert f"but there are {ROWS} samples" in run.failure.message


def test_a_checkpoint_knows_the_data_and_the_layout_of_its_epoch(
    tmp_path: Path, files: Path
) -> None:
    run = Run(tmp_path, asked(files, epochs=1, steps=None, checkpoint={"every_steps": 2}))
    run.finish()
    index = run.provider.provided.train.index
    kept = {e.step: decode(e.part["values"]) for e in run.of(PartWritten)}
    assert kept[2]["data"] == kept[6]["data"]
    assert (kept[2]["data"]["rows"], kept[2]["data"]["blocks"]) == (ROWS, len(index.blocks))
    assert (kept[2]["layout"]["lanes"], kept[2]["layout"]["run"]) == (8, 2)
    assert "layout" not in kept[6]  # it stands between epochs


class Meanwhile(BlockTask):
    """Its model changes what `preprocess` reads, if that is still to come."""

    building, prepared = threading.Event(), threading.Event()

    def model(self) -> torch.nn.Module:
        self.factor = 100.0
        Meanwhile.building.set()
        assert Meanwhile.prepared.wait(POLL_S)
        return super().model()


class After(Here):
    """Prepares once the model is being built."""

    def provide(self, task: Task, splits: Splits) -> Provided:
        assert Meanwhile.building.wait(POLL_S)
        made = super().provide(task, splits)
        Meanwhile.prepared.set()
        return made


def test_data_is_prepared_beside_the_model_from_the_task_as_it_was(
    tmp_path: Path, files: Path
) -> None:
    job = asked(files, steps=1).model_copy(update={"task": Meanwhile})
    run = Run(tmp_path, job, provider=After(job, tmp_path))
    assert run.failure is None
    points: Any = run.provider.provided.train.gather(np.arange(ROWS))["point"]
    assert np.abs(points).max() <= 1.0


class Elsewhere(Here):
    """Also provides collators: threads, as good as processes here."""

    collate: Collate | None = None
    asked_for = 0

    def collators(self, collate: Collate, samples: Any) -> Elsewhere:
        self.collate = Collate(collate._task, samples, collate.order, pinned=False)
        return self

    def submit(self, micro_batches: Any, fuse: int) -> Future[Passes]:
        assert self.collate is not None
        self.asked_for += 1
        made: Future[Passes] = Future()
        made.set_result(self.collate.passes(micro_batches, fuse))
        return made

    def help(self) -> bool:
        return False

    def extend(self, version: int, epoch: int, layout: Any) -> None:
        assert self.collate is not None
        assert self.provided is not None
        self.collate.extend(self.provided.train, epoch, layout)

    def close(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("collators", [0, 2])
def test_batches_that_are_made_elsewhere_are_the_same(
    collators: int, tmp_path: Path, files: Path
) -> None:
    here = Run(tmp_path / "here", asked(files, epochs=2, steps=None))
    write_points(files / "c.parquet", ROWS, MORE)
    here.grow(Extend(version=1, samples=ROWS + MORE))
    ids = here.finish()
    (files / "c.parquet").unlink()
    job = asked(files, epochs=2, steps=None, data={"collators": collators})
    provider = Elsewhere(job, tmp_path / "cache")
    run = Run(tmp_path, job, provider=provider)
    write_points(files / "c.parquet", ROWS, MORE)
    run.grow(Extend(version=1, samples=ROWS + MORE))
    assert run.finish() == ids
    assert (provider.asked_for > 0) == bool(collators)


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
