"""The model of updates, and the arithmetic of many steps at once."""

from __future__ import annotations

import numpy as np
import pytest

from raycloud.order import EpochSizes, Position, Steps
from raycloud.simulate.lockstep import (
    MASK,
    Lockstep,
    each,
    parts,
    pieces,
    total,
    undisturbed,
)


def group(cut, shares, **fields):
    values = {"formed_as": 0, "generation": 0, "first_step": 0, "step": 0, "at": Position()}
    values |= {"value": 0, "begun_s": 10.0, "step_s": 0.5} | fields
    return Lockstep(cut=cut, members=tuple(range(len(shares))), shares=shares, **values)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shares", [(6,), (1, 5), (2, 0, 4)])
@pytest.mark.parametrize("samples", [17, 18, 40])
def test_many_steps_at_once_are_those_of_one_loop(drop_last, shares, samples):
    cut = Steps(samples=samples, global_batch=17, micro_batch=3, drop_last=drop_last)
    sizes = EpochSizes(samples)
    due = undisturbed(range(60), sizes=sizes, global_batch=17, drop_last=drop_last)
    one, step = group(cut, shares), 0
    for steps in (1, 2, 7, 1, 30, 11):
        one.commit(steps)
        step += steps
        assert (one.step, one.value) == (step, due[step][0])


def test_a_step_is_the_sum_of_its_micro_batches():
    cut = Steps(samples=40, global_batch=17, micro_batch=3)
    (piece,) = pieces(cut, 5, Position(epoch=2, offset=34), 1)
    whole = parts(piece, np.array([0, piece.samples]))
    assert total(each(piece, 3)) == total(whole)
    assert len(each(piece, 3)) == 2
    assert total(each(piece, 3)[:1]) != total(whole)


def test_what_others_have_kept_is_not_computed_again():
    cut = Steps(samples=40, global_batch=12, micro_batch=2)
    plain = group(cut, (3, 3))
    plain.commit(2)
    adopted = group(cut, (3, 3), adopted=[[0, 5, 1], [2, 3, 4]], fresh=[1, 3])
    adopted.commit(2)
    assert (adopted.value, adopted.at) == (plain.value, plain.at)
    assert adopted.micro.tolist() == [4, 6]


def test_time_goes_by_in_whole_steps_up_to_the_barrier():
    one = group(Steps(samples=40, global_batch=4, micro_batch=1), (2, 2), barrier=7)
    one.advance(9.0)
    assert one.step == 0
    one.advance(11.3)
    assert (one.step, one.begun_s) == (2, 11.0)
    assert one.barrier_s == 13.5
    one.stalled_s = 12.2
    one.advance(99.0)
    assert one.step == 4
    one.stalled_s = None
    one.advance(99.0)
    assert (one.step, one.useful_s) == (7, 3.5)


def test_another_order_is_another_model():
    values = [
        undisturbed([3], sizes=EpochSizes(s), global_batch=4, drop_last=False)[3][0]
        for s in (8, 9, 10)
    ]
    assert len(set(values)) == 3
    assert all(0 <= value <= MASK for value in values)
