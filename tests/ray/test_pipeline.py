"""The pipeline on a real Ray gives what the plain functions give, once, and no more than is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

import raycloud
from raycloud.clock import SystemClock
from raycloud.data.index import TRAIN
from raycloud.errors import DataError
from raycloud.events import DataGrew, DataPrepared, Event, MemberReady, MemberSpawned
from raycloud.on_ray.block_store import NodeBlocks
from raycloud.on_ray.pipeline import Pipeline, PipelineConfig
from raycloud.on_ray.read_tasks import Readers
from raycloud.spec import dump_job
from tests.live import RAYCLOUD, exact_steps, of_kind, parameters, ran
from tests.live_data import (
    Points,
    asked,
    cache,
    here,
    ids_of,
    provided,
    provider,
    reserved,
    written,
)
from tests.one_process import prepare_here

CPUS = 2

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.full(only="the same blocks as without Ray")
def test_same_blocks_and_ids_as_without_ray(tmp_path: Path) -> None:
    written(tmp_path / "data")
    data = {"stratify": "label"}
    job = asked(tmp_path, data=data)
    with provider(job) as one:
        found = provided(one, job)
        index = found.prepared[TRAIN].index
        ids = ids_of(found.train)
    other = asked(tmp_path / "other", data=data | {"path": str(tmp_path / "data")})
    task = Points()
    wanted = prepare_here(
        other, task, task.data(other.data.path), cache(tmp_path / "other"), SystemClock()
    )
    expected = wanted.prepared[TRAIN].index
    assert [b.key for b in index.blocks] == [b.key for b in expected.blocks]
    assert index.partitions == expected.partitions
    assert index.inputs == expected.inputs
    assert ids == ids_of(wanted.train)
    assert sorted(ids) == list(range(240))
    assert len(index.blocks) >= 4
    assert {b.nodes for b in index.blocks} == {(here(),)}
    assert ray.util.list_named_actors(all_namespaces=True) == []  # none of Ray Data's own


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Data's own
def test_second_preparation_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only are no blocks made: Ray Data is not run at all."""
    written(tmp_path / "data")
    job = asked(tmp_path, data={"stratify": "label"})
    with provider(job) as one:
        first = provided(one, job).prepared[TRAIN]
    assert first.cached_blocks == 0
    assert first.made_blocks == len(first.index.blocks) > 0
    assert first.read_s > 0

    def run(*_: Any) -> Any:
        pytest.fail("Ray Data was run")
        yield

    monkeypatch.setattr(Readers, "run", lambda *a: run() if a[-1] else iter(()))
    second = _plain(job).prepare().prepared[TRAIN]
    assert second.made_blocks == 0
    assert second.cached_blocks == len(second.index.blocks)
    assert second.index == first.index


@pytest.mark.full(only="blocks are pinned in memory up to the limit")
def test_blocks_are_pinned_up_to_the_limit(tmp_path: Path) -> None:
    written(tmp_path / "data", files=4)
    with provider(asked(tmp_path)) as one:
        found = provided(one, asked(tmp_path))
        blocks = found.prepared[TRAIN].index.blocks
        assert set(one._references()) == {block.key for block in blocks}
        pinned = ray.get(one._references()[blocks[0].key])
        assert pinned.num_rows == blocks[0].rows
        assert one.notices() == []
    most = 3 * cache(tmp_path).open(blocks[0].key).nbytes // 2
    job = asked(tmp_path, data={"cache": {"path": str(tmp_path / "cache"), "memory_bytes": most}})
    with provider(job) as one:
        assert ids_of(provided(one, job).train) == list(range(240))
        assert len(one._references()) == 1


