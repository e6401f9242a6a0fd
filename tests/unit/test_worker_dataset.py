"""What a task returns as its data becomes samples: its own, or those a provider prepares."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from raycloud.data.index import Block, Index, Input, Prepared
from raycloud.data.provider import Provided
from raycloud.data.samples import BlockSamples
from raycloud.errors import DataError, InternalError, TaskError
from raycloud.spec import Job
from raycloud.task import Source, Splits, Task
from raycloud.worker.dataset import DataRequest, as_source, check_identity, identity
from tests.lockstep import NetTask, job

TABLE = pa.table({"x": [1, 2, 3]})


class Returns(NetTask):
    """Whatever a test wants as its data."""

    def __init__(self, splits: Any) -> None:
        super().__init__()
        self.splits = splits
        self.paths: list[str | None] = []

    def data(self, path: str | None) -> Splits:
        self.paths.append(path)
        if isinstance(self.splits, Exception):
            raise self.splits
        made: Splits = self.splits
        return made


def blocks(index: Index) -> BlockSamples:
    return BlockSamples(index, lambda _: TABLE)


INDEX = Index(blocks=(Block(key="k", rows=3, bytes=24),), partitions=(0, 3))


class Provides:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Task, Splits]] = []

    def provide(self, task: Task, splits: Splits) -> Provided:
        self.asked.append((task, splits))
        made = Prepared(index=INDEX, cached_blocks=0, made_blocks=1, seconds=1.0, read_s=0.5)
        held_out = None if splits.held_out is None else blocks(INDEX)
        return Provided(train=blocks(INDEX), held_out=held_out, prepared={"train": made})

    def grown(self, version: int) -> BlockSamples:
        raise AssertionError(version)


def supplied(splits: Any, provider: Provides | None = None, asked: Job | None = None) -> Provided:
    return DataRequest(Returns(splits), asked or job(), provider).result(lambda: None, 60.0)


def test_who_waits_is_told_each_time_that_a_while_has_passed() -> None:
    go_on = threading.Event()

    class Slow(Provides):
        def provide(self, task: Task, splits: Splits) -> Provided:
            assert go_on.wait(30)
            return super().provide(task, splits)

    told: list[bool] = []

    def waiting() -> None:
        told.append(True)
        if len(told) == 2:
            go_on.set()

    splits = Splits(train=Source(path="x"))
    assert DataRequest(Returns(splits), job(), Slow()).result(waiting, 0.001).train is not None
    assert len(told) >= 2


def test_samples_of_the_tasks_own_need_no_provider() -> None:
    train, held_out = [1, 2], [3]
    made = supplied(Splits(train=train, held_out=held_out))  # type: ignore[arg-type]
    assert made.train is train
    assert made.held_out is held_out
    assert made.prepared == {}


class Dataset:
    """Of no package that is known."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def named(module: str, base: type = object) -> Any:
    """An object whose class is `Dataset` of a package that need not be installed."""
    return type("Dataset", (base,), {"__module__": module})()


@pytest.mark.parametrize(
    "dataset",
    [
        TABLE,
        named("ray.data.dataset"),
        named("datasets.arrow_dataset"),
        type("MaterializedDataset", (type(named("ray.data.dataset")),), {"__module__": "x"})(),
    ],
    ids=["arrow", "ray", "hugging face", "a kind of ray's"],
)
def test_data_sets_that_a_source_may_hold_become_one(dataset: Any) -> None:
    provider = Provides()
    supplied(Splits(train=dataset), provider)
    assert provider.asked[0][1].train == Source(dataset=dataset)


def test_other_data_sets_stay_what_they_are() -> None:
    for other in (Dataset(), named("torch.utils.data"), named("rayon.data"), [1], None):
        assert as_source(other) is other
    source = Source(path="x")
    assert as_source(source) is source


def test_a_source_is_prepared_and_its_held_out_samples_may_be_the_tasks_own() -> None:
    provider, held_out = Provides(), [1]
    source = Source(path="x")
    made = supplied(Splits(train=source, held_out=held_out), provider)  # type: ignore[arg-type]
    assert isinstance(made.train, BlockSamples)
    assert made.held_out is held_out
    assert provider.asked[0][1] == Splits(train=source)
    assert list(made.prepared) == ["train"]
    both = supplied(Splits(train=source, held_out=TABLE), provider)  # type: ignore[arg-type]
    assert isinstance(both.held_out, BlockSamples)


def test_the_task_is_asked_for_the_jobs_path_at_once() -> None:
    task = Returns(Splits(train=[1]))  # type: ignore[arg-type]
    DataRequest(task, job(data={"path": "here"}), None)
    assert task.paths == ["here"]


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        (Splits(train=Source(path="x")), InternalError, "nothing here can prepare"),
        (Splits(train=[1], held_out=TABLE), TaskError, "a Source of held-out samples, but"),  # type: ignore[arg-type]
        (Splits(train=[]), DataError, "no training samples"),  # type: ignore[arg-type]
        (Splits(train=iter([1])), TaskError, "cannot be indexed"),  # type: ignore[arg-type]
        ([1], TaskError, "Task.data returned list"),
        (FileNotFoundError(2, "No such file"), DataError, "could not be read"),
        (KeyError("label"), TaskError, "Task.data raised KeyError"),
        (DataError("torn"), DataError, "torn"),
    ],
)
def test_what_cannot_be_used_is_refused(splits: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        supplied(splits)


def index(*keys: str, files: str = "ab") -> Index:
    return Index(
        blocks=tuple(Block(key=key, rows=5, bytes=1) for key in keys),
        partitions=(0, 5 * len(keys)),
        inputs=tuple(Input(path=f"{d}.csv", bytes=1, digest=d) for d in files),
    )


def test_the_same_data_and_more_of_it_are_the_checkpoints() -> None:
    kept = identity(index("k", "l"))
    assert kept["rows"] == 10
    check_identity(index("k", "l"), kept)
    check_identity(index("k", "l", "m", files="abc"), kept)
    check_identity(None, None)


@pytest.mark.parametrize(
    ("now", "message", "hint"),
    [
        (index("k", files="ab"), "5 in the place of the 10", "Task.preprocess"),
        (index("k", "x"), "10 in the place of the 10", "Task.preprocess"),
        (index("l", "k"), "10 in the place of the 10", "Task.preprocess"),
        (index("k", "x", files="abc"), "10 in the place of the 10", "Task.preprocess"),
        (index("k", "x", files="ax"), "files of the data set have changed", "bring them back"),
        (index("k", files="a"), "files of the data set have changed", "bring them back"),
        (None, "a Source when the checkpoint was made, and samples of the task's own", "resume"),
    ],
)
def test_other_data_is_refused_and_what_changed_is_named(
    now: Index | None, message: str, hint: str
) -> None:
    with pytest.raises(DataError, match=message) as refused:
        check_identity(now, identity(index("k", "l")))
    assert hint in refused.value.hint
    assert "global_batch" not in refused.value.hint


def test_a_stratified_data_set_also_depends_on_the_step() -> None:
    with pytest.raises(DataError) as refused:
        check_identity(index("x", "y"), identity(index("k", "l")), stratified=True)
    assert "global_batch / micro_batch" in refused.value.hint


def test_a_source_where_there_was_none_is_refused() -> None:
    with pytest.raises(DataError, match=r"samples of the task's own when .* a Source now"):
        check_identity(index("k"), None)
