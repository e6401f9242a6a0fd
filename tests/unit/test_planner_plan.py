"""The plan of a run: who, where, how much, and what it is predicted to cost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from raycloud.errors import PlacementError, RunDirectoryError, SpecError
from raycloud.planner.cost import LargestPass, Profile, exposed_seconds
from raycloud.planner.inventory import PRICE_LABEL, WATTS_LABEL, ZONE_LABEL, Inventory, Node
from raycloud.planner.plan import Plan, from_json, make
from raycloud.planner.roles import Roles
from raycloud.planner.speed import Speed
from raycloud.spec import Job
from raycloud.spec.sizes import coded_bytes, ring_bytes

TWO_NODES = Inventory(nodes=(Node(name="a", cpus=2), Node(name="b", cpus=1)))
FAST, SLOW = Speed(fixed_s=0.25, micro_batch_s=0.25), Speed(fixed_s=0.5, micro_batch_s=0.5)

ZONED = {"n1": "a", "n2": "b", "n3": "a", "n4": "b"}

GOLDEN = """\
{
  "format": 2,
  "job": "run",
  "members": [
    {
      "member": 0,
      "node": "a",
      "share": 6,
      "speed": {
        "fixed_s": 0.25,
        "micro_batch_s": 0.25,
        "max_micro_batches": null
      },
      "host": ""
    },
    {
      "member": 1,
      "node": "b",
      "share": 2,
      "speed": {
        "fixed_s": 0.5,
        "micro_batch_s": 0.5,
        "max_micro_batches": 4
      },
      "host": ""
    }
  ],
  "micro_batches": 8,
  "global_batch": 32,
  "steps_per_epoch": 32,
  "sync": {
    "period": 1,
    "topology": "ring",
    "staleness": 0,
    "codec": "none",
    "ratio": null,
    "stream": 1
  },
  "predicted": {
    "step_s": 1.90625,
    "samples_per_s": 16.78688524590164,
    "compute_s": 1.75,
    "exchange_s": 0.25,
    "bytes_per_step": 16777216,
    "exposed_s": 0.03125,
    "low_s": 1.7784090909090906,
    "high_s": 2.0997222222222223
  },
  "parameters": 4194304,
  "gradient_bytes": 16777216,
  "state_bytes": 50331648,
  "steps": 10,
  "price_per_hour": null,
  "alternatives": [],
  "servers": []
}
"""


def job(**fields: Any) -> Job:
    """A job, as small as one can be."""
    return Job(**{"task": "tasks.toy:Toy", "steps": 10, **fields})


def profile(*speeds: Speed, **fields: Any) -> Profile:
    """A model of four million parameters."""
    sizes = {
        "samples": 1000,
        "parameters": 2**22,
        "gradient_bytes": 2**24,
        "state_bytes": 3 * 2**24,
    }
    return Profile(speeds=speeds or (FAST,), **{**sizes, **fields})


def golden_plan() -> Plan:
    """The plan behind `GOLDEN`."""
    slow = Speed(fixed_s=0.5, micro_batch_s=0.5, max_micro_batches=4)
    measured = profile(FAST, slow, link_bytes_per_s=float(2**26), overhead_s=0.125)
    return make(job(), TWO_NODES, measured)


def test_what_memory_holds_is_told_where_it_is_known() -> None:
    made = replace(golden_plan(), largest=LargestPass(samples=96, tried=64, sample_bytes=1000))
    assert from_json(made.to_json()) == made
    rows = {row["quantity"]: row for row in made.prediction_rows()}
    assert rows["pass_samples"]["value"] == 96
    assert "foretold from passes of up to 64" in rows["pass_samples"]["note"]
    assert "pass_samples" not in {row["quantity"] for row in golden_plan().prediction_rows()}


def test_the_file_is_as_it_always_was() -> None:
    assert golden_plan().to_json() == GOLDEN


def test_a_written_plan_reads_back_the_same() -> None:
    assert from_json(GOLDEN) == golden_plan()


def test_a_plan_of_the_first_format_reads_back() -> None:
    record = json.loads(GOLDEN)
    for field in ("alternatives", "steps", "price_per_hour"):
        del record[field]
    del record["members"][0]["host"]
    for field in ("exposed_s", "low_s", "high_s"):
        del record["predicted"][field]
    found = from_json(json.dumps({**record, "format": 1}))
    assert found.members == golden_plan().members
    assert found.predicted.step_s == golden_plan().predicted.step_s
    assert (found.predicted.exposed_s, found.alternatives, found.steps) == (None, (), 0)


def test_same_input_same_plan() -> None:
    shuffled = Inventory(nodes=tuple(reversed(TWO_NODES.nodes)))
    one = make(job(), TWO_NODES, profile(FAST, SLOW))
    assert make(job(), TWO_NODES, profile(FAST, SLOW)) == one
    assert make(job(), shuffled, profile(FAST, SLOW)) == one


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "is not a plan"),
        ("[]", "is not a plan"),
        ("{}", "is not a plan"),
        (GOLDEN.replace('"format": 2', '"format": 3'), "format 3, this version reads 1 to 2"),
        (GOLDEN.replace('"share"', '"part"'), "does not hold a plan"),
        (GOLDEN.replace('"fixed_s": 0.25', '"fixed_s": -1'), "does not hold a plan"),
        (json.dumps({"format": 2, "members": []}), "does not hold a plan"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, says: str) -> None:
    with pytest.raises(RunDirectoryError, match=says):
        from_json(text)


@pytest.mark.parametrize(
    ("elastic", "nodes"),
    [
        ({"min_workers": 1, "max_workers": 1}, ("a",)),
        ({"min_workers": 1, "max_workers": 9}, ("a", "a", "b")),
        ({"min_workers": 2, "max_workers": 2}, ("a", "b")),
        ({"min_workers": 2, "max_workers": 2, "shares": (7, 1)}, ("a", "b")),
    ],
    ids=["one asked", "as many as fit", "exactly two", "fixed"],
)
def test_as_many_members_as_fit_up_to_the_most(
    elastic: dict[str, Any], nodes: tuple[str, ...]
) -> None:
    plan = make(job(elastic=elastic), TWO_NODES, profile())
    assert tuple(member.node for member in plan.members) == nodes
    assert tuple(member.member for member in plan.members) == tuple(range(len(nodes)))
    assert sum(plan.shares) == plan.micro_batches == 8


def test_no_more_workers_than_micro_batches() -> None:
    plan = make(job(global_batch=8, elastic={"max_workers": 3}), TWO_NODES, profile())
    assert plan.shares == (1, 1)


def test_fixed_and_equal_shares_are_as_asked() -> None:
    fixed = {"min_workers": 2, "max_workers": 2, "shares": (7, 1)}
    assert make(job(elastic=fixed), TWO_NODES, profile(SLOW, FAST)).shares == (7, 1)
    assert make(job(elastic={"shares": "equal"}), TWO_NODES, profile(SLOW, FAST)).shares == (4, 4)


def test_shares_that_are_hardly_better_stay_equal() -> None:
    nearly = Speed(fixed_s=0.25, micro_batch_s=0.26)
    assert make(job(), TWO_NODES, profile(FAST, nearly)).shares == (4, 4)


def test_members_that_run_already_are_taken_as_they_are() -> None:
    plan = make(job(), Inventory(nodes=()), profile(SLOW, FAST), placed={3: "x", 1: "y"})
    assert [(x.member, x.node, x.share) for x in plan.members] == [(3, "x", 2), (1, "y", 6)]


def test_in_a_tree_the_links_between_zones_count() -> None:
    nodes = (Node(name=name, cpus=1, labels={ZONE_LABEL: zone}) for name, zone in ZONED.items())
    there, link = Inventory(nodes=tuple(nodes)), float(2**20)
    elastic = {"min_workers": 4, "max_workers": 4}
    ring, tree = (
        make(
            job(elastic=elastic, sync={"topology": topology, "codec": codec}),
            there,
            profile(link_bytes_per_s=link),
        ).predicted
        for topology, codec in (("ring", "none"), ("tree", "int4"))
    )
    codes = coded_bytes(2**24, "int4", pair=True)
    assert tree.bytes_per_step == (2 * (2**24 + 2 * codes) + 2 * codes) // 4
    assert tree.exchange_s == codes / link
    assert ring.exchange_s is not None
    assert ring.exchange_s > 11.2 * tree.exchange_s
    one = Inventory(nodes=TWO_NODES.nodes[:1])
    alone = make(job(sync={"topology": "tree"}), one, profile()).predicted
    assert alone.bytes_per_step == ring_bytes(2**24, 2)


def test_by_servers_an_update_goes_once_a_period_beside_computing() -> None:
    sync = {"topology": "servers", "staleness": 2, "codec": "int4", "period": 4}
    asked = job(sync=sync, servers=2)
    codes = coded_bytes(2**24, "int4")
    fast = profile(link_bytes_per_s=float(2**40), overhead_s=0.0)
    found = make(asked, TWO_NODES, fast).predicted
    assert found.bytes_per_step == codes // 4
    assert found.step_s == pytest.approx(found.compute_s, abs=0.01)  # but for encoding
    slow = make(asked, TWO_NODES, profile(link_bytes_per_s=float(2**10))).predicted
    assert slow.exchange_s == (codes // 4) / 2**10
    assert slow.step_s == pytest.approx(slow.exchange_s, rel=1e-3)


def test_servers_that_sum_are_held_against_a_ring() -> None:
    """On the workers' own nodes they send as much; on others alone each worker sends once."""
    asked = job(
        sync={"topology": "servers"}, servers=4, elastic={"min_workers": 4, "max_workers": 4}
    )
    link, four = float(2**20), Inventory(nodes=tuple(Node(name=n, cpus=1) for n in "abcd"))
    found = make(asked, four, profile(link_bytes_per_s=link))
    assert found.predicted.bytes_per_step == 2**24
    assert found.predicted.exchange_s == 1.5 * 2**24 / link
    assert found.servers == ("a", "b", "c", "d")
    assert from_json(found.to_json()) == found
    [row] = [row for row in found.prediction_rows() if row["quantity"] == "busiest_node_bytes"]
    assert row["value"] == ring_bytes(2**24, 4)
    assert "less with servers on 3 nodes or more that have no worker" in row["note"]
    apart = make(asked, four, profile(), placed=dict(enumerate("efgh")))
    [row] = [row for row in apart.prediction_rows() if row["quantity"] == "busiest_node_bytes"]
    assert row["value"] == 2**24
    assert "each worker sends its gradient once" in row["note"]
    few = make(job(sync={"topology": "servers"}, servers=2), TWO_NODES, profile())
    [row] = [row for row in few.prediction_rows() if row["quantity"] == "busiest_node_bytes"]
    assert "no servers send less" in row["note"]


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(PlacementError, match="4 workers"):
        make(job(elastic={"min_workers": 4, "max_workers": 4}), TWO_NODES, profile())


