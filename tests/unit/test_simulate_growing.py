"""The simulation where files are added to what is trained on, while members come and go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud import commands as c
from raycloud.simulate import Fault, Kind, Scenario, simulate
from raycloud.simulate.cluster import Start
from raycloud.simulate.computing import Changes, Computing
from tests.tiers import variants

FOUR = Scenario(
    seed=1, members=4, samples=101, global_batch=16, steps=300, lasts_s=300.0, every_steps=50
)
GROW = Fault(at_s=40.0, kind=Kind.GROW)


def with_faults(*faults, **settings):
    return replace(FOUR, faults=tuple(sorted(faults)), **settings)


@pytest.fixture
def sizes(monkeypatch):
    """By start, how many samples the first and the last epoch have in the end."""
    found, end = [], Start.close

    def note(self):
        if (ledger := self.driver.control.ledger) is not None:
            found.append((ledger.sizes.samples, ledger.sizes.most))
        end(self)

    monkeypatch.setattr(Start, "close", note)
    return found


def test_epochs_that_begin_later_have_what_was_added(sizes):
    outcome = simulate(with_faults(GROW, Fault(at_s=90.0, kind=Kind.GROW)))
    assert (outcome.starts, outcome.steps, outcome.broken) == (1, 300, ())
    assert outcome.recoveries == 0
    ((first, last),) = sizes
    assert first == 101
    assert last > 102


@pytest.mark.parametrize(
    "kind", variants(Kind.DIE, Kind.LEAVE, Kind.BREAK, Kind.FREEZE, Kind.CUT, fast=2)
)
@pytest.mark.parametrize("after_s", variants(0.2, -6.0, -1.0, 2.5))
def test_growth_and_a_fault_at_the_same_time(kind, after_s):
    fault = Fault(at_s=40.0 + after_s, kind=kind, lasts_s=12.0)
    for seed in range(4):
        outcome = simulate(with_faults(GROW, fault, delay_s=1.0, least=2, seed=seed))
        assert not outcome.broken, (seed, outcome.broken)
        assert outcome.steps == 300


def test_below_the_fewest_a_run_is_started_again_with_all_data(sizes):
    leave = Fault(at_s=80.0, kind=Kind.LEAVE, many=2, lasts_s=10.0)
    outcome = simulate(with_faults(GROW, leave, least=3))
    assert (outcome.starts, outcome.steps, outcome.broken) == (2, 300, ())
    assert sizes[0][1] == sizes[1][1] > 101


def test_data_that_grew_before_any_checkpoint_is_there_from_the_start(sizes):
    fail = Fault(at_s=10.0, kind=Kind.FAIL)
    outcome = simulate(with_faults(replace(GROW, at_s=5.0), fail, every_steps=None))
    assert not outcome.broken, outcome.broken
    assert sizes[-1][0] == sizes[-1][1] > 101


# ---- what is wrong is seen


def test_members_that_do_not_read_what_was_added_are_seen(monkeypatch):
    monkeypatch.setattr(Computing, "grow", lambda *_: None)
    promises = simulate(with_faults(GROW)).broken
    assert any("the sequence stands at" in promise for promise in promises)


def test_a_newcomer_that_has_not_heard_of_it_is_seen(monkeypatch):
    settle = Changes.settle

    def late(self, number, members):
        if self.ahead is not None and isinstance(self.ahead.told.change, c.Extend):
            self.ahead.told = replace(self.ahead.told, members=self.ahead.told.members[1:])
        settle(self, number, members)

    monkeypatch.setattr(Changes, "settle", late)
    faults = [Fault(at_s=at_s, kind=Kind.BREAK) for at_s in (40.2, 41.0, 42.0, 43.0)]
    outcome = simulate(with_faults(GROW, *faults))
    assert any("have not heard" in promise for promise in outcome.broken)
