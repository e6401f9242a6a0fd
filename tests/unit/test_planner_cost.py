"""What a step costs by each way for updates to travel."""

from __future__ import annotations

from typing import Any

import pytest

from raycloud.planner.cost import Costs, Prediction, Profile, exchange_seconds, sent_bytes
from raycloud.planner.inventory import Inventory, Node
from raycloud.planner.plan import Plan, make
from raycloud.planner.speed import Speed
from raycloud.spec import Job, SyncPoint
from raycloud.spec.sizes import coded_bytes, ring_bytes, tree_bytes

GRADIENT = 7_600_000
SPEED = Speed(fixed_s=0.1, micro_batch_s=0.05)
FOUR = (SPEED,) * 4
SHARES, ZONES = (2, 2, 2, 2), (1, 1, 1, 1)
PART = 2**20 / GRADIENT  # of a bucket


def job(**fields: Any) -> Job:
    """Eight micro-batches for four workers."""
    return Job(**{"task": "tasks.toy:Toy", "steps": 10, "elastic": {"max_workers": 4}, **fields})


def profile(**fields: Any) -> Profile:
    """Of 1.9 million parameters, over 20 Mbit/s."""
    given = {"link_bytes_per_s": 2.5e6, "overhead_s": 0.0, **fields}
    return Profile(
        samples=1000,
        parameters=GRADIENT // 4,
        gradient_bytes=GRADIENT,
        state_bytes=3 * GRADIENT,
        speeds=FOUR,
        **given,
    )


def predict(asked: Job, *given: Any) -> Prediction:
    """As the job has it."""
    return Costs(asked, *given).predict(asked.sync_point)


def test_each_exchange_takes_its_bytes_and_its_latencies() -> None:
    rate, trip = 2.5e6, 0.08
    codes = coded_bytes(GRADIENT, "int4")

    def seconds(zones: tuple[int, ...], **point: Any) -> float:
        one = SyncPoint(**point)
        return exchange_seconds(one, GRADIENT, zones, bytes_per_s=rate, round_trip_s=trip)

    assert seconds((1,)) == 0.0
    # The wire seconds of a thin link's table: 4.56 and 0.61 at 20 Mbit/s, without latency.
    assert seconds(ZONES) == pytest.approx(4.56 + 6 * 0.04, abs=0.005)
    assert seconds(ZONES, topology="direct", codec="int4") == pytest.approx(
        ring_bytes(codes, 4) / rate + 2 * 0.04
    )
    # Where each is in its own zone, or all in one, a tree is direct.
    direct = seconds(ZONES, topology="direct", codec="int4")
    assert seconds((4,), topology="tree", codec="int4") == direct
    assert seconds(ZONES, topology="tree", codec="int4") == direct
    _, across = tree_bytes(GRADIENT, codes, (2, 1, 1))
    found = seconds((2, 1, 1), topology="tree", codec="int4")
    assert found == pytest.approx(across / rate + 4 * 0.04)
    assert seconds(ZONES, topology="servers", codec="int4") == pytest.approx(codes / rate + 0.08)
    # Two, zones or members, send each other all they have, encoded once.
    codes = coded_bytes(GRADIENT, "int4", pair=True)
    found = seconds((2, 2), topology="tree", codec="int4")
    assert found == pytest.approx(codes / rate + 3 * 0.04)
    found = seconds((1, 1), topology="direct", codec="int4")
    assert found == pytest.approx(codes / rate + 0.04)
    assert found == seconds((1, 1), topology="tree", codec="int4")
    assert found == seconds((2,), topology="tree", codec="int4")


def test_rounds_divide_what_an_exchange_costs_and_hide_nothing_of_it() -> None:
    sync = {"topology": "direct", "codec": "int4", "period": 16}
    given = profile(), FOUR, SHARES, ZONES
    found, each = predict(job(sync=sync), *given), predict(job(sync={**sync, "period": 1}), *given)
    codes = ring_bytes(coded_bytes(GRADIENT, "int4"), 4)
    assert found.bytes_per_step == codes // 16
    assert found.exchange_s == pytest.approx(codes / 2.5e6 / 16)
    assert found.step_s == pytest.approx(found.compute_s + codes / 2.5e6 / 16, abs=0.001)
    assert each.exchange_s == pytest.approx(codes / 2.5e6)
    hidden = (1 - PART) * 2 / 3 * SPEED.seconds(2)
    assert each.exposed_s == pytest.approx(codes / 2.5e6 - hidden, abs=0.01)


def test_of_fragments_a_quarter_is_waited_for_and_more_is_sent() -> None:
    sync = {"topology": "direct", "codec": "int4", "period": 16}
    given = profile(), FOUR, SHARES, ZONES
    plain, found = (predict(job(sync={**sync, "stream": n}), *given) for n in (1, 4))
    codes = ring_bytes(coded_bytes(GRADIENT, "int4"), 4)
    assert found.bytes_per_step == int(codes * 1.1875 / 16)
    assert plain.exposed_s is not None
    assert found.exposed_s == pytest.approx(plain.exposed_s - 0.75 * codes / 2.5e6 / 16)


def test_over_a_thin_link_fewer_bytes_are_foretold_to_be_faster_and_said_so() -> None:
    given = job(), profile(), FOUR, SHARES, ZONES
    found = Costs(*given).alternatives()
    steps = [one.predicted.step_s for one in found]
    assert [(o.sync.codec, o.sync.period) for o in found] == [
        ("none", 1),
        ("bf16", 1),
        ("int8", 1),
        ("int4", 1),
        ("int4", 8),
        ("int4", 16),
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 5 * steps[3] > 5 * steps[5]
    nodes = Inventory(nodes=tuple(Node(name=name) for name in "abcd"))
    plan = make(job(), nodes, profile(), compare=True)
    assert plan.alternatives[0].predicted == plan.predicted
    assert "direct, codec int4, period 16: try --set sync=auto" in plan.advice()
    assert [row["sync"] for row in plan.alternative_rows()][:2] == ["exact", "direct, codec bf16"]


def test_over_a_fast_link_there_is_nothing_to_gain() -> None:
    nodes = Inventory(nodes=tuple(Node(name=name) for name in "abcd"))
    plan = make(job(), nodes, profile(link_bytes_per_s=1e10), compare=True)
    assert plan.alternatives
    assert plan.advice() == ""
    made: Plan = make(job(errors={"on_error": "skip"}), nodes, profile(), compare=True)
    assert max(one.sync.period for one in made.alternatives) == 1  # no rounds with that


def test_alternatives_need_a_link_and_another_worker() -> None:
    assert Costs(job(), profile(link_bytes_per_s=None), FOUR, SHARES, ZONES).alternatives() == ()
    assert Costs(job(), profile(), (SPEED,), (8,), (1,)).alternatives() == ()


def test_what_was_seen_is_surer_than_what_was_tried() -> None:
    tried = predict(job(), profile(overhead_s=None), FOUR, SHARES, ZONES)
    seen = predict(job(), profile(overhead_s=0.003), FOUR, SHARES, ZONES)
    assert tried.low_s < seen.low_s < tried.step_s == seen.step_s < seen.high_s < tried.high_s


def test_servers_take_and_give_as_much() -> None:
    assert sent_bytes(SyncPoint(topology="servers"), 1000, ZONES) == 1000


@pytest.mark.parametrize("fields", [{"round_trip_s": -1.0}, {"overhead_s": -0.1}])
def test_seconds_are_no_less_than_none(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="seconds >= 0"):
        profile(**fields)
