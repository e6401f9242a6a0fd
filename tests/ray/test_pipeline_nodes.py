"""Two nodes with a cache each: what one has made, the other fetches, once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raycloud
from raycloud.data.cache import BlockCache
from raycloud.data.provide import TRAIN
from raycloud.events import DataPrepared, Noticed
from tests.live import exact_steps, of_kind
from tests.live_data import asked, here, ids_of, provided, provider, written

IDS = list(range(240))


@dataclass(frozen=True)
class Two:
    """The nodes, the head first, and where each keeps its blocks."""

    nodes: tuple[str, str]
    caches: tuple[BlockCache, BlockCache]
    homes: tuple[Path, Path]


@pytest.fixture(scope="module")
def two(ray_tmpdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Nodes on this machine; the working directory of their processes tells them apart."""
    from ray.cluster_utils import Cluster

    from raycloud.on_ray.cluster import _EMBEDDED, _QUIET

    homes = (tmp_path_factory.mktemp("head"), tmp_path_factory.mktemp("other"))
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (_QUIET | _EMBEDDED).items():
            patch.setenv(name, value)
        for home in homes:
            patch.chdir(home)
            cluster.add_node(
                num_cpus=1,
                include_dashboard=False,
                env_vars={"RAYCLOUD_CACHE": str(home / "cache")},
            )
        patch.chdir(homes[0])
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            head = here()
            (other,) = {node["NodeID"] for node in ray.nodes()} - {head}
            caches = tuple(BlockCache(home / "cache") for home in homes)
            yield Two((head, other), caches, homes)  # type: ignore[arg-type]
        finally:
            ray.shutdown()
            cluster.shutdown()


@ray.remote(num_cpus=0)
def read(job: Any, node: str, name: str, home: str) -> tuple[list[int], list[str]]:
    """What a member there sees: the ids of all rows, and what its provider noticed."""
    from raycloud.on_ray.provider import RayProvider
    from raycloud.training.member import MemberConfig

    config = MemberConfig(
        member=1,
        node=node,
        address="",
        job=job,
        task=None,  # type: ignore[arg-type]  # the pipeline is there already
        checkpoints="",
        pipeline=name,
        home=home,
    )
    one = RayProvider(config, node)
    return ids_of(provided(one, job).train), [notice.what for notice in one.notices()]


def test_blocks_are_fetched_from_the_node_that_made_them(two: Two, tmp_path: Path) -> None:
    written(tmp_path / "data")
    job = asked(tmp_path, data={"cache": {}})
    with provider(job) as one:
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
            found, noticed = ray.get(call.remote(job, node, one._config.pipeline, two.nodes[0]))
            ids.append(found)
            assert noticed == []
        assert ids == [IDS, IDS]
    for node_cache in two.caches:
        assert all(node_cache.whole(block.key) is not None for block in blocks)
    with provider(job) as one:
        again = provided(one, job).prepared[TRAIN]
        assert again.made_blocks == 0
        assert {block.nodes for block in again.index.blocks} == {two.nodes}


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
    (notice,) = [n for n in of_kind(Noticed, run.events) if "see the data's files" in n.what]
    assert notice.detail["nodes"] == [two.nodes[0]]
    assert {event.node for event in run.events if hasattr(event, "node")} >= set(two.nodes)
    assert [path.name for path in two.homes[1].iterdir()] == ["cache"]
