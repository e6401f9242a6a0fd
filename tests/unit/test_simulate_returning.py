"""Simulated members that are silent for a while: their processes join again, and all is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.control import failure_detector
from raycloud.simulate import Fault, Kind, Scenario, simulate, small
from raycloud.simulate.fleet import Fleet

FOUR = Scenario(
    seed=1, members=4, samples=101, global_batch=16, steps=300, lasts_s=300.0, every_steps=50
)
KINDS = (Kind.FREEZE, Kind.CUT, Kind.FREEZE, Kind.BREAK, Kind.FREEZE, Kind.DIE, Kind.NOTICE)


def often(seed: int) -> Scenario:
    """Somebody is silent about every 6 s, or dies, and most come back."""
    faults = [
        Fault(
            at_s=4.0 + 6.1 * at,
            kind=KINDS[(3 * seed + at) % len(KINDS)],
            many=1 + (seed + at) % 2,
            lasts_s=(2.0, 4.0, 9.0, 17.0, 30.0)[(seed + 2 * at) % 5],
        )
        for at in range(12)
    ]
    scene = small(seed)
    members = max(scene.members, 3)
    room = {"nodes": members + seed % 2, "there": members, "per_node": 1}
    shape = {"members": members, "least": 1, "lasts_s": 90.0, "steps": None, **room}
    return replace(scene, faults=tuple(faults), **shape)


@pytest.mark.parametrize("kind", [Kind.FREEZE, Kind.CUT])
def test_who_is_heard_again_joins_and_nobody_else_is_built(kind):
    fault = Fault(at_s=30.0, kind=kind, lasts_s=20.0)
    outcome = simulate(replace(FOUR, faults=(fault,)))
    assert not outcome.broken, outcome.broken
    assert (outcome.status, outcome.steps, outcome.starts) == ("finished", 300, 1)
    assert outcome.returned == 1
    assert outcome.members == 6  # of whom one was asked for, and found no place


def test_those_that_come_and_go_change_nothing():
    returned = 0
    for seed in range(25):
        outcome = simulate(often(seed))
        assert not outcome.broken, (seed, outcome.broken)
        returned += outcome.returned
    assert returned > 10


def test_one_that_is_never_told_of_is_noticed(monkeypatch):
    """The simulation sees it where control forgets whom it keeps."""
    monkeypatch.setattr(Fleet, "readmit", lambda *_: None)
    fault = Fault(at_s=30.0, kind=Kind.FREEZE, lasts_s=20.0)
    outcome = simulate(replace(FOUR, faults=(fault,), lasts_s=600.0, steps=2000))
    assert outcome.broken


def test_nobody_is_silent_where_nobody_is_listened_for(monkeypatch):
    monkeypatch.setattr(failure_detector, "_mute", lambda _: None)
    fault = Fault(at_s=30.0, kind=Kind.FREEZE, lasts_s=20.0)
    assert simulate(replace(FOUR, faults=(fault,))).returned == 0