def test_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        make(job(drop_last=True), TWO_NODES, profile(samples=31))
    assert caught.value.field == "drop_last"


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 4), (True, 3)])
def test_the_short_last_step_counts_unless_dropped(drop_last: bool, steps: int) -> None:
    plan = make(job(drop_last=drop_last), TWO_NODES, profile(samples=100))
    assert plan.steps_per_epoch == steps


def test_shares_beyond_a_workers_memory_are_refused() -> None:
    small = Speed(fixed_s=0.25, micro_batch_s=0.25, max_micro_batches=3)
    with pytest.raises(PlacementError, match="worker 1 holds at most 3"):
        make(job(elastic={"shares": "equal"}), TWO_NODES, profile(FAST, small))
    assert make(job(), TWO_NODES, profile(FAST, small)).shares == (5, 3)


def test_speeds_are_one_or_one_per_member() -> None:
    with pytest.raises(ValueError, match="2 members need as many speeds"):
        make(job(), TWO_NODES, profile(FAST, FAST, FAST))


def test_fixed_shares_want_their_members() -> None:
    fixed = {"min_workers": 2, "max_workers": 2, "shares": (7, 1)}
    with pytest.raises(ValueError, match="do not match the shares"):
        make(job(elastic=fixed), TWO_NODES, profile(), placed={0: "a"})


