"""The simulation: exact, the same for the same seed, and it sees what is broken."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from raycloud import commands as c
from raycloud.control.checkpoints import Checkpoints
from raycloud.control.data import Progress
from raycloud.errors import SpecError
from raycloud.events import StepsCommitted
from raycloud.order import Position
from raycloud.simulate import (
    Fault,
    Kind,
    Scenario,
    faults_by_chance,
    large,
    simulate,
    small,
)
from raycloud.simulate.__main__ import main
from raycloud.simulate.cluster import VirtualCluster
from raycloud.simulate.computing import Changes
from raycloud.simulate.fleet import Messages, SimulatedMember, committed
from raycloud.simulate.generations import Meetings
from raycloud.simulate.traces import faults_of_trace, speeds_of_trace
from tests.tiers import drawn, variants

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
FOUR = Scenario(
    seed=1, members=4, samples=101, global_batch=16, steps=300, lasts_s=300.0, every_steps=50
)


def with_faults(*faults, **settings):
    return replace(FOUR, faults=tuple(Fault(**fault) for fault in faults), **settings)


def test_nothing_happens():
    outcome = simulate(FOUR)
    assert (outcome.status, outcome.steps, outcome.starts) == ("finished", 300, 1)
    assert (outcome.recoveries, outcome.pauses_s, outcome.mistaken) == (0, (), 0)
    assert not outcome.broken


@pytest.mark.parametrize("kind", list(Kind))
def test_a_run_ends_exactly_whatever_befalls_it(kind):
    fault = {"kind": kind, "many": 2, "lasts_s": 20.0}
    outcome = simulate(with_faults({"at_s": 30.0, **fault}, {"at_s": 60.0, **fault}, least=2))
    assert not outcome.broken, outcome.broken
    assert (outcome.status, outcome.steps) == ("finished", 300)
    assert outcome.faults[kind] >= 1


@pytest.mark.parametrize("second", [Kind.DIE, Kind.BREAK, Kind.LEAVE, Kind.FREEZE, Kind.CUT])
@pytest.mark.parametrize("after_s", variants(0.3, 0.0, 1.5, 4.0))
def test_two_faults_in_one_recovery(second, after_s):
    first = {"at_s": 40.0, "kind": Kind.DIE}
    then = {"at_s": 40.0 + after_s, "kind": second, "lasts_s": 12.0}
    outcome = simulate(with_faults(first, then, delay_s=1.0))
    assert not outcome.broken, outcome.broken
    assert outcome.steps == 300
    assert outcome.pauses_s


def test_a_run_that_failed_goes_on_from_its_checkpoint():
    outcome = simulate(with_faults({"at_s": 35.0, "kind": Kind.FAIL}))
    assert (outcome.starts, outcome.steps, outcome.broken) == (2, 300, ())


def test_a_full_disk_costs_checkpoints_and_ends_no_run_that_goes_on():
    outcome = simulate(with_faults({"at_s": 25.0, "kind": Kind.FULL, "lasts_s": 20.0}))
    assert (outcome.starts, outcome.steps, outcome.broken) == (1, 300, ())


def test_a_run_that_ends_on_a_full_disk_is_started_again_until_there_is_room():
    outcome = simulate(with_faults({"at_s": 25.0, "kind": Kind.FULL, "lasts_s": 900.0}))
    assert (outcome.starts, outcome.steps, outcome.broken) == (2, 300, ())


def test_where_machines_lack_a_run_waits_for_them():
    outcome = simulate(
        with_faults({"at_s": 40.0, "kind": Kind.ZONE, "lasts_s": 120.0}, least=2, zones=1)
    )
    assert (outcome.starts, outcome.steps, outcome.broken) == (1, 300, ())


@pytest.mark.parametrize("seed", variants(*range(6)))
def test_where_all_are_lost_others_go_on_from_the_checkpoint(seed, monkeypatch):
    """Once all at the same time, then one after the other; and before there is any checkpoint."""
    backs, restore = [], VirtualCluster.find_back

    def note(self, published, newest):
        restore(self, published, newest)
        backs.append(self._control.committed_step)

    monkeypatch.setattr(VirtualCluster, "find_back", note)
    faults = [{"at_s": at_s, "kind": Kind.DIE, "many": 4} for at_s in (24.0, 60.0)]
    faults += [{"at_s": 120.0 + i, "kind": Kind.DIE, "many": 1} for i in range(6)]
    outcome = simulate(with_faults(*faults, seed=seed, every_steps=20, steps=600))
    assert (outcome.starts, outcome.steps, outcome.broken) == (1, 600, ())
    assert len(backs) >= 2
    assert outcome.recoveries >= 2


@pytest.mark.full
def test_days_are_thinned_out_and_come_to_the_same():
    scenario = large(3, members=12, days=0.3, per_day=20)
    thin, whole = simulate(scenario), simulate(replace(scenario, awake_s=float("inf")))
    assert thin.lines < whole.lines / 5
    assert not thin.broken
    assert not whole.broken
    assert thin.goodput == pytest.approx(whole.goodput, abs=0.05)


def test_the_same_seed_gives_the_same_log_in_another_process_too():
    code = (
        "from raycloud.simulate import simulate, small\n"
        "print(*[simulate(small(seed)).digest for seed in range(4)])"
    )
    here = [simulate(small(seed)).digest for seed in range(4)]
    assert len(set(here)) == 4
    for hashing in ("1", "77"):
        told = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": hashing, "PATH": ""},
        )
        assert told.stdout.split() == here
    assert simulate(small(3)) == simulate(small(3))


@pytest.mark.timeout(180)
def test_small_seeds():
    broken = {
        seed: outcome.broken
        for seed in range(drawn(80))
        if (outcome := simulate(small(seed))).broken
    }
    assert not broken


# ---- what is wrong is seen


def test_a_step_that_counts_twice_is_seen(monkeypatch):
    def forgetful(self, samples):
        counts, bounds = dealt(self, samples)
        bounds = bounds.copy()
        bounds[1] += 1 if len(bounds) > 2 and self.step == 77 else 0
        bounds[-1] += 1 if self.step == 77 else 0
        return counts, bounds

    from raycloud.simulate.lockstep import Lockstep

    dealt = Lockstep.dealt
    monkeypatch.setattr(Lockstep, "dealt", forgetful)
    assert "the parameters after 100 steps are others than due" in simulate(FOUR).broken


def test_a_ledger_that_leaves_steps_out_is_seen(monkeypatch):
    commit_to = Progress.commit_to
    monkeypatch.setattr(Progress, "commit_to", lambda self, step: commit_to(self, min(step, 290)))
    assert simulate(FOUR).broken


def test_a_meeting_that_never_ends_is_seen(monkeypatch):
    monkeypatch.setattr(Meetings, "_begin", lambda self, meeting: None)
    assert any("it gave up" in promise for promise in simulate(FOUR).broken)


def test_a_change_that_members_do_not_take_in_together_is_seen(monkeypatch):
    agree = Changes.agree

    def hasty(self, group):
        agree(self, group)
        if self.ahead is not None and self.ahead.due is not None:
            self.ahead = replace_change(self.ahead)

    def replace_change(ahead):
        if isinstance(ahead.told.change, c.Reshare):
            shares = ahead.told.change.shares[::-1]
            ahead.told = replace(ahead.told, change=replace(ahead.told.change, shares=shares))
        return ahead

    monkeypatch.setattr(Changes, "agree", hasty)
    slow = {"at_s": 30.0, "kind": Kind.SLOW, "lasts_s": 200.0}
    assert any("illegal" in promise for promise in simulate(with_faults(slow)).broken)


def test_words_that_come_twice_are_seen(monkeypatch):
    push = Messages._push

    def twice(self, arrives_s, body, event):
        push(self, arrives_s, body, event)
        if self._count == 60:
            push(self, arrives_s, body, event)

    monkeypatch.setattr(Messages, "_push", twice)
    assert any("illegal" in promise for promise in simulate(FOUR).broken)


def test_a_word_of_steps_is_as_one_that_is_made_openly():
    at = Position(epoch=1, offset=8)
    word = committed(SimulatedMember(number=3, told=2, owes=4, owes_s=1.0), 5, at, 12)
    assert type(word) is StepsCommitted
    assert word == replace(word)
    assert (word.member, word.last_step, word.compute_s, word.skips) == (3, 5, 1.0, ())
    assert (word.micro_batches, word.computed) == (4, 12)
    with pytest.raises(FrozenInstanceError):
        word.member = 4


def test_a_checkpoint_with_a_part_missing_is_seen(monkeypatch):
    monkeypatch.setattr(Checkpoints, "take_in", lambda *_: ())
    assert simulate(FOUR).broken


# ---- what is asked


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("members", 0),
        ("least", 5),
        ("steps", 0),
        ("every_steps", 0),
        ("speeds", ()),
        ("delay_s", -1.0),
        ("report_s", 0.0),
        ("stillborn", 1.0),
        ("nodes", 1),
    ],
)
def test_what_cannot_be_simulated_is_refused(field, value):
    with pytest.raises(SpecError, match=field):
        replace(FOUR, **{"least": 2, field: value})


def test_more_faults_come_where_more_are_asked_for():
    few = faults_by_chance(1, per_day=2, lasts_s=86_400 * 30)
    many = faults_by_chance(1, per_day=20, lasts_s=86_400 * 30)
    assert 30 < len(few) < 140
    assert len(many) > 5 * len(few)
    assert {fault.kind for fault in many} >= {Kind.DIE, Kind.LEAVE, Kind.CUT, Kind.BREAK}


# ---- the command


def test_the_command_tells_what_came_of_it(capsys):
    assert main(["--members", "20", "--days", "0.1", "--faults-per-day", "40", "--seed", "2"]) == 0
    told = capsys.readouterr().out
    assert "goodput" in told
    assert "digest" in told


def test_the_command_repeats_what_was_broken(capsys, monkeypatch):
    monkeypatch.setattr(Checkpoints, "take_in", lambda *_: ())
    assert main(["--small", "--seeds", "11:15"]) == 1
    told = capsys.readouterr().out
    assert "BROKEN: " in told
    assert "repeat: python -m raycloud.simulate --small --seed 1" in told


def test_the_command_refuses_what_is_no_trace(capsys, tmp_path):
    (tmp_path / "spot.json").write_text("{}")
    assert main(["--members", "4", "--spot", str(tmp_path / "spot.json")]) == 2
    assert "no trace with gap_seconds" in capsys.readouterr().err


# ---- traces


def test_a_spot_trace_is_followed(tmp_path):
    path = tmp_path / "spot.json"
    path.write_text('{"metadata": {"gap_seconds": 300}, "data": [4, 4, 1, 0, 4, 2]}')
    held = faults_of_trace(path, nodes=8, until_s=1400.0)
    assert [(fault.at_s, fault.many) for fault in held] == [(600.0, 2), (900.0, 0), (1200.0, 8)]


def test_workers_have_the_speeds_of_a_trace(tmp_path):
    path = tmp_path / "job.csv"
    path.write_text("worker,time,batch_time_norm\n0,1,50\n1,1,300\n0,2,70\n1,2,100\n0,3,60\n")
    assert speeds_of_trace(path) == (0.6, 2.0)
    path.write_text("worker,time,batch_time_norm\n")
    with pytest.raises(SpecError, match="batch times"):
        speeds_of_trace(path)


@pytest.mark.full
def test_real_machines_come_and_go():
    path = DATA / "spot" / "availability_16-node_aws-08-27-2023_us-west-2a_v100_1.json"
    if not path.exists():
        pytest.skip("no real spot traces beside the repository (shared/data/spot)")
    scenario = large(1, members=16, days=4, per_day=2)
    held = faults_of_trace(path, nodes=16, until_s=scenario.lasts_s)
    faults = tuple(sorted([*scenario.faults, *held]))
    outcome = simulate(replace(scenario, faults=faults, least=1))
    assert not outcome.broken
    assert outcome.faults[Kind.HOLD] == len(held) > 20
    assert outcome.steps > 0


@pytest.mark.full
def test_real_stragglers():
    path = DATA / "straggler" / "job_4_norm.csv"
    if not path.exists():
        pytest.skip("no real straggler traces beside the repository (shared/data/straggler)")
    speeds = speeds_of_trace(path)
    scenario = replace(large(1, members=len(speeds), days=0.05, per_day=40), speeds=speeds)
    fitted, equal = simulate(scenario), simulate(replace(scenario, shares="equal"))
    assert not fitted.broken
    assert not equal.broken
    assert fitted.steps > 1.5 * equal.steps
