"""Whatever befalls a simulated run, it ends, and its parameters are those of one loop."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from raycloud.simulate import Fault, Kind, simulate, small
from tests.tiers import examples

FAULTS = st.builds(
    Fault,
    at_s=st.floats(0, 60),
    kind=st.sampled_from(list(Kind)),
    many=st.integers(1, 4),
    lasts_s=st.sampled_from([0.1, 3.0, 20.0, 90.0, 700.0]),
)


@examples(100)
@given(st.integers(0, 2**32), st.lists(FAULTS, max_size=8))
def test_whatever_happens_the_run_ends_and_is_exact(seed, faults):
    scenario = replace(small(seed), faults=tuple(sorted(faults)))
    outcome = simulate(scenario)
    assert not outcome.broken, (scenario, outcome.broken, outcome.tail)
    if scenario.steps is not None:
        assert (outcome.status, outcome.steps) == ("finished", scenario.steps)


@examples(25)
@given(st.integers(0, 2**32))
def test_the_same_scenario_gives_the_same_outcome(seed):
    assert simulate(small(seed)) == simulate(small(seed))