@pytest.mark.parametrize(
    "fields",
    [{"samples": 0}, {"state_bytes": -1}, {"link_bytes_per_s": 0.0}, {"link_bytes_per_s": -1.0}],
)
def test_a_profile_is_measured(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="takes"):
        profile(**fields)


def test_a_profile_has_speeds_above_zero() -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        profile(Speed(fixed_s=0.0, micro_batch_s=0.0))


def test_without_a_link_rate_the_exchange_is_unknown_and_said_so() -> None:
    plan = make(job(), TWO_NODES, profile(FAST, overhead_s=0.0), compare=True)
    assert plan.predicted.exchange_s is None
    assert plan.alternatives == ()
    assert plan.predicted.step_s == plan.predicted.compute_s == 1.25
    assert plan.predicted.samples_per_s == 32 / 1.25
    assert plan.predicted.bytes_per_step == 2**24
    notes = {row["quantity"]: row["note"] for row in plan.prediction_rows()}
    assert notes["step_s"].endswith("without the exchange")
    assert "no link rate was measured" in notes["exchange_s"]


def test_one_worker_exchanges_nothing() -> None:
    alone = profile(FAST, overhead_s=0.0)
    plan = make(job(elastic={"max_workers": 1}), TWO_NODES, alone)
    assert plan.predicted.exchange_s == 0.0
    assert plan.predicted.bytes_per_step == 0
    assert plan.predicted.step_s == plan.predicted.compute_s


