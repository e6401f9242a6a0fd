"""Batches made in other processes: the same ones, and a member's own where those processes die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import raycloud
from raycloud.events import Event, Noticed, StepsCommitted
from tests.live import exact_steps, of_kind, parameters, processes_below, wait_for
from tests.live_data import TASKS, asked, written

CPUS = 4
WORKERS, STEPS = 3, 100
PACED = f"{TASKS}:PacedPoints"

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the data is, and its cache."""
    folder = tmp_path_factory.mktemp("points")
    written(folder / "data")
    return folder


@pytest.fixture(scope="module")
def plain(cluster: str, points: Path) -> dict[str, torch.Tensor]:
    """What a run has whose workers make their batches themselves."""
    run = raycloud.train(_asked(points, 0), run_dir=points / "plain")
    return parameters(run.directory)


@pytest.mark.full(only="collators change no bit of a run, and leave the workers their CPUs")
def test_same_parameters_to_the_bit(
    tmp_path: Path, points: Path, plain: dict[str, torch.Tensor]
) -> None:
    """Augmentation is seeded by position. There is room for one of them, and it dies on the way."""
    gate = tmp_path / "gate"  # until it is there, batches take their time
    killed: list[int] = []

    def look(event: Event) -> None:
        if isinstance(event, Noticed) and event.what == "a collator was lost":
            gate.touch()
        late = isinstance(event, StepsCommitted) and event.last_step >= STEPS // 2
        if late and not killed and (there := _collators()):
            killed.append(there[0])
            os.kill(there[0], signal.SIGKILL)

    job = _asked(points, 2, task=PACED, settings={"gate": str(gate), "pause_s": 0.05})
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=look)
    assert exact_steps(run.directory) == STEPS
    assert killed
    told = of_kind(Noticed, run.events)
    assert [one for one in told if one.what == "a collator was lost"]
    assert {"asked": 2, "started": 1} in [one.detail for one in told if "collators" in one.what]
    found = parameters(run.directory)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    wait_for("the collators to end", lambda: not _collators())
    wait_for("all CPUs free", lambda: ray.available_resources().get("CPU") == CPUS)


@pytest.mark.full(only="roles are measured and chosen, and change no bit of a run")
def test_roles_are_chosen_by_what_is_measured(
    tmp_path: Path, points: Path, plain: dict[str, torch.Tensor]
) -> None:
    """On one node with room for four nobody has to make way, and batches cost next to nothing."""
    run = raycloud.train(_asked(points, "auto"), run_dir=tmp_path / "run")
    assert exact_steps(run.directory) == STEPS
    (told,) = [n for n in of_kind(Noticed, run.events) if n.what == "roles of nodes were chosen"]
    assert told.detail["workers"] == WORKERS
    assert "a step takes" in str(told.detail["why"])
    found = parameters(run.directory)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def _asked(folder: Path, collators: int | str, **changes: Any) -> Any:
    elastic = {"min_workers": WORKERS, "max_workers": WORKERS, "shares": [3, 3, 2]}
    values: dict[str, Any] = {"steps": STEPS, "elastic": elastic, "data": {"collators": collators}}
    return asked(folder, WORKERS, **(values | changes))


def _collators() -> list[int]:
    """Process ids of the collators of this module's Ray."""
    below = processes_below(Path(os.environ["RAY_TMPDIR"]))
    return sorted(pid for pid, line in below.items() if line.startswith("ray::CollatorActor"))
