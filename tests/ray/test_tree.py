"""A tree on a real cluster of three nodes in two zones: the driver tells members where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import raycloud
from raycloud.events import Recovered
from raycloud.net.tree import tree_reduction_bytes
from raycloud.net.zones import Zones
from raycloud.planner.inventory import ZONE_LABEL
from raycloud.sync.buckets import lay_out
from raycloud.sync.codecs import CODECS
from tests.live import apart, asked, exact_steps, of_kind
from tests.live_tasks import Steady
from tests.lockstep import plain_loop
from tests.ray.test_regroup import Trouble, kill

BUCKET_BYTES = 1024
SYNC = {"topology": "tree", "codec": "int4", "bucket_bytes": BUCKET_BYTES}
NEAR = 0.3


@pytest.fixture(scope="module", autouse=True)
def _nodes(ray_tmpdir: Path) -> Iterator[None]:
    """Three nodes for a worker each, in two zones."""
    from ray.cluster_utils import Cluster

    from raycloud.on_ray.attach import _EMBEDDED, _QUIET

    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (_QUIET | _EMBEDDED).items():
            patch.setenv(name, value)
        for zone in "aba":
            cluster.add_node(num_cpus=1, include_dashboard=False, labels={ZONE_LABEL: zone})
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_members_add_up_in_their_zones(tmp_path: Path) -> None:
    job = asked("Steady", 3, steps=20, sync=SYNC, settings={"double": False})
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert run.status == "finished"
    assert apart(run.directory, plain_loop(job, Steady(double=False), 20)) <= NEAR
    named = [*Steady(double=False).model().named_parameters()]
    counts = [bucket.flat.numel() for bucket in lay_out(named, BUCKET_BYTES)]
    zones, codec = Zones.of("aab"), CODECS["int4"]
    gradients = sum(
        sum(tree_reduction_bytes(count, rank, zones, codec))
        for rank in range(3)
        for count in counts
    )
    flags = 3 * 2 * 4 * (4 + len(named))
    assert run.summary["bytes_sent"] == 20 * (gradients + flags)


@pytest.mark.full
def test_a_killed_worker_is_not_missed(tmp_path: Path, ray_tmpdir: Path) -> None:
    elastic = {"min_workers": 1, "max_workers": 3}
    settings = {"double": False}
    job = asked("Steady", 3, steps=300, sync=SYNC, settings=settings, elastic=elastic)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=Trouble(ray_tmpdir, [60], kill))
    assert run.status == "finished"
    assert exact_steps(run.directory) == 300
    assert apart(run.directory, plain_loop(job, Steady(double=False), 300)) <= NEAR
    assert len(of_kind(Recovered, run.events)) == 1
