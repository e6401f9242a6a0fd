"""The first promise with backups: whoever is late, cut off or lost, and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from raycloud.recovery.quorum import adopt
from raycloud.step.speculation import Backing
from tests.backed import Backed
from tests.lockstep import NetTask, difference, job, plain_loop
from tests.tiers import examples

STEPS = 8
WITH = [(4, 4), (3, 3, 2), (2, 2, 2, 2)]
SHARES = [(4, 4), (5, 3), (3, 3, 2), (2, 2, 2, 2), (1, 7), (8, 0), (0, 4, 4)]


def check(fleet: Backed, task: NetTask) -> None:
    reference = plain_loop(fleet.job, task, STEPS)
    for replica in fleet.replicas:
        assert difference(replica.model, reference) <= 1e-9


@pytest.mark.parametrize("norm", [False, True], ids=["layernorm", "batchnorm"])
@pytest.mark.parametrize("most", [1, 3, 8])
def test_who_is_late_is_backed_up_and_the_result_is_the_same(most: int, norm: bool) -> None:
    task = NetTask(norm=norm)
    fleet = Backed(job(), task, (4, 4), most=most, paces_s=(1.0, 10.0))
    fleet.backings[0].own_s = 1.0
    for step in range(STEPS):
        fleet.backed_step(step, 1, {1: 2})
    assert fleet.moved >= STEPS // 2
    check(fleet, task)


def test_a_fused_tail_is_backed_up_as_a_whole() -> None:
    task = NetTask(dropout=0.0, branch=False)  # nothing that a micro-batch decides as a whole
    fleet = Backed(job(), task, (4, 4), most=2, paces_s=(1.0, 10.0), fuse=8)
    fleet.backings[0].own_s = 1.0
    for step in range(STEPS):
        fleet.backed_step(step, 1, {1: 1})
    assert fleet.moved >= STEPS
    check(fleet, task)


def test_nobody_is_backed_up_where_all_are_as_fast() -> None:
    task = NetTask()
    fleet = Backed(job(), task, (4, 4), most=3, paces_s=(1.0, 1.0))
    for step in range(STEPS):
        fleet.backed_step(step, 1, {1: 4})
    assert fleet.moved == 0
    check(fleet, task)


@pytest.mark.parametrize("norm", [False, True], ids=["layernorm", "batchnorm"])
@pytest.mark.parametrize("what", ["dies", "cut"])
def test_a_step_breaks_in_which_one_was_backed_up(what: str, norm: bool) -> None:
    task = NetTask(norm=norm)
    fleet = Backed(job(), task, (3, 3, 2), most=3, paces_s=(1.0, 50.0, 1.0))
    for step in range(STEPS):
        for backing in fleet.backings:
            backing.own_s = 1.0
        if step != 5:
            fleet.backed_step(step, 0, {})
            continue
        fleet.backings[1].own_s = 50.0
        fleet.lines[1].loses = what == "cut"
        before = fleet.moved
        go_on(fleet, step, 1, {1: 1}, (1, 1) if what == "dies" else (-1, -1))
        assert fleet.broke
        assert (fleet.moved > before) == (what == "dies")  # it had counted, for the backup
    check(fleet, task)


class Breaks(NetTask):
    """Its backward pass fails at its end, once, where `next_one` is set."""

    next_one = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.next_one:
            self.next_one = False
            weight = model.first.weight

            def fail(grad: Tensor) -> Tensor:
                hook.remove()
                raise RuntimeError(f"a fault of the machine at {tuple(grad.shape)}")

            hook = weight.register_hook(fail)  # type: ignore[operator, union-attr]
        return super().loss(model, batch)


@pytest.mark.parametrize("norm", [False, True], ids=["layernorm", "batchnorm"])
def test_what_a_backup_cannot_compute_is_left_to_its_owner(norm: bool) -> None:
    task, told = Breaks(norm=norm), list[str]()
    fleet = Backed(job(), task, (4, 4), most=3, paces_s=(1.0, 10.0))
    fleet.replicas[0].notice = lambda what, _: told.append(what)
    fleet.backings[0].own_s = 1.0
    start = Backing.start

    def started(backing: Backing, step: int, index: int, count: int) -> None:
        task.next_one = step == 5
        start(backing, step, index, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backing, "start", started)
        for step in range(STEPS):
            before = fleet.moved
            fleet.backed_step(step, 1, {1: 2})
            if step == 5:
                assert fleet.moved == before
    [what] = told
    assert "left to its owner" in what
    assert fleet.moved > 0
    check(fleet, task)


@pytest.mark.timeout(180)
@examples(15)
@given(data=st.data(), shares=st.sampled_from(SHARES), norm=st.booleans())
def test_whoever_is_late(data: st.DataObject, shares: tuple[int, ...], norm: bool) -> None:
    size, fused = len(shares), not norm and data.draw(st.booleans())
    task = NetTask(norm=norm, dropout=0.0 if fused else 0.2, branch=not fused)
    ranks, points = st.integers(0, size - 1), st.integers(1, 8)
    paces_s = data.draw(st.tuples(*(st.sampled_from([1.0, 5.0, 50.0]) for _ in shares)))
    fuse = data.draw(st.sampled_from([1, 2, 8]))
    most = data.draw(st.integers(1, 8))
    fleet = Backed(job(), task, shares, most=most, paces_s=paces_s, fuse=fuse)
    for step in range(STEPS):
        meets = data.draw(st.dictionaries(ranks, points))
        fleet.backed_step(step, data.draw(ranks), meets)
    check(fleet, task)


@pytest.mark.timeout(180)
@examples(15)
@given(data=st.data(), shares=st.sampled_from(WITH), norm=st.booleans())
def test_whoever_is_lost_or_cut_off(
    data: st.DataObject, shares: tuple[int, ...], norm: bool
) -> None:
    """In each step one dies at some pass, or one's answers to its backup get lost, or neither."""
    task = NetTask(norm=norm)
    most = data.draw(st.integers(1, 4))
    fleet = Backed(job(), task, shares, most=most, paces_s=[1.0] * len(shares))
    for step in range(STEPS):
        size = len(fleet.replicas)
        fleet.paces_s = data.draw(st.tuples(*[st.sampled_from([1.0, 50.0])] * size))
        fleet.back_up()
        late = data.draw(st.integers(0, size - 1))
        meets = {late: data.draw(st.integers(1, 3))}
        what = data.draw(st.sampled_from(["dies", "cut", "nothing"])) if size > 1 else "nothing"
        if what == "nothing":
            fleet.backed_step(step, late, meets)
            continue
        for backing in fleet.backings:
            backing.own_s = 1.0
        if what == "cut":
            fleet.lines[late].loses = True
        dies = (late, data.draw(st.integers(1, 3))) if what == "dies" else (-1, -1)
        go_on(fleet, step, late, meets, dies)
    check(fleet, task)


def go_on(
    fleet: Backed, step: int, late: int, meets: dict[int, int], dies: tuple[int, int]
) -> None:
    """A step that breaks is finished by those that are left, from what they have kept."""
    works = fleet.backed(step, late, meets, dies)
    if not fleet.broke:
        fleet.finish(step, works)
        return
    fleet.hubs[0].cut("the generation is over")
    left = [rank for rank in range(len(works)) if rank != dies[0]]
    have = [-1] * len(works[0].span.micro_batches)
    for at, replica in enumerate(fleet.replicas[rank] for rank in left):
        replica.suspend()
        for k in () if replica.kept is None else replica.kept.micro_batches:
            assert have[k] == -1, f"micro-batch {k} would count twice"
            have[k] = at
    fleet.join([fleet.replicas[r] for r in left], [fleet.shares[r] for r in left])
    fleet.back_up()
    fleet.finish(step, fleet.compute(step, adopted=adopt(have, fleet.shares)))
