"""Members that exchange by NCCL, and share one GPU for want of several: exact, whatever they lose.

NCCL takes each for one on a machine of its own, so that messages go through sockets: what is shown
is how groups form and break, not how fast they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raycloud
from raycloud.errors import PlacementError
from raycloud.events import MemberLost
from tests.live import apart, asked, check_result, events, exact_steps, of_kind
from tests.live_tasks import Steady
from tests.lockstep import plain_loop

STEPS = 16
WORKERS = 3
NEAR = 0.1
SETTINGS: dict[str, Any] = {"dropout": 0.0, "branch": False}

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray that hands out one GPU several times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        ray.init(num_cpus=4, num_gpus=WORKERS, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def wanted(task: str, least: int, settings: dict[str, Any], **more: Any) -> raycloud.Job:
    return asked(
        task,
        steps=STEPS,
        fuse=1,
        settings=settings,
        elastic={"min_workers": least, "max_workers": WORKERS, "shares": "equal"},
        resources={"worker": {"gpus": 1}},
        checkpoint={"every_steps": 4},
        **more,
    )


@pytest.mark.parametrize(
    ("how", "least"), [("", WORKERS), ("kill", WORKERS), ("assert", WORKERS), ("freeze", 2)]
)
def test_members_compute_what_one_does(how: str, least: int, tmp_path: Path) -> None:
    """One that is killed is replaced; without one that is frozen the others go on."""
    settings = SETTINGS | {"how": how, "first": str(tmp_path / "claimed")}
    job, run_dir = wanted("SharesGpu", least, settings), tmp_path / "run"
    raycloud.train(job, run_dir=run_dir)
    check_result(run_dir, job, Steady(**SETTINGS), STEPS)
    assert len(of_kind(MemberLost, events(run_dir))) == bool(how)


@pytest.mark.parametrize("how", ["", "kill"])
def test_gradients_travel_through_a_codec(how: str, tmp_path: Path) -> None:
    """Encoded on the GPU, and sent over sockets of our own: NCCL has no part in it."""
    settings = SETTINGS | {"double": False}
    told = settings | {"how": how, "first": str(tmp_path / "claimed")}
    job = wanted("SharesGpu", WORKERS, told, sync={"codec": "int4", "bucket_bytes": 1024})
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert exact_steps(run.directory) == STEPS
    assert apart(run.directory, plain_loop(job, Steady(**settings), STEPS)) <= NEAR
    assert len(of_kind(MemberLost, run.events)) == bool(how)
    assert run.summary["bytes_sent"] < run.summary["bytes_dense"] / 3


def test_two_members_on_one_gpu_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="two workers have the same GPU") as refused:
        raycloud.train(wanted("Steady", 2, SETTINGS), run_dir=tmp_path)
    assert "NOSET_CUDA_VISIBLE_DEVICES" in refused.value.hint
