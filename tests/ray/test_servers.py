"""Rows of tables on server actors: the single-process result, whoever is killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raycloud
from raycloud.checkpoint import open_store
from raycloud.errors import TaskError
from raycloud.events import (
    CheckpointPublished,
    Event,
    ExchangeBroken,
    MemberReady,
    Recovered,
    StepsCommitted,
)
from raycloud.spec import Job
from raycloud.spec.load import with_values
from raycloud.sync.tables import TableSpec, initial
from tests.live import Moved, asked, events, exact_steps, of_kind, parameters, processes_below
from tests.looked import IDS, TABLE, reference

CPUS = 4
LOOKED = Path(__file__).parents[1] / "looked.py"
STEPS = 50

pytestmark = pytest.mark.usefixtures("cluster")


def looked(workers: int | list[int], servers: Any, **changes: Any) -> Job:
    made = asked("Looked", workers, servers=servers, **{"steps": STEPS, **changes})
    return with_values(made, {"task": f"{LOOKED}:Looked"})


def rows_of(run: Path, job: Job, shards: int) -> np.ndarray:
    """The table in the run's checkpoint of its last step; ids without a row as they begin."""
    store = open_store(str(run / "checkpoints"))
    names = [name for name in store.names(f"step-{STEPS:08d}") if "/tables-" in name]
    assert len(names) == shards
    found: dict[int, np.ndarray] = {}
    for name in names:
        with np.load(run / "checkpoints" / name) as file:
            ids, rows = file[f"{TABLE}/ids"], file[f"{TABLE}/rows"]
        found |= dict(zip(ids.tolist(), rows, strict=True))
    spec = TableSpec(name=TABLE, width=6, seed=0, dtype="float64")
    return np.stack([found.get(int(one), initial(spec, np.array([one]))[0]) for one in IDS])


def check(run: Path, job: Job, shards: int | None = None, **settings: Any) -> None:
    assert exact_steps(run) == STEPS
    state, table = reference(job, STEPS, **settings)
    own = parameters(run)
    assert own.keys() == state.keys()
    assert max(float((own[name] - state[name]).abs().max()) for name in state) <= 1e-9
    rows = rows_of(run, job, job.servers.shards if shards is None else shards)
    known = (np.abs(rows - table.numpy()).max(1) <= 1e-9).sum()
    named = (table != reference(job, 0, **settings)[1]).any(1).sum()
    assert known == int(named) >= 15  # those that no step has named begin otherwise here


class Once:
    """Does something once, at the first event of a kind."""

    def __init__(self, kind: type[Event], what: Callable[[], object]) -> None:
        self.kind, self.what, self.done = kind, what, False

    def __call__(self, event: Event) -> None:
        if isinstance(event, self.kind) and not self.done:
            self.done = True
            self.what()


def kill_server(folder: Path) -> None:
    found = [pid for pid, line in processes_below(folder).items() if "ServerActor" in line]
    os.kill(found[0], signal.SIGKILL)


def test_the_single_process_result(tmp_path: Path) -> None:
    one = looked([5, 2, 1], 2)
    run = raycloud.train(one, run_dir=tmp_path / "run")
    assert run.status == "finished"
    check(run.directory, one)


def test_a_killed_worker_counts_once(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    one = looked(2, 2, settings={"gate": str(gate), "free": 120})

    def kill() -> None:
        os.kill(of_kind(MemberReady, events(tmp_path / "run"))[1].pid, signal.SIGKILL)
        gate.touch()

    run = raycloud.train(one, run_dir=tmp_path / "run", observer=Once(StepsCommitted, kill))
    check(run.directory, one)


def test_a_killed_server_sends_all_back_to_a_checkpoint(tmp_path: Path, ray_tmpdir: Path) -> None:
    gate = tmp_path / "gate"
    settings = {"gate": str(gate), "free": 160}
    one = looked(2, 2, settings=settings, checkpoint={"every_steps": 10})

    def kill() -> None:
        kill_server(ray_tmpdir)
        gate.touch()

    run = raycloud.train(one, run_dir=tmp_path / "run", observer=Once(CheckpointPublished, kill))
    check(run.directory, one)


def test_with_a_copy_the_loss_of_a_server_costs_no_step(tmp_path: Path, ray_tmpdir: Path) -> None:
    gate = tmp_path / "gate"
    servers = {"shards": 2, "copies": 1}
    one = looked(2, servers, settings={"gate": str(gate), "free": 100})

    def kill() -> None:
        kill_server(ray_tmpdir)
        gate.touch()

    run = raycloud.train(one, run_dir=tmp_path / "run", observer=Once(StepsCommitted, kill))
    check(run.directory, one)
    recovered = of_kind(Recovered, run.events)
    assert {event.lost_steps for event in recovered} == {0}


@pytest.mark.full
def test_a_server_that_is_lost_before_any_checkpoint(tmp_path: Path, ray_tmpdir: Path) -> None:
    gate = tmp_path / "gate"
    one = looked(2, 1, settings={"gate": str(gate), "free": 100})

    def kill() -> None:
        kill_server(ray_tmpdir)
        gate.touch()

    run = raycloud.train(one, run_dir=tmp_path / "run", observer=Once(StepsCommitted, kill))
    check(run.directory, one)


def test_another_number_of_servers_while_it_trains(tmp_path: Path) -> None:
    """Two, three, one: nothing is lost or counted twice, and no step is computed again."""
    gate = tmp_path / "gate"
    one = looked(2, 2, settings={"until": str(gate)})
    one = with_values(one, {"task": f"{LOOKED}:Slow"})
    moved = Moved(gate, 3, 1)
    run = raycloud.train(one, run_dir=tmp_path / "run", stop=moved.handle, observer=moved)
    assert gate.exists()
    check(run.directory, one, shards=1)
    assert not of_kind(ExchangeBroken, run.events)  # nobody has to meet for it


def test_tables_without_servers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="has no servers"):
        raycloud.train(looked(1, 0), run_dir=tmp_path / "run")
