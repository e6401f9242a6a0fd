"""The first promise under faults: whoever dies, and when, the result is the single process's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lockstep import Fleet, NetTask, difference, job, plain_loop
from tests.tiers import examples

STEPS = 12
DURING = ["lane", "gradients", "after"]


@pytest.mark.parametrize("norm", [False, True], ids=["layernorm", "batchnorm"])
@pytest.mark.parametrize("during", DURING)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_member_dies_in_a_step(rank: int, during: str, norm: bool) -> None:
    asked, task = job(), NetTask(norm=norm)
    fleet = Fleet(asked, task, (4, 3, 1))
    for step in range(STEPS):
        if step == 5:
            fleet.lose(rank, step, during=during)
        else:
            fleet.step(step)
    reference = plain_loop(asked, task, STEPS)
    assert len(fleet.replicas) == 2
    for replica in fleet.replicas:
        assert difference(replica.model, reference) <= 1e-9


@examples(25)
@given(
    faults=st.lists(
        st.tuples(st.integers(0, STEPS - 1), st.integers(0, 9), st.sampled_from(DURING)),
        min_size=1,
        max_size=3,
        unique_by=lambda fault: fault[0],
    ),
    shares=st.sampled_from([(2, 2, 2, 1, 1), (5, 1, 1, 1, 0), (0, 0, 8, 0, 0)]),
    norm=st.booleans(),
)
def test_members_die_one_after_the_other(
    faults: list[tuple[int, int, str]], shares: tuple[int, ...], norm: bool
) -> None:
    asked, task = job(), NetTask(norm=norm)
    fleet = Fleet(asked, task, shares)
    dies = {step: (which, during) for step, which, during in faults}
    for step in range(STEPS):
        if step in dies:
            which, during = dies[step]
            rank = which % len(fleet.shares)
            if sum(fleet.shares) == fleet.shares[rank]:  # nobody else has a share to go by
                fleet.shares = tuple(1 for _ in fleet.shares)
            fleet.lose(rank, step, during=during)
        else:
            fleet.step(step)
    reference = plain_loop(asked, task, STEPS)
    for replica in fleet.replicas:
        assert difference(replica.model, reference) <= 1e-9