@pytest.mark.full(only="rows in hand (Hugging Face, Ray Data) as a source")
@pytest.mark.parametrize("kind", ["hugging", "ray", "keyed"])
def test_rows_in_hand(tmp_path: Path, kind: str) -> None:
    """A Hugging Face data set (reversed, by its indices), a `ray.data.Dataset`."""
    written(tmp_path / "data")
    (tmp_path / "ran").mkdir()
    job = asked(tmp_path, settings={"kind": kind, "ran": str(tmp_path / "ran")})
    indexes, calls = [], []
    for again in (False, True):
        with reserved(CPUS), provider(job) as one:
            found = provided(one, job)
            prepared = found.prepared[TRAIN]
            ids = list(range(240))
            assert ids_of(found.train) == (ids[::-1] if kind == "hugging" else ids)
            assert prepared.cached_blocks == (len(prepared.index.blocks) if again else 0)
            indexes.append(prepared.index)
            calls.append(len(list((tmp_path / "ran").iterdir())))
    assert indexes[0] == indexes[1]
    assert calls[0] == calls[1] > 0


@pytest.mark.full
def test_shuffle_of_ray_data_waits_for_no_cpu(tmp_path: Path) -> None:
    written(tmp_path / "data", files=1)
    job = asked(tmp_path, settings={"kind": "shuffled"})
    error = pytest.raises(DataError, match="shuffles or sorts")
    with reserved(CPUS), provider(job) as one, error:
        provided(one, job)


@pytest.mark.full
def test_added_files_are_taken_up_once_nobody_writes_to_them(tmp_path: Path) -> None:
    written(tmp_path / "data", files=3)
    job = asked(tmp_path)
    with provider(job) as one:
        found = provided(one, job)
        before = found.prepared[TRAIN].index
        pipeline = one._found()
        assert ray.get(pipeline.call.remote("refresh")).grown is None
        written(tmp_path / "data", files=1, first=10)
        written(tmp_path / "data", files=1, first=3)
        assert ray.get(pipeline.call.remote("refresh")).grown is None
        grown = ray.get(pipeline.call.remote("refresh")).grown
        assert grown.version == 1
        assert grown.samples == 300
        assert [Path(path).name for path in grown.inputs] == ["part-10.parquet", "part-3.parquet"]
        assert ray.get(pipeline.call.remote("refresh")).grown is None
        samples = one.grown(1)
        assert samples.index.partitions == grown.partitions
        assert samples.index.partitions[: len(before.partitions)] == before.partitions
        assert samples.index.blocks[: len(before.blocks)] == before.blocks
        ids = [*range(180), *range(600, 660), *range(180, 240)]
        assert ids_of(samples) == ids
        assert {i.version for i in samples.index.inputs} == {0, 1}
        known = samples.index.inputs
    with provider(job, known=known) as one:  # as a resumed run: not sorted again
        assert ids_of(provided(one, job).train) == ids
    (tmp_path / "data/part-1.parquet").unlink()
    with (
        provider(job, known=known) as one,
        pytest.raises(DataError, match=r"part-1\.parquet is gone"),
    ):
        provided(one, job)


@pytest.mark.full
def test_added_files_that_cannot_be_taken_up_do_no_harm(tmp_path: Path) -> None:
    data = tmp_path / "data"
    written(data, files=2)
    job = asked(tmp_path)
    with provider(job) as one:
        provided(one, job)
        pipeline = one._found()

        def refresh() -> Any:
            ray.get(pipeline.call.remote("refresh"))  # seen once
            return ray.get(pipeline.call.remote("refresh"))

        empty = pq.read_table(data / "part-0.parquet").slice(0, 0)
        pq.write_table(empty, data / "part-2.parquet")
        assert refresh().grown is None  # no row: nothing to announce
        (data / "part-3.parquet").write_bytes(b"not there yet")
        assert "part-3.parquet" in refresh().message
        (data / "part-3.parquet").unlink()  # as it says
        written(data, files=1, first=4)
        assert refresh().grown.samples == 180
        assert ids_of(one.grown(1)) == [*range(120), *range(240, 300)]


