"""Roles: never worse than all doing all, and never better than the bound of any division."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from raycloud.errors import PlacementError
from raycloud.planner.cost import Profile
from raycloud.planner.described import read_table
from raycloud.planner.inventory import Inventory, Node
from raycloud.planner.plan import choose_roles, from_json, make, speeds_in
from raycloud.planner.roles import Machine, Roles, Work, choose, fed_seconds
from raycloud.planner.shares import fit_shares, step_seconds
from raycloud.planner.speed import Speed
from raycloud.report.summary_text import plan_text
from raycloud.spec import Job, RoleResources

SECONDS = some.floats(min_value=0.01, max_value=10.0)


@some.composite
def machines(draw: Any, most: int = 7) -> list[Machine]:
    found = []
    for number in range(draw(some.integers(1, most))):
        workers = draw(some.integers(0 if number else 1, 2))
        beside = draw(some.integers(0, 2))
        speed = Speed(fixed_s=draw(some.sampled_from([0.0, 0.5])), micro_batch_s=draw(SECONDS))
        one = Machine(
            node=f"n{number}",
            collate_s=draw(SECONDS),
            workers=workers,
            speed=speed if workers else None,
            processes=workers + beside,
            beside=beside if workers else 0,
        )
        found.append(one)
    return found


WORKS = some.builds(
    Work,
    micro_batches=some.integers(1, 40),
    threads=some.integers(1, 2),
    cpus=some.just(1),
    on_gpu=some.booleans(),
)


def together_s(some_of: Sequence[Machine], work: Work) -> float:
    speeds = [work.alone(one) for one in some_of for _ in range(one.workers)]
    return step_seconds(speeds, fit_shares(speeds, work.micro_batches))


@given(machines(), WORKS)
def test_no_worse_than_all_training_and_making_batches_and_no_better_than_the_bound(
    found: list[Machine], work: Work
) -> None:
    roles = choose(found, work)
    able = [one for one in found if one.workers]
    assert roles.step_s <= together_s(able, work) * (1 + 1e-9)
    assert roles.together_s <= together_s(able, work) * (1 + 1e-9)
    assert roles.gain <= roles.bound * (1 + 1e-9)
    assert roles.gain >= 1 - 1e-9
    assert roles == choose(found[::-1], work)  # whatever their order is


@given(machines(most=5), WORKS)
def test_of_a_few_machines_the_best_division_is_found(found: list[Machine], work: Work) -> None:
    able = [one for one in found if one.workers]
    best = min(
        together_s(subset, work)
        for count in range(1, len(able) + 1)
        for subset in itertools.combinations(able, count)
    )
    for count in range(1, len(able) + 1):
        for subset in itertools.combinations(able, count):
            names = {one.node for one in subset}
            speeds = [one.speed for one in subset for _ in range(one.workers)]
            rate = sum(
                (one.beside if one.node in names else one.processes) / one.collate_s
                for one in found
            )
            if rate:
                shares = fit_shares(speeds, work.micro_batches)  # type: ignore[arg-type]
                helps = sum(one.workers / one.collate_s for one in subset)
                step_s = fed_seconds(
                    step_seconds(speeds, shares),  # type: ignore[arg-type]
                    feed_s=work.micro_batches / rate,
                    help_s=work.micro_batches / helps,
                )
                best = min(best, step_s)
    assert choose(found, work).step_s <= best / 0.95 * (1 + 1e-9)


@given(machines(), WORKS)
def test_collators_have_places_and_those_that_train_do_too(
    found: list[Machine], work: Work
) -> None:
    roles = choose(found, work)
    for one in found:
        trains = roles.trainers.count(one.node)
        assert trains in {0, one.workers}
        assert roles.collators.count(one.node) <= (one.beside if trains else one.processes)


def cpu(node: str, train_s: float, collate_s: float = 1.0) -> Machine:
    speed = Speed(fixed_s=0.0, micro_batch_s=train_s)
    return Machine(node=node, collate_s=collate_s, workers=1, speed=speed, processes=1)


FOUR = [cpu("a0", 1.0), cpu("a1", 1.0), cpu("b0", 9.0), cpu("b1", 9.0)]


def test_fast_nodes_train_and_slow_ones_make_batches() -> None:
    roles = choose(FOUR, Work(micro_batches=24))
    assert (roles.trainers, roles.collators) == (("a0", "a1"), ("b0", "b1"))
    assert roles.step_s == pytest.approx(12.0)
    assert roles.together_s == pytest.approx(20.0)  # 10 and 2 micro-batches at 2 and 10 seconds
    assert roles.bound == pytest.approx(20.0 / 12.0)
    assert roles.why == (
        "2 nodes train, and 2 collators on 2 make their batches: a step takes 12 s (making batches "
        "decides) in place of 20 s where each worker makes its own batches, 1.67 times as fast; no "
        "division of the work is more than 1.67 times as fast as that"
    )


def test_workers_that_would_wait_for_batches_make_some() -> None:
    """Two train 24 micro-batches in 12 s and help for 4; 16 and 8 are made at a second each."""
    slow = [cpu("a0", 1.0, 1.0), cpu("a1", 1.0, 1.0), cpu("b0", 9.0, 2.0), cpu("b1", 9.0, 2.0)]
    roles = choose(slow, Work(micro_batches=24))
    assert (roles.trainers, roles.collators) == (("a0", "a1"), ("b0", "b1"))
    assert (roles.feed_s, roles.help_s) == (24.0, 12.0)
    assert roles.step_s == pytest.approx(16.0)
    assert "(making batches decides, workers help)" in roles.why


def test_nodes_without_room_for_workers_make_batches() -> None:
    gpu = Machine(
        node="gpu",
        collate_s=1.0,
        workers=1,
        speed=Speed(fixed_s=0.0, micro_batch_s=0.1),
        processes=1,
    )
    cpus = Machine(node="cpus", collate_s=1.0, processes=16)
    roles = choose([gpu, cpus], Work(micro_batches=10, on_gpu=True))
    assert roles.trainers == ("gpu",)
    assert set(roles.collators) == {"cpus"}
    assert len(roles.collators) == 15  # half as many again as would just do
    assert roles.together_s == pytest.approx(10.0)
    assert roles.step_s == pytest.approx(1.0)


def test_where_batches_cost_little_each_makes_its_own() -> None:
    roles = choose([cpu(f"n{i}", 1.0, 0.01) for i in range(4)], Work(micro_batches=24))
    assert roles.collators == ()
    assert len(roles.trainers) == 4
    assert roles.why.startswith("workers make their own batches: a step takes 6.06 s")


def test_the_range_of_workers_is_kept() -> None:
    assert len(choose(FOUR, Work(micro_batches=24, least=3)).trainers) >= 3
    assert choose(FOUR, Work(micro_batches=24, most=1)).trainers == ("a0",)
    with pytest.raises(PlacementError, match="5 workers do not fit: there is room for 4"):
        choose(FOUR, Work(micro_batches=24, least=5))


def test_shares_that_are_fixed_say_how_many_train() -> None:
    roles = choose(FOUR, Work(micro_batches=24, shares=(12, 12)))
    assert roles.trainers == ("a0", "a1")


def test_many_nodes_take_their_roles_by_comparative_advantage() -> None:
    many = [cpu(f"{kind}{i:03}", s) for kind, s in (("a", 1.0), ("b", 9.0)) for i in range(100)]
    roles = choose(many, Work(micro_batches=2400))
    assert {node[0] for node in roles.trainers} == {"a"}
    assert {node[0] for node in roles.collators} == {"b"}
    assert roles.step_s == pytest.approx(24.0)


def test_a_cluster_that_is_only_described_has_roles_too() -> None:
    table = "name,count,cpus,gpus,speed\ngpu,1,2,1,20\ncpu,2,8,0,1\n"
    told = read_table(table, "nodes.csv")
    measured = Profile(
        samples=96,
        parameters=1,
        gradient_bytes=4,
        state_bytes=8,
        speeds=(Speed(fixed_s=0.0, micro_batch_s=4.0),),
    )
    found = told.machines(measured, 1.0, RoleResources(cpus=1, gpus=1))
    assert [(one.workers, one.processes, one.beside) for one in found] == [
        (1, 2, 1),
        (0, 8, 0),
        (0, 8, 0),
    ]
    roles = choose(found, Work(micro_batches=24, on_gpu=True))
    assert roles.trainers == (found[0].node,)
    assert roles.step_s == pytest.approx(24 * 0.2)  # 5 collators keep it busy
    assert roles.together_s == pytest.approx(24.0)


def test_of_thousands_of_nodes_roles_are_found_soon() -> None:
    many = [cpu(f"{kind}{i:05}", s) for kind, s in (("a", 1.0), ("b", 9.0)) for i in range(1000)]
    roles = choose(many, Work(micro_batches=24_000))
    assert len(roles.trainers) == len(roles.collators) == 1000
    assert roles.step_s == pytest.approx(24.0)


def test_a_machine_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(ValueError, match="collate_s > 0"):
        Machine(node="a", collate_s=0.0)
    with pytest.raises(ValueError, match="a speed where workers fit"):
        Machine(node="a", collate_s=1.0, workers=1)
    assert isinstance(choose(FOUR, Work(micro_batches=1)), Roles)


def test_a_plan_tells_of_roles_and_keeps_them() -> None:
    job = Job(
        task="tests.lockstep:NetTask",
        steps=10,
        global_batch=96,
        micro_batch=4,
        elastic={"max_workers": 4},  # type: ignore[arg-type]
        data={"collators": "auto"},  # type: ignore[arg-type]
    )
    nodes = Inventory(nodes=tuple(Node(name=one.node) for one in FOUR))
    speeds = (Speed(fixed_s=0.0, micro_batch_s=1.0),)
    sizes = {"samples": 960, "parameters": 100, "gradient_bytes": 400, "state_bytes": 800}
    profile = Profile(speeds=speeds, link_bytes_per_s=1e6, **sizes)  # type: ignore[arg-type]
    roles = choose_roles(job, nodes, profile, FOUR)
    assert roles.collators == ("b0", "b1")
    elastic = job.elastic.model_copy(update={"max_workers": 2})
    made = make(
        job.model_copy(update={"elastic": elastic}),
        nodes,
        replace(profile, speeds=speeds_in(job, roles)),
        placed=dict(enumerate(roles.trainers)),
        roles=roles,
    )
    assert made.shares == (12, 12)
    assert made.predicted.step_s == pytest.approx(roles.step_s, rel=1e-6)
    assert made.predicted.step_s > roles.feed_s == pytest.approx(12.0)
    assert from_json(made.to_json()) == made
    text = plan_text(made)
    assert roles.why in text
    assert "collate_s" in text
    alone = replace(roles, collators=())
    assert [one.micro_batch_s for one in speeds_in(job, alone)] == [2.0, 2.0]
