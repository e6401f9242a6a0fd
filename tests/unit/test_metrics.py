"""Metrics: parts make the whole, and a state is read back by its kind."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from raycloud.metrics import Accuracy, Auc, Mean, Metric, merge_all


@pytest.mark.parametrize("empty", [Mean(total=0.0, weight=0.0), Accuracy(right=0, count=0), Auc()])
def test_nothing_measured_is_not_a_number(empty: Metric) -> None:
    assert math.isnan(empty.value())


@pytest.mark.parametrize(
    "metric",
    [
        Mean(total=0.1, weight=3.0),
        Mean(total=float("inf"), weight=1.0),
        Accuracy(right=2, count=3),
        Auc.of(scores=[-1.5, 0.0, 2.0], labels=[0, 1, 1]),
        Auc(),
    ],
)
def test_a_state_goes_through_json(metric: Metric) -> None:
    state = json.loads(json.dumps(metric.state()))
    assert state["kind"] == metric.kind
    assert Metric.from_state(state) == metric


def test_an_unknown_kind_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"unknown metric 'recall'; known: accuracy, auc, .*mean"):
        Metric.from_state({"kind": "recall"})


def test_one_class_alone_has_no_area() -> None:
    assert math.isnan(Auc.of(scores=[0.1, 0.2], labels=[1, 1]).value())
    assert math.isnan(Auc.of(scores=[0.1, 0.2], labels=[0, 0]).value())


@pytest.mark.parametrize(
    ("scores", "area"),
    [
        ([0.1, 0.9], 1.0),
        ([0.9, 0.1], 0.0),
        ([0.5, 0.5], 0.5),
        ([-2.0, -1.0], 1.0),
        ([-1.0, 1e-30], 1.0),
        ([-1e30, 1e30], 1.0),
        ([float("-inf"), float("inf")], 1.0),
        ([0.0, -0.0], 0.5),
        ([-0.0, 0.0], 0.5),
        ([-1e-60, 1e-60], 0.5),  # both nothing, in float32
        ([1e39, 1e300], 0.5),  # both beyond float32
        ([3e38, 1e39], 1.0),
        ([-1e39, 0.0], 1.0),
        ([1000.0, 1001.0], 0.5),  # less than 1/128 apart
        ([1000.0, 1010.0], 1.0),
    ],
)
def test_scores_of_a_negative_and_a_positive(scores: list[float], area: float) -> None:
    assert Auc.of(scores=scores, labels=[0, 1]).value() == area


def test_scores_and_labels_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        Auc.of(scores=[0.1], labels=[0, 1])


def test_merging_changes_neither_part() -> None:
    one, other = Auc.of(scores=[1.0], labels=[1]), Auc.of(scores=[1.0, 2.0], labels=[0, 1])
    before = one.state(), other.state()
    one.merge(other)
    assert (one.state(), other.state()) == before


def test_parts_may_lack_a_metric() -> None:
    merged = merge_all(
        [
            {"loss": Mean(total=1.0, weight=1.0)},
            {},
            {"loss": Mean(total=5.0, weight=1.0), "right": Accuracy(right=1, count=2)},
        ]
    )
    assert {name: metric.value() for name, metric in merged.items()} == {"loss": 3.0, "right": 0.5}
    assert merge_all([]) == {}


def test_a_kind_of_ones_own_is_known_by_its_name() -> None:
    class Largest(Metric):
        kind = "largest-of-a-test"

        def __init__(self, found: float) -> None:
            self.found = found

        def merge(self, other: Largest) -> Largest:
            return Largest(max(self.found, other.found))

        def value(self) -> float:
            return self.found

        def to_values(self) -> dict[str, float]:
            return {"found": self.found}

        @classmethod
        def from_values(cls, values: dict[str, float]) -> Largest:  # type: ignore[override]
            return cls(values["found"])

    read = Metric.from_state(Largest(3.0).merge(Largest(4.0)).state())
    assert isinstance(read, Largest)
    assert read.value() == 4.0


def test_metrics_take_numbers_of_any_kind_and_keep_plain_ones() -> None:
    mean = Mean(total=torch.tensor(3.0), weight=np.int64(2))  # type: ignore[arg-type]
    right = Accuracy(right=torch.tensor(3), count=np.float32(4))  # type: ignore[arg-type]
    area = Auc.of(scores=torch.tensor([0.1, 0.9]), labels=torch.tensor([0, 1]))
    assert (mean, right) == (Mean(total=3.0, weight=2.0), Accuracy(right=3, count=4))
    states = [metric.state() for metric in (mean, right, area)]
    assert [Metric.from_state(one) for one in json.loads(json.dumps(states))] == [mean, right, area]


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_can_be_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="finite weight >= 0"):
        Mean(total=1.0, weight=weight)


def test_what_is_no_whole_number_is_not_counted() -> None:
    with pytest.raises(ValueError, match=r"whole numbers, got right=1\.5"):
        Accuracy(right=1.5, count=2)  # type: ignore[arg-type]