def test_the_exchange_hides_behind_the_last_backward() -> None:
    def step_s(link_bytes_per_s: float) -> float:
        measured = profile(FAST, link_bytes_per_s=link_bytes_per_s, overhead_s=0.0)
        return make(asked, TWO_NODES, measured).predicted.step_s

    thin = 2.0**24  # the exchange takes 1 s; 2/3 of the fused share's 1.25 s is hidden
    asked = job()
    assert step_s(thin) == pytest.approx(1.25 + 1.0 - 1.25 * 7 / 8 * 2 / 3)
    asked = job(fuse=1)  # the last micro-batch, with its fixed part
    assert step_s(thin) == pytest.approx(1.25 + 1.0 - 0.5 * 7 / 8 * 2 / 3)
    thick = 2.0**30  # all but the last of eight buckets is hidden
    assert step_s(thick) == pytest.approx(1.25 + 2**-6 / 8)


def test_ring_bytes_are_the_formula_rounded_up() -> None:
    assert [ring_bytes(10, members) for members in (1, 2, 3, 4)] == [0, 10, 14, 15]
    with pytest.raises(ValueError, match="no ring of 0 members"):
        ring_bytes(10, 0)


def test_a_model_without_gradients_has_nothing_to_hide() -> None:
    nothing = exposed_seconds(0.0, last_pass_s=1.0, bucket_bytes=1024, gradient_bytes=0)
    assert nothing == 0.0


def test_rows_are_plain_values() -> None:
    plan = golden_plan()
    assert plan.member_rows()[1] == {
        "member": 1,
        "node": "b",
        "share": 2,
        "samples": 8,
        "compute_s": 1.5,
    }
    rows = {row["quantity"]: row for row in plan.prediction_rows()}
    assert rows["compute_s"]["note"] == "2.5 with equal shares"
    assert rows["exchange_s"]["value"] == 0.25
    assert json.loads(json.dumps(plan.prediction_rows())) == plan.prediction_rows()


LABELLED = Inventory(
    nodes=tuple(
        Node(name=n, cpus=1, labels={WATTS_LABEL: watts, PRICE_LABEL: "2"})
        for n, watts in (("a", "80"), ("b", "40"), ("c", "10"))
    )
)


def test_a_node_s_own_word_of_its_cores_counts_where_ray_hands_out_few() -> None:
    two = {"placed": {0: "a", 1: "b"}}
    by_ray = make(job(), LABELLED, profile(), **two)
    told = make(job(), LABELLED, profile(core_watts={"a": 10.0, "b": 5.0}), **two)
    assert by_ray.watts is not None
    assert told.watts == pytest.approx(by_ray.watts / 8)  # of eight cores
    assert by_ray.price_per_hour == 4.0
    assert make(job(), TWO_NODES, profile()).watts is None


def test_collators_cost_money_and_energy() -> None:
    alone = make(job(), LABELLED, profile(), placed={0: "a", 1: "b"})
    roles = Roles(
        trainers=("a", "b"), collators=("c", "c"), step_s=1.0, feed_s=0.5, together_s=2.0, bound=2.0
    )
    fed = make(job(), LABELLED, profile(), placed={0: "a", 1: "b"}, roles=roles)
    assert (fed.price_per_hour, alone.price_per_hour) == (6.0, 4.0)
    assert fed.watts is not None
    assert alone.watts is not None
    assert fed.watts - alone.watts == pytest.approx(2 * 10.0 * 0.5 / fed.predicted.step_s)
