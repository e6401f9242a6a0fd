"""Exchange within one thread: complete when the last member has called."""

from __future__ import annotations

import pytest
import torch

from raycloud.errors import TransportError
from raycloud.sync.loopback import Loopback
from raycloud.sync.transport import Abandoned, finish
from tests.lockstep import never


def test_a_sum_is_there_when_the_last_member_has_called() -> None:
    hub = Loopback(3)
    tensors = [torch.tensor([float(rank), 1.0]) for rank in range(3)]
    works = [hub.members[rank].all_reduce(tensors[rank]) for rank in (2, 0)]
    assert [work.wait(0.0) for work in works] == [False, False]
    works.append(hub.members[1].all_reduce(tensors[1]))
    assert [work.wait(0.0) for work in works] == [True, True, True]
    assert all(tensor.tolist() == [3.0, 3.0] for tensor in tensors)


def test_members_may_be_several_exchanges_apart() -> None:
    hub = Loopback(2)
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    works = [hub.members[0].all_reduce(first), hub.members[0].broadcast(second, 1)]
    mine, theirs = torch.tensor([10.0]), torch.tensor([20.0])
    hub.members[1].all_reduce(mine)
    assert [work.wait(0.0) for work in works] == [True, False]
    hub.members[1].broadcast(theirs, 1)
    assert works[1].wait(0.0)
    assert (first.item(), second.item(), mine.item()) == (11.0, 20.0, 11.0)


def test_the_sum_runs_in_rank_order_whoever_calls_first() -> None:
    values = [1e16, 1.0, -1e16]  # (1e16 + 1) - 1e16 == 0 in float64, in this order only
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        hub = Loopback(3)
        tensors = [torch.tensor([value], dtype=torch.float64) for value in values]
        for rank in order:
            hub.members[rank].all_reduce(tensors[rank])
        assert [tensor.item() for tensor in tensors] == [0.0, 0.0, 0.0]


def test_what_is_complete_when_it_is_cut_stays_so() -> None:
    hub = Loopback(2)
    done = [member.all_reduce(torch.ones(1)) for member in hub.members]
    mine = torch.ones(1)
    open_still = hub.members[0].all_reduce(mine)
    hub.cut("the cable is out")
    late = hub.members[1].all_reduce(torch.ones(1))
    assert all(work.wait(0.0) for work in done)
    for work in (open_still, late):
        with pytest.raises(TransportError, match="the cable is out"):
            work.wait(0.0)
    assert mine.tolist() == [1.0]


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_different_tensors_are_refused(other: torch.Tensor) -> None:
    hub = Loopback(2)
    hub.members[0].all_reduce(torch.ones(2))
    with pytest.raises(TransportError, match="different tensors"):
        hub.members[1].all_reduce(other)


def test_finish_looks_up_between_waits() -> None:
    hub = Loopback(2)
    work = hub.members[0].all_reduce(torch.ones(1))
    looks: list[None] = []

    def abandoned() -> bool:
        looks.append(None)
        if len(looks) == 3:
            hub.members[1].all_reduce(torch.ones(1))
        return False

    finish(work, abandoned)
    assert len(looks) == 3
    finish(work, never)
    with pytest.raises(Abandoned):
        finish(hub.members[0].all_reduce(torch.ones(1)), lambda: True)
