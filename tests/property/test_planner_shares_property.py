"""Shares are optimal against brute force; an estimate stays a speed and finds the true one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raycloud.errors import PlacementError
from raycloud.planner.shares import better_shares, fit_shares, step_seconds
from raycloud.planner.speed import Speed, SpeedEstimate
from tests.tiers import examples

# few distinct values, so that ties are common, and any floats besides
seconds = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.1, 2.0]), st.floats(0.0, 20.0))
speeds_of_few = st.lists(
    st.builds(
        Speed,
        fixed_s=seconds,
        micro_batch_s=seconds,
        max_micro_batches=st.one_of(st.none(), st.integers(0, 8)),
    ),
    min_size=1,
    max_size=4,
)


def splits(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to split `total` within `limits`."""
    if len(limits) == 1:
        if total <= limits[0]:
            yield (total,)
        return
    for first in range(min(total, limits[0]) + 1):
        for rest in splits(total - first, limits[1:]):
            yield (first, *rest)


@examples(200)
@given(speeds=speeds_of_few, micro_batches=st.integers(1, 8))
def test_fit_shares_is_optimal(speeds: list[Speed], micro_batches: int) -> None:
    limits = [micro_batches if s.max_micro_batches is None else s.max_micro_batches for s in speeds]
    every = [(step_seconds(speeds, split), split) for split in splits(micro_batches, limits)]
    if not every:
        with pytest.raises(PlacementError):
            fit_shares(speeds, micro_batches)
        return
    best_s = min(every)[0]
    shares = fit_shares(speeds, micro_batches)
    took_s = step_seconds(speeds, shares)
    assert sum(shares) == micro_batches
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    if micro_batches < len(speeds):
        assert took_s == best_s
        return
    # who is left out would make the step at least 30% faster to lack, or can hold nothing
    kept = [i for i, s in enumerate(speeds) if limits[i] > 0 and 0.7 * s.seconds(1) < best_s]
    if best_s > 0:
        assert all(shares[i] > 0 for i in kept)
    # and within that rule nothing is faster
    allowed = [t for t, split in every if all(split[i] > 0 for i in kept)]
    assert took_s == min(allowed)
    assert took_s <= best_s / 0.7 * (1 + 1e-12)


@examples(50)
@given(
    speeds=st.lists(
        st.builds(Speed, fixed_s=st.floats(0, 2), micro_batch_s=st.floats(1e-3, 5)),
        min_size=1,
        max_size=40,
    ),
    micro_batches=st.integers(1, 3000),
)
def test_moving_one_micro_batch_never_helps(speeds: list[Speed], micro_batches: int) -> None:
    """Larger cases: local optimality, which is global here since every T_i rises."""
    assume(micro_batches >= len(speeds))
    shares = fit_shares(speeds, micro_batches)
    took_s = step_seconds(speeds, shares)
    assert sum(shares) == micro_batches
    last = [i for i, s in enumerate(speeds) if s.seconds(shares[i]) == took_s]
    if len(last) == 1 and shares[last[0]] > 1:
        soonest_s = (
            min(s.seconds(shares[i] + 1) for i, s in enumerate(speeds) if i != last[0])
            if len(speeds) > 1
            else took_s
        )
        assert soonest_s >= took_s


@examples(50)
@given(speeds=speeds_of_few, micro_batches=st.integers(1, 8))
def test_fitted_shares_are_stable(speeds: list[Speed], micro_batches: int) -> None:
    assume(sum(8 if s.max_micro_batches is None else s.max_micro_batches for s in speeds) >= 8)
    shares = fit_shares(speeds, micro_batches)
    assert fit_shares(speeds, micro_batches) == shares
    assert better_shares(shares, speeds, micro_batches, gain=0.0) is None


@examples(50)
@given(
    fixed_s=st.floats(0, 10),
    micro_batch_s=st.floats(1e-6, 10),
    observed=st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 20), st.floats(0, 1e6)), max_size=60
    ),
)
def test_an_estimate_stays_a_speed(
    fixed_s: float, micro_batch_s: float, observed: list[tuple[int, int, float]]
) -> None:
    estimate = SpeedEstimate(Speed(fixed_s=fixed_s, micro_batch_s=micro_batch_s))
    for micro_batches, steps, compute_s in observed:
        estimate.observe(micro_batches, steps, compute_s)
        assert estimate.speed.seconds(1) > 0  # Speed itself refuses what is no time


@examples(50)
@given(
    truth=st.builds(Speed, fixed_s=st.floats(0, 5), micro_batch_s=st.floats(0.1, 5)),
    prior=st.builds(Speed, fixed_s=st.floats(0, 5), micro_batch_s=st.floats(0.1, 5)),
    share=st.integers(1, 32),
)
def test_one_share_is_learned_exactly_and_keeps_the_ratio(
    truth: Speed, prior: Speed, share: int
) -> None:
    estimate = SpeedEstimate(prior)
    for _ in range(80):
        estimate.observe(share * 5, 5, truth.seconds(share) * 5)
    assert estimate.speed.seconds(share) == pytest.approx(truth.seconds(share), rel=1e-3)
    assert estimate.speed.fixed_s * prior.micro_batch_s == pytest.approx(
        prior.fixed_s * estimate.speed.micro_batch_s, rel=1e-6, abs=1e-9
    )


@examples(50)
@given(
    truth=st.builds(Speed, fixed_s=st.floats(0, 5), micro_batch_s=st.floats(0.5, 5)),
    prior=st.builds(Speed, fixed_s=st.floats(0, 5), micro_batch_s=st.floats(0.5, 5)),
    shares=st.lists(st.integers(1, 16), min_size=2, max_size=4, unique=True),
)
def test_several_shares_reveal_both_parts(truth: Speed, prior: Speed, shares: list[int]) -> None:
    estimate = SpeedEstimate(prior)
    for _ in range(12):
        for share in shares:
            for _ in range(4):
                estimate.observe(share, 1, truth.seconds(share))
    for share in shares:
        assert estimate.speed.seconds(share) == pytest.approx(truth.seconds(share), rel=0.05)
