"""Ray's autoscaler is asked for machines that a run wants: one of its own, with fake nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import raycloud
from raycloud.events import Event, GenerationFormed, Noticed
from raycloud.report.runs import ask_driver
from tests.heads import PATIENCE, RAY, START_S, free_ports
from tests.live import asked, check_result, command, of_kind, processes_below, wait_for
from tests.live_tasks import Steady

STEPS = 200
NODE = {"CPU": 1, "object_store_memory": 100_000_000}
LISTS = (  # of what the fake provider needs none of, and Ray's autoscaler looks for
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "rsync_exclude",
    "rsync_filter",
)
HEAD = "ray.head.default"  # as the fake provider names it

pytestmark = pytest.mark.full  # a head, a node and a run: half a minute


@pytest.fixture(scope="module")
def autoscaled(ray_tmpdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head with one CPU, and an autoscaler that may add one node with another; its address.

    Ray's own `AutoscalingCluster` ends every Ray of this machine first.
    """
    import ray
    from ray._private.authentication.authentication_utils import get_authentication_mode_name
    from ray._raylet import get_authentication_mode

    folder = tmp_path_factory.mktemp("autoscaled")
    [port] = free_ports(1)
    config = {
        "cluster_name": "fake",
        "max_workers": 1,
        "idle_timeout_minutes": 5,
        "upscaling_speed": 1.0,
        "provider": {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}"},
        "head_node_type": HEAD,
        "available_node_types": {
            HEAD: {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "more": {"resources": NODE, "node_config": {}, "min_workers": 0, "max_workers": 1},
        },
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in LISTS},
    }
    (folder / "autoscaler.json").write_text(json.dumps(config))
    words = (
        RAY, "start", "--head", "--block", "--num-cpus=1", f"--port={port}",
        "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000",
        f"--autoscaling-config={folder / 'autoscaler.json'}",
    )  # fmt: skip
    # This process reads its mode once, maybe for a module before; the token is inherited.
    mode = get_authentication_mode_name(get_authentication_mode())
    variables = PATIENCE | {
        "RAY_TMPDIR": str(ray_tmpdir),
        "RAY_AUTH_MODE": mode,
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    with command(folder / "head", *words, **variables) as one:
        found = wait_for(
            "the head",
            lambda: one.ended() or re.search(r"--address='([\d.]+:\d+)'", one.out),
            seconds=START_S,
        )
        assert found is not True, one.err
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RAY_AUTH_MODE", mode)
                ray.init(found[1], log_to_driver=False, logging_level="ERROR")
                yield found[1]
                ray.shutdown()
        finally:
            one.process.terminate()
            one.code()
            for pid in processes_below(ray_tmpdir):  # the node that the autoscaler has started
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def wanted(address: str) -> int:
    """How many workers' places Ray's autoscaler is asked for, and has not found."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    demands = get_cluster_status(address).resource_demands.placement_group_demand
    return sum(one.count for demand in demands for one in demand.bundles_by_count)


def test_the_run_grows_by_a_node_that_was_asked_for_and_asks_no_more_than_it_may(
    autoscaled: str, tmp_path: Path
) -> None:
    """Two workers more are wanted, and one more node can come: the other one is waited for."""
    gate, run_dir, told = tmp_path / "gate", tmp_path / "run", list[str]()
    grown = threading.Event()

    def observe(event: Event) -> None:
        if isinstance(event, GenerationFormed) and len(event.members) == 2:
            grown.set()

    def watch() -> None:
        wait_for("a demand", lambda: wanted(autoscaled) == 2)
        told.append("two more are asked for")
        assert grown.wait(90.0)
        wait_for("less of a demand", lambda: wanted(autoscaled) == 1)
        told.append("one has come")
        ask_driver(run_dir, "1:2")
        wait_for("no demand", lambda: wanted(autoscaled) == 0)
        told.append("no more are asked for")
        gate.touch()

    job = asked(
        "Paced",
        3,
        steps=STEPS,
        elastic={"min_workers": 1, "max_workers": 3, "autoscale": True},
        settings={"gate": str(gate)},
    )
    watching = threading.Thread(target=partial(_open_in_the_end, watch, gate))
    watching.start()
    run = raycloud.train(job, run_dir=run_dir, observer=observe)
    watching.join()
    check_result(run, job, Steady(), STEPS)
    assert told == ["two more are asked for", "one has come", "no more are asked for"]
    [asks] = [e for e in of_kind(Noticed, run.events) if "autoscaler" in e.what]
    assert asks.what == "Ray's autoscaler is asked for room for 3 workers"
    assert asks.detail == {"machines_hold": 1}
    assert max(len(e.members) for e in of_kind(GenerationFormed, run.events)) == 2


def test_what_a_run_asked_for_is_withdrawn_at_its_end(autoscaled: str, tmp_path: Path) -> None:
    """By now there are two nodes; a third worker would need another one, which never comes."""
    gate, seen = tmp_path / "gate", list[int]()

    def watch() -> None:
        wait_for("a demand", lambda: wanted(autoscaled))
        seen.append(wanted(autoscaled))
        gate.touch()

    job = asked(
        "Paced",
        3,
        steps=20,
        elastic={"min_workers": 1, "max_workers": 3, "autoscale": True},
        settings={"gate": str(gate)},
    )
    watching = threading.Thread(target=partial(_open_in_the_end, watch, gate))
    watching.start()
    raycloud.train(job, run_dir=tmp_path / "run")
    watching.join()
    assert seen == [1]
    wait_for("no demand", lambda: wanted(autoscaled) == 0)


def _open_in_the_end(watch: Callable[[], None], gate: Path) -> None:
    try:
        watch()
    finally:
        gate.touch()
