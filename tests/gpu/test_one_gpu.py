"""What one GPU computes is what the CPU does, through splits, losses, resumes and dead processes.

Collected only where torch sees a GPU: see `tests/conftest.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

import raycloud
from raycloud.checkpoint import load, open_store
from raycloud.checkpoint.payload import load_tensors
from raycloud.errors import TaskError
from raycloud.events import MemberLost
from raycloud.report.log import read_events
from raycloud.step.state import ModelState
from tests import lockstep
from tests.live import TASKS
from tests.lockstep import Fleet, NetTask, difference, job, plain_loop

STEPS = 12
SHARES = ((8,), (5, 3), (3, 3, 2))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "CPU", torch.device("cuda", 0))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shares", SHARES)
def test_any_shares_give_the_result_of_a_plain_loop(shares: tuple[int, ...], norm: bool) -> None:
    task = NetTask(norm=norm, dropout=0.0)
    fleet = Fleet(job(), task, shares)
    for number in range(50):
        fleet.step(number)
    plain = plain_loop(job(), task, 50)
    assert max(difference(one.model.cpu(), plain) for one in fleet.replicas) <= 1e-9


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("during", ["lane", "gradients", "after"])
def test_a_member_that_is_lost_changes_nothing(during: str) -> None:
    task = NetTask(dropout=0.0)
    fleet = Fleet(job(), task, (3, 3, 2))
    for number in range(20):
        if number == 7:
            fleet.lose(1, number, during=during)
        else:
            fleet.step(number)
    plain = plain_loop(job(), task, 20)
    assert max(difference(one.model.cpu(), plain) for one in fleet.replicas) <= 1e-9


class Norms(NetTask):
    """Several batch normalisations, one after the other."""

    def __init__(self, norms: int) -> None:
        super().__init__(dropout=0.0, double=False)
        self.norms = norms

    def model(self) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(self.norms)]
        return nn.Sequential(*layers, nn.Linear(6, 3))


def waits(norms: int, micro_batch: int) -> int:
    """How often the host waits for the GPU in a step."""
    fleet = Fleet(job(micro_batch=micro_batch), Norms(norms), (16 // micro_batch,))
    for number in range(3):
        fleet.step(number)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            fleet.step(3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in found)


@pytest.mark.usefixtures("on_gpu")
def test_the_host_waits_for_the_gpu_as_often_in_each_step() -> None:
    """For what arrived and the loss; and where there are averages, for how often they were made."""
    assert waits(0, 2) == waits(0, 4) == 2
    assert waits(1, 2) == waits(6, 2) == waits(6, 4) == 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def trained(folder: Path, *starts: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state after the last step of a run on the GPU, which is started so often."""
    base: dict[str, Any] = {
        "task": f"{TASKS}:Steady",
        "steps": STEPS,
        "checkpoint": {"every_steps": 1, "keep": 100},
        "elastic": {"min_workers": 1, "max_workers": 1},
        "resources": {"worker": {"gpus": 1}},
    }
    for at, changes in enumerate(starts):
        raycloud.train(job(**base | dict(changes)), run_dir=folder, resume=at > 0)
    store = open_store(str(folder / "checkpoints"))
    return dict(load_tensors(store, load(store, STEPS)))


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two states."""
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one)


def dies(how: str, folder: Path) -> dict[str, Any]:
    return {
        "task": f"{TASKS}:DiesOnGpu",
        "settings": {"how": how, "first": str(folder / "claimed")},
    }


@pytest.mark.usefixtures("cluster")
def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", {})
    resumed = trained(tmp_path / "resumed", {"steps": 7}, {})
    assert apart(plain, resumed) == 0.0


@pytest.mark.usefixtures("cluster")
def test_the_gpu_computes_what_the_cpu_does(tmp_path: Path) -> None:
    exact = {"settings": {"dropout": 0.0}}
    cpu = trained(tmp_path / "cpu", exact | {"resources": {"worker": {"gpus": 0}}})
    assert apart(cpu, trained(tmp_path / "gpu", exact)) <= 1e-9


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("how", ["kill", "assert"])
def test_a_process_that_dies_on_the_gpu_is_replaced(how: str, tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", {})
    assert apart(plain, trained(tmp_path / "dies", dies(how, tmp_path))) == 0.0
    log = read_events(tmp_path / "dies" / "events.jsonl")
    assert [event for _, event in log if isinstance(event, MemberLost)]


@pytest.mark.usefixtures("cluster")
def test_too_little_memory_is_told(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="CUDA out of memory"):
        trained(tmp_path / "memory", dies("memory", tmp_path))


@pytest.mark.usefixtures("cluster")
def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    single = {"settings": {"double": False, "dropout": 0.0}}
    bf16 = trained(tmp_path / "bf16", single | {"precision": "bf16"})
    assert 0 < apart(bf16, trained(tmp_path / "fp32", single)) < 1e-2


@pytest.mark.parametrize("how", ["fused", "capturable", "foreach"])
def test_moments_are_put_where_the_optimizer_looks_for_them(how: str) -> None:
    """A member that takes them has made no step yet."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, ModelState]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), **{how: True})
        return model, optimizer, ModelState(model, optimizer, None)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one, its_optimizer, state = made()
    other, other_optimizer, taken = made()
    step(one, its_optimizer)
    other.load_state_dict(one.state_dict())
    taken.put_moments({name: t.cpu() for name, t in state.moments().items()})
    step(one, its_optimizer)
    step(other, other_optimizer)
    assert difference(one, other) == 0.0
