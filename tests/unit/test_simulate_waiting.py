"""The simulation where members leave with notice, too few are left, or many are lost at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.control import guards
from raycloud.control.tables import Condition
from raycloud.simulate import (
    Fault,
    Kind,
    Scenario,
    faults,
    simulate,
)
from raycloud.simulate.cluster import VirtualCluster
from raycloud.simulate.fleet import Fleet

FOUR = Scenario(
    seed=1, members=4, samples=101, global_batch=16, steps=300, lasts_s=300.0, every_steps=50
)


def with_faults(*faults, **settings):
    return replace(FOUR, faults=tuple(Fault(**fault) for fault in faults), **settings)


MANY_DIE_S = (60.0, 260.0, 460.0, 660.0)


@pytest.fixture
def published(monkeypatch):
    """The steps of the checkpoints that are published."""
    steps, publish = [], VirtualCluster.publish

    def note(self, command, **state):
        steps.append(command.step)
        publish(self, command, **state)

    monkeypatch.setattr(VirtualCluster, "publish", note)
    return steps


def test_below_the_fewest_a_run_waits_and_goes_on():
    outcome = simulate(
        with_faults({"at_s": 40.0, "kind": Kind.LEAVE, "many": 2, "lasts_s": 120.0}, least=3)
    )
    assert (outcome.starts, outcome.steps, outcome.broken) == (1, 300, ())
    assert max(outcome.pauses_s) > 90.0


def test_many_that_are_lost_at_once_are_one_incident():
    scenario = replace(FOUR, members=24, global_batch=48, zones=2, micro_batch=1, least=4)
    zone = Fault(at_s=40.0, kind=Kind.ZONE, lasts_s=30.0)
    outcome = simulate(replace(scenario, faults=(zone,)))
    assert (outcome.starts, outcome.steps, outcome.broken) == (1, 300, ())


def test_who_was_done_and_has_ended_since_is_not_met_again():
    faults = [
        Fault(at_s=0.99, kind=Kind.RANGE, many=3),
        Fault(at_s=2.61, kind=Kind.DIE, many=3),
        Fault(at_s=5.59, kind=Kind.DEAF, lasts_s=72.3),  # they are done meanwhile, and gone
        Fault(at_s=6.91, kind=Kind.HOLD, many=1),
        Fault(at_s=9.37, kind=Kind.HOLD, many=4),
    ]
    settings = {"micro_batch": 3, "stillborn": 0.3, "every_steps": 33, "speeds": (0.06, 0.02, 0.02)}
    for seed in range(20):
        scenario = Scenario(
            seed=seed,
            members=8,
            least=3,
            samples=73,
            global_batch=1,
            steps=7,
            lasts_s=20.0,
            faults=tuple(faults),
            exchange_s=0.01,
            there=6,
            delay_s=2.0,
            build_s=4.0,
            **settings,
        )
        outcome = simulate(scenario)
        assert not outcome.broken, (seed, outcome.broken)


# ---- notices


@pytest.fixture
def in_time(monkeypatch):
    """Notices come a minute before the end."""
    monkeypatch.setattr(faults, "_AHEAD_S", ((60.0, 61.0),))
    return with_faults({"at_s": 40.0, "kind": Kind.NOTICE, "lasts_s": 30.0})


@pytest.mark.parametrize("seed", range(8))
def test_what_is_said_in_time_costs_nothing(in_time, seed):
    outcome = simulate(replace(in_time, seed=seed))
    assert not outcome.broken, outcome.broken
    assert (outcome.starts, outcome.steps, outcome.recoveries) == (1, 300, 0)
    assert outcome.members > 4  # another came in its place
    assert max(outcome.pauses_s, default=0.0) < 2.0  # a newcomer took the state


def test_a_notice_that_is_not_heeded_is_seen(in_time, monkeypatch):
    monkeypatch.setattr(Fleet, "warn", lambda *_: None)
    assert any("as was said in time" in promise for promise in simulate(in_time).broken)


def test_who_is_needed_stays_and_a_checkpoint_is_made(in_time, published):
    outcome = simulate(replace(in_time, least=4, nodes=4, every_steps=None, seed=3))
    assert not outcome.broken, outcome.broken
    assert (outcome.starts, outcome.steps) == (1, 300)
    assert len(published) > 1


def test_checkpoints_come_as_often_as_is_worth_it(published):
    assert not simulate(replace(FOUR, every_steps="auto", steps=1200)).broken
    assert len(published) > 4
    published.clear()
    assert not simulate(replace(FOUR, every_steps=None)).broken
    assert published == [300]


def test_a_wait_without_end_is_seen(monkeypatch):
    monkeypatch.setitem(guards._HOLDS, Condition.ENOUGH, lambda state: False)
    leave = {"at_s": 40.0, "kind": Kind.LEAVE, "many": 2, "lasts_s": 120.0}
    assert any("it waits" in promise for promise in simulate(with_faults(leave, least=3)).broken)


def test_many_losses_in_a_long_step_are_no_step_that_ends_members():
    """A step takes some seconds, and so do 13 deaths: what the others have of it is kept."""
    dies = tuple(
        Fault(at_s=at_s + 2.5 * n, kind=Kind.DIE) for at_s in MANY_DIE_S for n in range(13)
    )
    job = replace(FOUR, members=16, global_batch=64, samples=1000, steps=40, speeds=(2.0,))
    outcome = simulate(replace(job, every_steps=None, build_s=5.0, lasts_s=900.0, faults=dies))
    assert not outcome.broken, outcome.broken
    assert (outcome.status, outcome.steps, outcome.starts) == ("finished", 40, 1)
