"""Workers die, freeze, are cut off and join while a run goes on; its result is the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import raycloud
from raycloud.control import ControlSettings
from raycloud.events import (
    CheckpointPublished,
    Event,
    ExchangeBroken,
    GenerationFormed,
    MemberLost,
    MemberReady,
    MemberReturned,
    Noticed,
    Recovered,
    StepsCommitted,
)
from raycloud.spec import Job
from tests.connections import between, hang, shut
from tests.live import asked, check_result, members_below, of_kind
from tests.live_tasks import Steady

CPUS = 4
END_S = 60.0

pytestmark = pytest.mark.usefixtures("warm")


class Trouble:
    """Does something to a worker, another one each time, when the run has come to a step.

    Args:
        folder: What the cluster's processes carry in their environment.
        steps: At each of them.
        what: Done to the process id.
    """

    def __init__(self, folder: Path, steps: list[int], what: Callable[[int], None]) -> None:
        self.folder, self.steps, self.what = folder, list(steps), what
        self.hit: list[int] = []
        self.ready: set[int] = set()  # process ids; others are of no run at the moment

    def __call__(self, event: Event) -> None:
        if isinstance(event, MemberReady):
            self.ready.add(event.pid)
        if isinstance(event, StepsCommitted) and self.steps and event.last_step >= self.steps[0]:
            self.steps.pop(0)
            alive = sorted(self.ready.intersection(members_below(self.folder)).difference(self.hit))
            victim = alive[len(self.hit) % len(alive)]
            self.what(victim)
            self.hit.append(victim)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def threads(pid: int, name: str) -> int:
    """How many threads of a process have this name."""
    found = 0
    for task in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += task.read_text().strip() == name
    return found


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


class Opening:
    """Lets a paced run go as fast as it can once a member of at least this number has computed.

    Args:
        gate: What the task looks for.
        member: Its number.
        other: Told of every event, too.
    """

    def __init__(self, gate: Path, member: int, other: Callable[[Event], None]) -> None:
        self.gate, self.member, self.other = gate, member, other

    def __call__(self, event: Event) -> None:
        self.other(event)
        computed = isinstance(event, StepsCommitted) and event.micro_batches > 0
        if computed and event.member >= self.member:
            self.gate.touch()


def job_of(workers: int, least: int, steps: int, **more: object) -> Job:
    elastic = {"min_workers": least, "max_workers": workers}
    return asked("Steady", workers, steps=steps, elastic=elastic, **more)


def test_a_killed_worker_is_not_missed(tmp_path: Path, ray_tmpdir: Path) -> None:
    job = job_of(3, 1, 400, checkpoint={"every_steps": 50})
    trouble = Trouble(ray_tmpdir, [60], kill)
    loops: dict[int, int] = {}  # of gloo, by process: the fewest

    def watching(event: Event) -> None:
        trouble(event)
        if isinstance(event, StepsCommitted) and 100 < event.last_step < 400:
            for pid in trouble.ready.intersection(members_below(ray_tmpdir)):
                loops[pid] = min(loops.get(pid, 99), threads(pid, "gloo_tcp_loop"))

    run = raycloud.train(job, run_dir=tmp_path / "run", observer=watching)
    assert len(trouble.hit) == 1
    assert len(loops) >= 2
    assert max(loops.values()) <= 1  # those of the generation before are gone, and of runs before
    assert run.status == "finished"
    check_result(run, job, Steady(), 400)
    log = run.events
    [lost], [told] = of_kind(MemberLost, log), of_kind(Recovered, log)
    assert (told.lost, told.lost_steps) == ((lost.member,), 0)
    first, last = of_kind(GenerationFormed, log)[0], of_kind(GenerationFormed, log)[-1]
    assert set(first.members) - set(last.members) == {lost.member}
    assert sum(last.shares) == 8
    assert of_kind(CheckpointPublished, log)[-1].step == 400
    [recovery] = run.summary["recoveries"]
    assert recovery["kind"] == "member lost"
    assert recovery["seconds"] == told.resumed_s - told.detected_s
    for member in last.members:  # no step was computed twice, none left out
        steps = [e for e in of_kind(StepsCommitted, log) if e.member == member]
        begun = steps[0].first_step if member not in first.members else 0
        assert sum(e.last_step - e.first_step for e in steps) == 400 - begun


@pytest.mark.full(only="those that are ready begin without one that is not, and it joins")
def test_who_is_ready_begins_and_a_late_worker_joins(
    tmp_path: Path, ray_tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ControlSettings.__init__.__kwdefaults__, "others_s", 3.0)
    gate, comes = tmp_path / "gate", tmp_path / "comes"
    options = {"gate": str(gate), "first": str(tmp_path / "first"), "comes": str(comes)}
    elastic = {"min_workers": 1, "max_workers": 2}
    job = asked("Tardy", 2, steps=200, elastic=elastic, settings=options)

    def watching(event: Event) -> None:
        if isinstance(event, StepsCommitted) and event.micro_batches > 0:
            comes.touch()  # the other one has begun
            late.add(event.member)
            if len(late) > 1:
                gate.touch()

    late = set[int]()
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=watching)
    assert run.status == "finished"
    check_result(run, job, Steady(), 200)
    first, *_, last = of_kind(GenerationFormed, run.events)
    assert (len(first.members), len(last.members)) == (1, 2)
    assert any("begin, and the others join" in n.what for n in of_kind(Noticed, run.events))


@pytest.mark.full(only="a frozen worker that thaws computes again")
@pytest.mark.parametrize("norm", [True])
def test_a_frozen_worker_thaws_and_its_process_computes_again(
    norm: bool, tmp_path: Path, ray_tmpdir: Path
) -> None:
    gate = tmp_path / "gate"
    elastic = {"min_workers": 1, "max_workers": CPUS}  # nobody finds a place beside it
    settings = {"gate": str(gate), "norm": norm}
    job = asked("Paced", CPUS, steps=200, elastic=elastic, settings=settings)
    trouble = Trouble(ray_tmpdir, [20], freeze)

    def thawing(event: Event) -> None:
        """It thaws while the others go on without it, and must do no harm."""
        trouble(event)
        if isinstance(event, Recovered):
            os.kill(trouble.hit[0], signal.SIGCONT)

    run = raycloud.train(job, run_dir=tmp_path / "run", observer=Opening(gate, CPUS, thawing))
    check_result(run, job, Steady(norm=norm), 200)
    log = run.events
    [lost], [told] = of_kind(MemberLost, log), of_kind(MemberReturned, log)
    assert (told.member, lost.silent) == (lost.member, True)
    pids = {event.member: event.pid for event in of_kind(MemberReady, log)}
    [back] = set(pids) - set(range(CPUS))
    assert pids[back] == pids[lost.member] == trouble.hit[0]
    computed = dict.fromkeys(pids, 0)
    for event in of_kind(StepsCommitted, log):
        computed[event.member] += event.micro_batches
    assert computed[back] > 0
    last = of_kind(GenerationFormed, log)[-1]
    assert set(last.members) == {*range(CPUS), back} - {lost.member}
    assert run.summary["workers"] == CPUS
    [recovery] = run.summary["recoveries"]
    assert (recovery["kind"], recovery["member"]) == ("member lost", lost.member)
    [notice] = [n for n in run.summary["notices"] if "is back" in n["what"]]
    assert notice["detail"]["late_s"] == pytest.approx(told.late_s, abs=0.05)
    for member in last.members:  # no step was computed twice, none left out
        steps = [e for e in of_kind(StepsCommitted, log) if e.member == member]
        assert steps[-1].last_step == 200
        assert sum(e.last_step - e.first_step for e in steps) == 200 - steps[0].first_step


@pytest.mark.full(only="a connection that breaks or hangs between living workers")
@pytest.mark.parametrize("spoil", [shut, hang])
def test_where_only_a_connection_breaks_or_hangs_all_meet_anew(
    spoil: Callable[[int, int], None], tmp_path: Path, ray_tmpdir: Path
) -> None:
    job = job_of(3, 1, 200)
    trouble = Trouble(ray_tmpdir, [40], lambda _: spoil(*between(members_below(ray_tmpdir))[0]))
    run = raycloud.train(job, run_dir=tmp_path / "run", observer=trouble)
    assert len(trouble.hit) == 1
    check_result(run, job, Steady(), 200)
    assert not of_kind(MemberLost, run.events)
    assert {e.generation for e in of_kind(ExchangeBroken, run.events)} == {0}
    [told] = of_kind(Recovered, run.events)
    assert (told.lost, told.lost_steps) == ((), 0)
    [recovery] = run.summary["recoveries"]
    assert recovery["kind"] == "met anew"
    assert run.summary["workers"] == 3
