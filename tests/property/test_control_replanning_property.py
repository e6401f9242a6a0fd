"""A better plan is adopted exactly where it gains more than the change to it costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raycloud.control.replanning import LEAST_GAIN, decide

seconds = st.floats(min_value=1e-4, max_value=1e3)
plans = st.dictionaries(st.sampled_from("abcdef"), seconds, min_size=1)
lefts = st.none() | st.integers(min_value=0, max_value=10**6)
costs = st.floats(min_value=0.0, max_value=1e4)


@given(plans, st.data(), lefts, costs)
def test_it_changes_to_the_fastest_where_that_pays_and_else_stays(
    step_s: dict[str, float], data: st.DataObject, left: int | None, cost_s: float
) -> None:
    now = data.draw(st.sampled_from(sorted(step_s)))
    found = decide(now, step_s, left=left, cost_s=cost_s)
    best_s = min(step_s.values())
    gain_s = step_s[now] - best_s
    pays = left is None or gain_s * left > cost_s
    assert found.changes == (found.plan != now)
    assert found.changes == (gain_s > 0 and gain_s >= LEAST_GAIN * step_s[now] and pays)
    assert step_s[found.plan] == (best_s if found.changes else step_s[now])
    assert found.why


@given(plans, st.data(), st.integers(0, 10**6), costs)
def test_more_steps_left_or_a_cheaper_change_never_make_it_stay(
    step_s: dict[str, float], data: st.DataObject, left: int, cost_s: float
) -> None:
    now = data.draw(st.sampled_from(sorted(step_s)))
    if decide(now, step_s, left=left, cost_s=cost_s).changes:
        assert decide(now, step_s, left=2 * left, cost_s=cost_s).changes
        assert decide(now, step_s, left=left, cost_s=cost_s / 2).changes
        assert decide(now, step_s, left=None, cost_s=cost_s).changes


@given(plans, lefts, costs)
def test_the_order_in_which_plans_are_told_does_not_matter(
    step_s: dict[str, float], left: int | None, cost_s: float
) -> None:
    now, *_ = sorted(step_s)
    turned = dict(reversed(step_s.items()))
    one, other = (decide(now, told, left=left, cost_s=cost_s) for told in (step_s, turned))
    assert step_s[one.plan] == step_s[other.plan]


@given(seconds, costs)
def test_nothing_is_adopted_for_no_steps(step: float, cost_s: float) -> None:
    assert not decide("a", {"a": step, "b": step / 2}, left=0, cost_s=cost_s).changes
