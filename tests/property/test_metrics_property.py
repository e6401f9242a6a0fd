"""However the samples are dealt, the merged parts measure what the whole does."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.metrics import Accuracy, Auc, Mean, Metric, merge_all

# Eight significant bits: such scores are told apart, or equal.
scores = st.builds(lambda n, power: n * 2.0**power, st.integers(-255, 255), st.integers(-8, 8))
measured = st.lists(st.tuples(scores, st.booleans(), st.floats(0.125, 8.0)), max_size=40)


def measure(samples: list[tuple[float, bool, float]]) -> dict[str, Metric]:
    return {
        "mean": Mean(total=sum(s * w for s, _, w in samples), weight=sum(w for *_, w in samples)),
        "right": Accuracy(right=sum(y for _, y, _ in samples), count=len(samples)),
        "auc": Auc.of(scores=[s for s, *_ in samples], labels=[float(y) for _, y, _ in samples]),
    }


@given(measured, st.lists(st.integers(0, 40), max_size=4))
def test_parts_make_the_whole(samples: list[tuple[float, bool, float]], cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(samples)]
    parts = [measure(samples[a:b]) for a, b in pairwise(edges)]
    sent = [
        {name: Metric.from_state(json.loads(json.dumps(m.state()))) for name, m in part.items()}
        for part in parts
    ]
    merged, whole = merge_all(sent), measure(samples)
    assert merged["auc"] == whole["auc"]
    assert merged["right"] == whole["right"]
    assert merged["mean"].value() == pytest.approx(whole["mean"].value(), nan_ok=True, abs=1e-9)
    assert merge_all(reversed(sent))["auc"] == whole["auc"]


@given(measured)
def test_auc_is_the_chance_that_a_positive_scores_above_a_negative(
    samples: list[tuple[float, bool, float]],
) -> None:
    pairs = [(p, n) for p, y, _ in samples if y for n, z, _ in samples if not z]
    wins = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs)
    expected = wins / len(pairs) if pairs else float("nan")
    assert measure(samples)["auc"].value() == pytest.approx(expected, nan_ok=True, abs=1e-12)


@given(st.floats(allow_nan=False, width=32), st.floats(allow_nan=False, width=32))
def test_scores_never_change_places(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert Auc.of(scores=[low, high], labels=[0, 1]).value() >= 0.5
