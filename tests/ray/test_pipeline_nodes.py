"""Two nodes with a cache each: what one has made, the other fetches, once."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raycloud
from raycloud.checkpoint import latest, open_store
from raycloud.data.cache import BlockCache
from raycloud.data.index import TRAIN, Block
from raycloud.data.samples import BlockSamples
from raycloud.errors import JobError
from raycloud.events import DataPrepared, MemberReady, StepsCommitted
from raycloud.on_ray.block_store import BlockFetcher
from raycloud.on_ray.provider import RayProvider
from tests.live import asked as small
from tests.live import events, exact_steps, of_kind, wait_for
from tests.live_data import Points, asked, here, ids_of, killed, provided, provider, written

IDS = list(range(240))
STORE_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Two:
    """The nodes, the driver's first, and where each keeps its blocks."""

    nodes: tuple[str, str]
    caches: tuple[BlockCache, ...]
    homes: tuple[Path, ...]


@pytest.fixture(scope="module")
def two(ray_tmpdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Nodes on this machine; the working directory of their processes tells them apart."""
    from ray.cluster_utils import Cluster

    from raycloud.on_ray.attach import _EMBEDDED, _QUIET

    homes = (tmp_path_factory.mktemp("head"), tmp_path_factory.mktemp("other"))
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (_QUIET | _EMBEDDED).items():
            patch.setenv(name, value)
        started = {}
        for home in homes:
            patch.chdir(home)
            node = cluster.add_node(
                num_cpus=1,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
                env_vars={"RAYCLOUD_CACHE": str(home / "cache")},
            )
            started[node.node_id] = home
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            nodes = sorted(started, key=lambda node: node != here())
            patch.chdir(started[nodes[0]])
            patch.setenv("RAYCLOUD_CACHE", str(started[nodes[0]] / "cache"))
            yield Two(
                nodes=(nodes[0], nodes[1]),
                caches=tuple(BlockCache(started[node] / "cache") for node in nodes),
                homes=tuple(started[node] for node in nodes),
            )
        finally:
            ray.shutdown()
            cluster.shutdown()


def sent(job: Any) -> tuple[Any, Any]:
    """The task's code and the job, as they go to workers: other nodes have no tests."""
    from raycloud.on_ray.tasks import code_of

    code = code_of(job, Points)
    return code, code.named_in(job)


@ray.remote(num_cpus=0)
def read(
    code: Any, job: Any, node: str, name: str, home: str, *, kill: bool = False
) -> tuple[list[int], set[str]]:
    """What a member there sees: the ids of all rows, and what its provider noticed.

    With `kill` the pipeline dies once it has prepared the data.
    """
    from raycloud.on_ray.provider import RayProvider
    from raycloud.worker.context import MemberConfig

    config = MemberConfig(
        member=1,
        node=node,
        address="",
        job=job,
        task=code,
        checkpoints="",
        pipeline=name,
        home=home,
    )
    one = RayProvider(config, node)
    samples = provided(one, job).train
    if kill:
        killed(one)
    return ids_of(samples), {notice.what for notice in one.notices()}


@pytest.mark.full(only="rows are sent before blocks")
def test_rows_of_another_node_come_before_its_blocks(two: Two, tmp_path: Path) -> None:
    written(tmp_path / "data")
    job = asked(tmp_path, data={"cache": {}, "cpus": 1}, settings={"scale": 5.0})
    notices: list[str] = []
    with provider(job) as one:
        index = provided(one, job).prepared[TRAIN].index
        fetcher = BlockFetcher(
            BlockCache(tmp_path / "elsewhere"),
            two.nodes[1],
            one._call("prepare").handles,
            lambda what, **_: notices.append(what),
        )
        came = threading.Event()

        def table_of(block: Block) -> Any:
            assert came.wait(60)
            return fetcher.table(block)

        samples = BlockSamples(index, table_of, fetcher.rows)
        assert samples.gather(np.array([5, 3, 5]))["id"].tolist() == [5, 3, 5]
        came.set()
        assert ids_of(samples) == IDS
        two.caches[0].path_of(index.blocks[0].key).unlink()  # who has evicted it has nothing to say
        shutil.rmtree(tmp_path / "elsewhere")
        assert fetcher.rows([(index.blocks[0], np.array([1]))]) == {}
    assert not notices


@pytest.mark.full(only="other nodes are asked nothing where all blocks are here")
def test_other_nodes_are_asked_nothing_where_all_blocks_are_here(two: Two, tmp_path: Path) -> None:
    """Their processes would take the time of workers; these claim what they read themselves."""
    written(tmp_path / "data")
    job = asked(tmp_path, data={"cache": {}, "cpus": 1})
    with provider(job) as one:
        blocks = provided(one, job).prepared[TRAIN].index.blocks
        assert {block.nodes for block in blocks} == {(two.nodes[0],)}
    with provider(job) as one:
        ready = one._call("prepare")
        assert [*ready.handles] == [two.nodes[0]]
        assert not any(split.made_blocks for split in ready.prepared.values())
        there = RayProvider(one._config, two.nodes[1])
        assert ids_of(provided(there, job).train) == IDS
        assert there._own is not None
        assert [*there._own._uses] == [record.id for record in ready.records]
        there.close()
        assert not there._own._uses
        assert [*one._call("prepare").handles] == [two.nodes[0]]


@pytest.mark.full(only="blocks are fetched from the node that made them")
def test_blocks_are_fetched_from_the_node_that_made_them(two: Two, tmp_path: Path) -> None:
    written(tmp_path / "data")
    (tmp_path / "ran").mkdir()
    settings = {"ran": str(tmp_path / "ran"), "together": 2}  # none is done before both are at it
    job = asked(tmp_path, data={"cache": {}}, settings=settings)
    with provider(job) as one:
        one._wary = True  # the pipeline's own process, on the first node, makes none
        prepared = provided(one, job).prepared[TRAIN]
        blocks = prepared.index.blocks
        made = [{b.key for b in blocks if node in b.nodes} for node in two.nodes]
        assert all(made), "readers are on both nodes"
        assert made[0] | made[1] == {block.key for block in blocks}
        assert made[0] & made[1] == set()
        ids = []
        for node in two.nodes:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            call = read.options(scheduling_strategy=there)
            found, noticed = ray.get(
                call.remote(*sent(job), node, one._config.pipeline, two.nodes[0])
            )
            ids.append(found)
            assert noticed == set()
        assert ids == [IDS, IDS]

    def kept() -> bool:  # rows came first, and blocks behind them
        opened = (cache.open_whole(block.key) for cache in two.caches for block in blocks)
        return all(one is not None for one in opened)

    wait_for("blocks that were read are kept on both nodes", lambda: kept() or None)
    with provider(job) as one:
        again = provided(one, job).prepared[TRAIN]
        assert again.made_blocks == 0
        assert {block.nodes for block in again.index.blocks} == {
            two.nodes[:1]
        }  # nobody else is asked


@pytest.mark.full(only="files of one node are read on it")
def test_files_of_one_node_are_read_there(two: Two) -> None:
    """Training runs on both."""
    written(two.homes[0] / "data")
    job = asked(
        two.homes[0],
        2,
        steps=20,
        data={"path": "/proc/self/cwd/data", "cache": {}, "stratify": "label"},
        settings={"scale": 2.0},
    )
    run = raycloud.train(job, run_dir=two.homes[0] / "run")
    assert exact_steps(run.directory) == 20
    assert {e.rows for e in of_kind(DataPrepared, run.events)} == {240}
    assert {event.node for event in run.events if hasattr(event, "node")} >= set(two.nodes)
    assert [path.name for path in two.homes[1].iterdir()] == ["cache"]
    with provider(job) as one:
        one._wary = True  # others are to read: that not all of them can is said
        for home in two.homes:
            shutil.rmtree(home / "cache")
        assert len(ids_of(provided(one, job).train)) == 240
        (notice,) = [n for n in one.notices() if "see the data's files" in n.what]
        assert notice.detail["nodes"] == [two.nodes[0]]


@pytest.mark.full
def test_vanished_pinned_block_is_mapped_from_disk(two: Two, tmp_path: Path) -> None:
    """Its owner is dead, and the store needed the room."""
    path = written(two.homes[0] / "alone", files=1).replace(str(two.homes[0]), "/proc/self/cwd")
    job = asked(tmp_path, data={"path": path, "cache": {}}, settings={"scale": 3.0})
    with provider(job) as one:
        found = provided(one, job)
        (block,) = found.prepared[TRAIN].index.blocks
        reference = one._references()[block.key]
        killed(one)
        wait_for("the block's end", lambda: _vanished(reference))
        assert ids_of(found.train) == IDS[:60]
        told = [notice for notice in one.notices() if "block" in notice.detail]
        assert [(n.what, n.detail["block"]) for n in told] == [
            ("a pinned block was lost", block.key)
        ]


@pytest.mark.full
def test_block_of_another_node_after_the_pipelines_death(two: Two, tmp_path: Path) -> None:
    """With it ended the holders, and those of the next pipeline are asked."""
    path = written(two.homes[0] / "alone").replace(str(two.homes[0]), "/proc/self/cwd")
    job = asked(
        tmp_path, data={"path": path, "cache": {"memory_bytes": 0}}, settings={"scale": 4.0}
    )
    there = NodeAffinitySchedulingStrategy(two.nodes[1], soft=False)
    with provider(job) as one:
        name = one._config.pipeline
        call = read.options(scheduling_strategy=there)
        ids, told = ray.get(call.remote(*sent(job), two.nodes[1], name, two.nodes[0], kill=True))
    assert ids == IDS
    assert told >= {
        "a node's blocks are out of reach",
        "the data's pipeline is made again",
        "a block is made again",
    }


def _vanished(reference: Any) -> bool:
    """Fill the store, and look."""
    ray.put(np.ones(STORE_BYTES * 3 // 4, np.uint8))
    try:
        ray.get(reference, timeout=5.0)
    except (ObjectLostError, GetTimeoutError):
        return True
    return False


@pytest.mark.full(only="checkpoints that nodes keep apart are refused")
def test_checkpoints_that_nodes_keep_apart_are_refused_before_the_first_step(
    two: Two, tmp_path: Path
) -> None:
    """A path that is there on each node, and on each another place."""
    path = "/proc/self/cwd/kept"
    job = small("Steady", 2, steps=4, checkpoint={"path": path})
    says = r"checkpoint.path = '/proc/self/cwd/kept': is another place on node \d+\."
    with pytest.raises(JobError, match=says):
        raycloud.train(job, run_dir=tmp_path / "run")
    assert of_kind(StepsCommitted, events(tmp_path / "run")) == []
    assert [list((home / "kept").glob("*")) for home in two.homes] == [[], []]


@pytest.mark.full
def test_checkpoints_that_nodes_share_are_taken(two: Two, tmp_path: Path) -> None:
    job = small("Steady", 2, steps=4, checkpoint={"path": str(tmp_path / "kept")})
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert {one.node for one in of_kind(MemberReady, run.events)} == set(two.nodes)
    assert exact_steps(tmp_path / "run") == 4
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000004"]
    assert latest(open_store(tmp_path / "kept")).manifest is not None
