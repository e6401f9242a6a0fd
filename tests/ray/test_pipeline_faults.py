"""What breaks while data is prepared or read: recovered, or a clear error; nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

from raycloud.data.index import TRAIN
from raycloud.errors import DataError, MachineError
from tests.live import wait_for
from tests.live_data import (
    asked,
    cache,
    files_in,
    ids_of,
    killed,
    processes_in,
    provided,
    provider,
    written,
)
from tests.stores import Store, serving

CPUS = 2
IDS = list(range(240))

pytestmark = pytest.mark.usefixtures("cluster")


def test_killed_reader(tmp_path: Path) -> None:
    written(tmp_path / "data")
    (tmp_path / "ran").mkdir()
    settings = {"killed": str(tmp_path / "killed"), "ran": str(tmp_path / "ran")}
    job = asked(tmp_path, settings=settings)
    with provider(job) as one:
        found = provided(one, job)
        assert ids_of(found.train) == IDS
    assert (tmp_path / "killed-0").exists()
    assert found.prepared[TRAIN].made_blocks == 4
    assert len(list((tmp_path / "ran").iterdir())) == 4


@pytest.mark.full(only="readers join where reading takes long")
@pytest.mark.parametrize("cpus", [1, 4])
def test_others_join_where_reading_takes_long(tmp_path: Path, cpus: int) -> None:
    """The pipeline's own process reads at once, and goes on beside them: no block twice."""
    written(tmp_path / "data")
    (tmp_path / "ran").mkdir()
    settings = {"ran": str(tmp_path / "ran"), "together": min(cpus, 2)}
    job = asked(tmp_path, settings=settings, data={"cpus": cpus})
    with provider(job) as one:
        found = provided(one, job)
        assert ids_of(found.train) == IDS
    assert len(list((tmp_path / "ran").iterdir())) == 4
    assert (len(processes_in(tmp_path / "ran")) > 1) == (cpus > 1)


@pytest.mark.full
def test_reader_that_dies_every_time_names_the_file(tmp_path: Path) -> None:
    written(tmp_path / "data", files=1)
    job = asked(tmp_path, settings={"always": True})
    with provider(job) as one, pytest.raises(MachineError, match=r"part-0\.parquet died 4 times"):
        provided(one, job)


@pytest.mark.full(only="a pipeline that dies is made again")
def test_dead_pipeline_is_made_again(tmp_path: Path) -> None:
    written(tmp_path / "data")
    job = asked(tmp_path, data={"cache": _unpinned(tmp_path)})
    with provider(job) as one:
        found = provided(one, job)
        killed(one)
        block = found.prepared[TRAIN].index.blocks[2]
        cache(tmp_path).path_of(block.key).unlink()
        assert ids_of(found.train) == IDS
        told = [notice.what for notice in one.notices()]
        assert "the data's pipeline is made again" in told
        assert "a block is made again" in told
        assert one.grown(0).index.blocks == found.prepared[TRAIN].index.blocks


@pytest.mark.full
def test_pipeline_made_again_knows_what_has_grown(tmp_path: Path) -> None:
    """A file that sorts before those that were added stays behind them."""
    written(tmp_path / "data", files=2, first=5)
    job = asked(tmp_path)
    with provider(job) as one:
        provided(one, job)
        pipeline = one._found()
        written(tmp_path / "data", files=1, first=3)
        wait_for("growth", lambda: ray.get(pipeline.call.remote("refresh")).grown)
        ids = ids_of(one.grown(1))
        assert ids == [*range(300, 420), *range(180, 240)]
        killed(one)
        assert ids_of(one.grown(1)) == ids


@pytest.mark.full
def test_damaged_block_is_made_again(tmp_path: Path) -> None:
    written(tmp_path / "data")
    job = asked(tmp_path, data={"stratify": "label", "cache": _unpinned(tmp_path)})
    with provider(job) as one:
        found = provided(one, job)
        block = found.prepared[TRAIN].index.blocks[1]
        path = cache(tmp_path).path_of(block.key)
        content = path.read_bytes()
        os.truncate(path, len(content) // 2)
        assert sorted(ids_of(found.train)) == IDS
        assert path.read_bytes() == content
        assert "a block is made again" in [notice.what for notice in one.notices()]
    os.truncate(path, 100)
    with provider(job) as one:  # and when a run begins
        prepared = provided(one, job).prepared[TRAIN]
        assert prepared.made_blocks == 1
        assert path.read_bytes() == content


@pytest.mark.full
def test_truncated_source_is_named(tmp_path: Path) -> None:
    file = files_in(written(tmp_path / "data"))[2]
    os.truncate(file, file.stat().st_size // 2)
    job = asked(tmp_path)
    with provider(job) as one, pytest.raises(DataError, match=r"part-2\.parquet"):
        provided(one, job)


@pytest.mark.full
def test_source_that_is_not_there_is_the_same_error_for_all(tmp_path: Path) -> None:
    job = asked(tmp_path)
    with provider(job) as one:
        for _ in range(2):
            with pytest.raises(DataError, match="data"):
                provided(one, job)


@pytest.mark.full(only="a source that answers 503, on Ray")
def test_source_that_answers_503_twice(tmp_path: Path) -> None:
    file = files_in(written(tmp_path / "data", files=1))[0]
    store = Store(files={"/a.parquet": file.read_bytes()}, failures=2, only="GET")
    with serving(store):
        job = asked(tmp_path, data={"path": f"{store.url}/a.parquet"})
        with provider(job) as one:
            assert ids_of(provided(one, job).train) == IDS[:60]
    assert store.failures == 0


def _unpinned(folder: Path) -> dict[str, Any]:
    return {"path": str(folder / "cache"), "memory_bytes": 0}