def test_training_is_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    """What was read is kept in the run's directory; the pipeline waits for no member to begin."""
    written(tmp_path / "data")
    found = []
    early: list[str] = []

    def watch(event: Event) -> None:
        if isinstance(event, MemberSpawned):
            early.extend(one["name"] for one in ray.util.list_named_actors(all_namespaces=True))

    for workers in (1, 2):
        job = asked(tmp_path, workers, steps=20)
        early.clear()
        run = raycloud.train(job, run_dir=tmp_path / f"run-{len(found)}", observer=watch)
        assert len(early) == workers
        assert early[0].startswith("raycloud-data-")
        assert exact_steps(run.directory) == 20
        found.append(parameters(run.directory))
        prepared = of_kind(DataPrepared, run.events)
        assert {e.rows for e in prepared} == {240}
        assert len(prepared) == workers
        record = json.loads((run.directory / "data.json").read_text())
        assert [Path(i["path"]).name for i in record["inputs"]] == [
            f"part-{n}.parquet" for n in range(4)
        ]
    apart = max(float((found[0][n] - found[1][n]).abs().max()) for n in found[0])
    assert apart <= 1e-9


class _Stop:
    """Turned by a test: asks the run to end."""

    reason: str | None = None


@pytest.mark.full(only="files added while a run trains are trained on")
def test_files_added_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a later epoch of the same run; the run goes on from its checkpoint with them."""
    monkeypatch.setattr("raycloud.on_ray.cluster.REFRESH_S", 0.05)
    written(tmp_path / "data", files=3, first=3)
    job = asked(tmp_path, steps=1_000_000, data={"refresh": True, "collators": 1})
    stop = _Stop()
    grown: list[DataGrew] = []

    def watch(event: Event) -> None:
        if isinstance(event, MemberReady) and event.member == 0:
            written(tmp_path / "data", files=1, first=1)
        if isinstance(event, DataGrew):
            grown.append(event)
        if isinstance(event, DataPrepared) and event.version == 1:
            stop.reason = "enough"

    run = raycloud.train(job, run_dir=tmp_path / "run", observer=watch, stop=stop)
    assert run.status == "stopped"
    assert [(g.samples, g.version) for g in grown] == [(240, 1)]
    (late,) = {e.rows for e in of_kind(DataPrepared, run.events) if e.version == 1}
    assert late == 240
    steps = exact_steps(run.directory)
    record = json.loads((run.directory / "data.json").read_text())
    names = [Path(one["path"]).name for one in record["inputs"]]
    assert names == ["part-3.parquet", "part-4.parquet", "part-5.parquet", "part-1.parquet"]
    assert record["versions"] == 2

    longer = job.model_copy(update={"steps": steps + 20})
    run = raycloud.train(longer, run_dir=tmp_path / "run", resume=True)
    assert exact_steps(run.directory) == steps + 20
    assert {e.rows for e in of_kind(DataPrepared, run.events)} == {180, 240}


@pytest.mark.full
def test_command_names_bad_rows(tmp_path: Path, cluster: str) -> None:
    written(tmp_path / "data")
    job = asked(tmp_path, settings={"bad": 70})
    (tmp_path / "job.yaml").write_text(dump_job(job))
    code, one = ran(tmp_path, RAYCLOUD, "train", "job.yaml", RAY_ADDRESS=cluster)
    assert code == 2
    assert "part-1.parquet" in one.err
    assert "10" in one.err
    assert "no such point" in one.err
    assert "Traceback" not in one.err


@pytest.mark.full
def test_plan_of_a_job_with_a_source(tmp_path: Path) -> None:
    written(tmp_path / "data")
    plan = raycloud.plan(asked(tmp_path))
    assert plan.steps_per_epoch == 240 // 16


def _plain(job: Any) -> Pipeline:
    """A pipeline in this process."""
    own = NodeBlocks(Points, job, here(), SystemClock())
    return Pipeline(PipelineConfig(job=job, task=Points), own, None)
