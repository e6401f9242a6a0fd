"""Servers that sum gradients in lockstep: deaths of workers and servers, and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raycloud
from raycloud.events import ExchangeBroken, MemberLost, Recovered
from tests.live import Moved, apart, asked, exact_steps, of_kind
from tests.live_tasks import Broad
from tests.lockstep import plain_loop
from tests.ray.test_asynchronous import kill_server
from tests.ray.test_regroup import Trouble, kill
from tests.tiers import variants

CPUS = 4
NEAR = 0.3

pytestmark = pytest.mark.usefixtures("warm")


def served(workers: int | list[int], steps: int, codec: str, **more: Any) -> raycloud.Job:
    sync = {"topology": "servers", "codec": codec, "bucket_bytes": 1024}
    settings = {"double": codec == "none", **more.pop("settings", {})}
    return asked("Broad", workers, steps=steps, sync=sync, servers=2, settings=settings, **more)


def check(run: raycloud.Run, job: raycloud.Job, steps: int, codec: str) -> None:
    assert run.status == "finished"
    assert exact_steps(run.directory) == steps
    reference = plain_loop(job, Broad(double=codec == "none"), steps)
    assert apart(run.directory, reference) <= (1e-9 if codec == "none" else NEAR)


def test_a_killed_worker_counts_once(tmp_path: Path, ray_tmpdir: Path) -> None:
    elastic = {"min_workers": 1, "max_workers": 3}
    job = served(3, 120, "none", elastic=elastic, checkpoint={"every_steps": 50})
    trouble = Trouble(ray_tmpdir, [40], kill)
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    check(run, job, 120, "none")
    [lost], [told, *_] = of_kind(MemberLost, run.events), of_kind(Recovered, run.events)
    assert (told.lost, told.lost_steps) == ((lost.member,), 0)


def test_a_killed_server_costs_no_step(tmp_path: Path, ray_tmpdir: Path) -> None:
    """The others sum meanwhile, and it is taken back once it is started again."""
    gate = tmp_path / "gate"
    job = served([5, 3], 600, "int4", settings={"gate": str(gate), "pause_s": 0.05})

    class Killed(Trouble):
        """It ends its pauses when a server has come back."""

        broke = 0

        def __call__(self, event: Any) -> None:
            super().__call__(event)
            self.broke += isinstance(event, Recovered)
            if self.broke > 1:
                gate.touch()

    killed = Killed(ray_tmpdir, [20], lambda *_: kill_server(ray_tmpdir))
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=killed)
    check(run, job, 600, "int4")
    assert not of_kind(MemberLost, run.events)
    assert any(event.server for event in of_kind(ExchangeBroken, run.events))
    assert gate.exists()
    first, *_ = of_kind(Recovered, run.events)
    assert first.lost_steps == 0
    assert first.resumed_s - first.detected_s < 2.0  # a server takes longer to be started


@pytest.mark.parametrize("staleness", variants(0, 2))
def test_another_number_of_servers_while_it_trains(staleness: int, tmp_path: Path) -> None:
    """Two, three, one: each generation cuts parameters as there are servers."""
    gate = tmp_path / "gate"
    settings = {"gate": str(gate), "pause_s": 0.05, "double": not staleness}
    sync = {"topology": "servers", "staleness": staleness, "bucket_bytes": 1024}
    job = asked("Broad", [5, 3], steps=400, sync=sync, servers=2, settings=settings)
    moved = Moved(gate, 3, 1)
    run = raycloud.train(job, run_dir=tmp_path / "run", stop=moved.handle, observer=moved)
    assert gate.exists()
    assert exact_steps(run.directory) == 400
    reference = plain_loop(job, Broad(double=not staleness), 400)
    assert apart(run.directory, reference) <= (0.8 if staleness else 1e-9)
    assert {event.lost_steps for event in of_kind(Recovered, run.events)} == {0}
