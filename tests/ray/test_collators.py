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
PACED = f"{TASKS}:PacedPoints"

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.full(only="collators change no bit of a run")
def test_same_parameters_to_the_bit(tmp_path: Path) -> None:
    """Augmentation is seeded by position. And a collator may die on the way."""
    written(tmp_path / "data")
    runs = []
    for collators, killed in ((0, 0), (2, 0), (2, 1)):
        gate = tmp_path / f"gate-{len(runs)}"  # until it is there, batches take their time
        job = _asked(tmp_path, 2, collators, task=PACED, settings={"gate": str(gate)})
        folder = tmp_path / f"run-{len(runs)}"
        seen: list[int] = []

        def look(
            event: Event, killed: int = killed, seen: list[int] = seen, gate: Path = gate
        ) -> None:
            if isinstance(event, Noticed) and event.what == "a collator was lost":
                gate.touch()
            if not isinstance(event, StepsCommitted):
                return
            if killed and not seen and (there := _collators()):
                seen.append(there[0])
                os.kill(there[0], signal.SIGKILL)
            if not killed and event.last_step >= 20:
                gate.touch()

        run = raycloud.train(job, run_dir=folder, observer=look)
        assert exact_steps(run.directory) == 100
        lost = [n for n in of_kind(Noticed, run.events) if n.what == "a collator was lost"]
        assert bool(lost) == bool(killed)
        wait_for("the collators to end", lambda: not _collators())
        runs.append(parameters(run.directory))
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in runs[0])


@pytest.mark.full(only="collators leave the workers their CPUs")
def test_collators_start_only_where_there_is_room(tmp_path: Path) -> None:
    written(tmp_path / "data")
    run = raycloud.train(_asked(tmp_path, 3, 2, steps=5), run_dir=tmp_path / "run")
    (notice,) = [n for n in of_kind(Noticed, run.events) if "collators" in n.what]
    assert notice.detail == {"asked": 2, "started": 1}
    wait_for("all CPUs free", lambda: ray.available_resources().get("CPU") == CPUS)


@pytest.mark.full(only="roles are measured and chosen, and change no bit of a run")
def test_roles_are_chosen_by_what_is_measured(tmp_path: Path) -> None:
    """On one node with room for four nobody has to make way, and batches cost next to nothing."""
    written(tmp_path / "data")
    job = _asked(tmp_path, 2, "auto", steps=10)
    run = raycloud.train(job, run_dir=tmp_path / "run")
    assert exact_steps(run.directory) == 10
    (told,) = [n for n in of_kind(Noticed, run.events) if n.what == "roles of nodes were chosen"]
    assert told.detail["workers"] == 2
    assert "a step takes" in str(told.detail["why"])
    plain = raycloud.train(_asked(tmp_path, 2, 0, steps=10), run_dir=tmp_path / "plain")
    found, expected = parameters(run.directory), parameters(plain.directory)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _asked(folder: Path, workers: int, collators: int | str, **changes: Any) -> Any:
    shares = {1: [8], 2: [5, 3], 3: [3, 3, 2]}[workers]
    elastic = {"min_workers": workers, "max_workers": workers, "shares": shares}
    values: dict[str, Any] = {"steps": 100, "elastic": elastic, "data": {"collators": collators}}
    return asked(folder, workers, **(values | changes))


def _collators() -> list[int]:
    """Process ids of the collators of this module's Ray."""
    below = processes_below(Path(os.environ["RAY_TMPDIR"]))
    return sorted(pid for pid, line in below.items() if line.startswith("ray::CollatorActor"))
