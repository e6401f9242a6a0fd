"""The first promise: any number of workers and any shares give the single-process result."""

from __future__ import annotations

import pytest
import torch

from tests.lockstep import Fleet, NetTask, difference, job, plain_loop
from tests.tiers import variants

SHARES = [((8,),), ((5, 2, 1),), ((8, 0, 0),), ((4, 4),), ((5, 3),), ((2, 2, 2, 1, 1),)]


@pytest.mark.parametrize("shares", variants(*SHARES, fast=3), ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["layernorm", "batchnorm"])
def test_float64_adamw_with_dropout_is_the_single_process(
    shares: tuple[int, ...], norm: bool
) -> None:
    asked, task = job(), NetTask(norm=norm)
    fleet = Fleet(asked, task, shares)
    for step in range(50):
        fleet.step(step)
    reference = plain_loop(asked, task, 50)
    for replica in fleet.replicas:
        assert difference(replica.model, reference) <= 1e-9


@pytest.mark.parametrize("shares", variants(*SHARES[1:]), ids=str)
def test_float32_differs_no_more_than_rounding_does(shares: tuple[int, ...]) -> None:
    asked, task = job(), NetTask(double=False, sgd=True)
    fleet = Fleet(asked, task, shares)
    for step in range(50):
        fleet.step(step)
    reference = plain_loop(asked, task, 50)
    rounding = difference(plain_loop(asked, task, 50, backwards=True), reference)
    assert rounding > 0
    for replica in fleet.replicas:
        assert difference(replica.model, reference) <= 3 * rounding


def test_all_replicas_end_bitwise_the_same() -> None:
    fleet = Fleet(job(), NetTask(double=False, norm=True), (5, 2, 1))
    for step in range(10):
        fleet.step(step)
    first = fleet.replicas[0].state.tensors()
    for replica in fleet.replicas[1:]:
        for name, tensor in replica.state.tensors().items():
            assert torch.equal(tensor, first[name]), name


def test_fused_passes_are_exact_without_randomness() -> None:
    asked, task = job(), NetTask(dropout=0.0, branch=False)
    fused, single = Fleet(asked, task, (5, 3), fuse=8), Fleet(asked, task, (8,))
    for step in range(20):
        fused.step(step)
        single.step(step)
    assert fused.replicas[0].fuse > 1
    assert difference(fused.replicas[0].model, single.replicas[0].model) <= 1e-9
