"""How the feeding benchmark compares and judges, without running a contestant."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.feeding import epochs, training
from benchmarks.feeding.floors import Verdict, mean, ratio, table
from tests.feeding import row


def compared() -> list[dict[str, Any]]:
    ours = [
        row("raycloud", r, ("cold", True, 1.0), ("warm", True, 0.1), ("not cached", True, 1.0))
        for r in range(2)
    ]
    for one in ours:
        one["read_ms"] = {
            "warm": {"mean": 0.1, "p99": 0.5},
            "not cached": {"mean": 1.0, "p99": 1.0},
        }
    quick = [
        row("ray.data, same decoder", r, ("cold", False, 2.0), ("warm", False, 0.1)) for r in (0, 1)
    ]
    slow = [
        row("torch loader, own decoder", r, ("cold", True, 4.0), ("warm", True, 0.5))
        for r in (0, 1)
    ]
    return [*ours, *quick, *slow]


def test_rates_are_those_of_the_median_epoch() -> None:
    one = row("raycloud", 0, *(("warm", True, wall_s) for wall_s in (1.0, 0.5, 9.0)))
    assert epochs.rate(one, "warm", shuffled=True) == 100.0
    assert epochs.rate(one, "cold", shuffled=True) is None


def test_epochs_are_held_against_the_best_peer_of_each_repeat() -> None:
    found = {one.name: one for one in epochs.verdicts(compared())}
    assert found["cold / best peer with our decoder"].value == pytest.approx(2.0)
    assert found["cold / best peer as documented"].value == pytest.approx(4.0)
    assert found["warm / cold"].value == pytest.approx(10.0)
    unshuffled = found["warm / best peer, also unshuffled"]
    assert unshuffled.value == pytest.approx(1.0)
    assert not unshuffled.passes
    assert found["warm / best shuffled peer"].value == pytest.approx(5.0)
    assert found["cached / not cached, mean latency of a batch"].passes
    assert found["cached / not cached, p99 latency of a batch"].value == pytest.approx(0.5)
    text = epochs.table(epochs.rates(compared()), [])
    assert "ray.data, same decoder" in text


def test_verdicts() -> None:
    assert ratio("a", [2.0, 8.0], [1.0, 4.0], at_least=2.0).passes
    assert not Verdict(name="b", value=3.0, at_most=2.0).passes
    assert not Verdict(name="nothing came", value=float("nan"), at_most=2.0).passes
    assert Verdict(name="c", value=3.0).passes is None
    spread = mean("d", [1.0, 3.0], at_most=2.0)
    assert spread.value == 2.0
    assert spread.low is not None
    assert spread.low < 1.0
    assert mean("d", [1.0]).low is None
    text = table([spread, Verdict(name="long name", value=3.0, at_least=4.0)])
    assert "pass" in text.splitlines()[0]
    assert "SHORT" in text.splitlines()[1]


def committed(epoch: int, offset: int, data_s: float) -> dict[str, Any]:
    return {
        "event": "StepsCommitted",
        "epoch": epoch,
        "offset": offset,
        "data_s": data_s,
        "wall_s": 10.0,
    }


def test_preparing_counts_as_waiting_in_the_first_epoch() -> None:
    done = training.Done(
        summary={},
        events=(
            {"event": "DataPrepared", "seconds": 1.0, "version": 0, "waited_s": 0.0},
            {"event": "DataPrepared", "seconds": 2.5, "version": 0, "waited_s": 2.0},
            {"event": "DataPrepared", "seconds": 2.5, "version": 0, "waited_s": 1.5},
            {"event": "DataPrepared", "seconds": 9.0, "version": 1, "waited_s": 9.0},
            committed(0, 500, 0.0),
            committed(1, 0, 1.0),
            committed(1, 500, 0.1),
            committed(2, 0, 0.1),
        ),
    )
    found = training.waited(done)
    assert found["preparing_s"] == 2.5
    assert found["waited_s"] == 3.5
    assert found["cold_share"] == pytest.approx((1.0 + 3.5) / (20.0 + 3.5))
    assert found["feed_share"] == pytest.approx(0.05)
    assert found["later_share"] == pytest.approx(0.01)
