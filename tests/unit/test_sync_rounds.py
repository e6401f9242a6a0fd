"""Rounds: bit for bit what one process simulates; a member that is lost in one is not missed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raycloud.errors import DivergedError, TaskError
from raycloud.spec import Job
from tests.lockstep import NetTask, difference, job, plain_loop
from tests.rounds import RoundFleet, simulated_rounds

ENDS = (4, 8, 10, 12, 16, 20)  # one of them early


def in_rounds(codec: str = "none", outer: str = "mean", **more: Any) -> Job:
    sync = {"period": 4, "codec": codec, "outer": outer, "bucket_bytes": 1024}
    if codec == "topk":
        sync["ratio"] = 8
    return job(sync=sync, **more)


def single(**more: Any) -> NetTask:
    return NetTask(double=False, **more)


def trained(asked: Job, task: NetTask, shares: tuple[float, ...]) -> RoundFleet:
    fleet = RoundFleet(asked, task, shares)
    step = 0
    for end in ENDS:
        fleet.round(step, end)
        step = end
    return fleet


def alike(fleet: RoundFleet) -> bool:
    """All members have the same parameters and buffers."""
    return all(difference(one.model, fleet.replicas[0].model) == 0.0 for one in fleet.replicas)


@pytest.mark.parametrize("outer", ["mean", "nesterov"])
@pytest.mark.parametrize("codec", ["none", "int4", "topk"])
@pytest.mark.parametrize("shares", [(8,), (5, 3), (4.5625, 3.4375), (3, 3, 2)])
def test_it_is_bit_for_bit_what_one_process_simulates(
    shares: tuple[float, ...], codec: str, outer: str
) -> None:
    asked = in_rounds(codec, outer)
    fleet = trained(asked, single(), shares)
    expected = simulated_rounds(asked, single(), shares, ENDS)
    for one in fleet.replicas:
        assert difference(one.model, expected[0]) == 0.0


def test_a_single_member_makes_the_steps_of_a_plain_loop() -> None:
    fleet = trained(in_rounds(), NetTask(), (8,))
    plain = plain_loop(job(), NetTask(), ENDS[-1])
    assert difference(fleet.replicas[0].model, plain) <= 1e-12


def test_it_comes_near_what_is_exact() -> None:
    fleet = trained(in_rounds(), single(), (3, 3, 2))
    plain = plain_loop(job(), single(), ENDS[-1])
    assert 0.0 < difference(fleet.replicas[0].model, plain) < 0.1


@pytest.mark.parametrize("shares", [(5, 3), (8, 0), (3, 3, 2)])
def test_running_statistics_are_those_of_all_micro_batches(shares: tuple[float, ...]) -> None:
    """As where nothing but the first layer's input decides them: it is frozen here."""

    class Frozen(NetTask):
        def model(self) -> Any:
            net: Any = super().model()
            net.first.requires_grad_(False)
            return net

        def optimizer(self, model: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    fleet = trained(in_rounds(), Frozen(norm=True), shares)
    plain = plain_loop(job(), Frozen(norm=True), ENDS[-1])
    assert alike(fleet)
    for name in ("running_mean", "running_var"):
        own, wanted = (getattr(m.norm, name) for m in (fleet.replicas[0].model, plain))
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)
    assert int(fleet.replicas[0].model.norm.num_batches_tracked) == int(  # type: ignore[union-attr] - a module
        plain.norm.num_batches_tracked  # type: ignore[union-attr] - a module
    )


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("codec", ["none", "int4", "topk"])
@pytest.mark.parametrize(
    ("after", "shares"),
    [*((after, (3, 3, 2)) for after in (0, 1, 3, 4)), (3, (3.0625, 2.6875, 2.25))],
)
def test_a_member_that_is_lost_in_a_round_is_not_missed(
    after: int,
    shares: tuple[float, ...],
    codec: str,
    norm: bool,
) -> None:
    fleet = RoundFleet(in_rounds(codec), single(norm=norm), shares)
    fleet.round(0, 4)
    fleet.lose_in_round(1, 4, 8, after=after)
    fleet.round(8, 12)
    assert alike(fleet)
    plain = plain_loop(job(), single(norm=norm), 12)
    assert difference(fleet.replicas[0].model, plain) < 0.2
    rates = {replica.learning_rate for replica in fleet.replicas}
    undisturbed = RoundFleet(in_rounds(codec), single(norm=norm), (8,))
    for step in (0, 4, 8):
        undisturbed.round(step, step + 4)
    assert rates == {undisturbed.replicas[0].learning_rate}


def kept_by(fleet: RoundFleet) -> torch.Tensor:
    """The sum of what all members keep."""
    own = [r.residual.own_tensors()["flat"].double() for r in fleet.replicas if r.residual]
    return torch.stack(own).sum(0)


def test_what_top_k_leaves_out_is_kept() -> None:
    """All that members have moved is in the weights or in somebody's residual."""
    fleet = RoundFleet(in_rounds("topk"), single(), (3, 3, 2))
    for step in range(0, 20, 4):
        before = kept_by(fleet)
        whole = fleet.whole(step, step + 4)
        names = [n for bucket in fleet.replicas[0].gradients.buckets for n in bucket.names]
        start = {n: p.double() for n, p in fleet.replicas[0].model.named_parameters()}
        start = {n: p.detach().clone() for n, p in start.items()}
        fleet.compute_steps(whole)
        weights = [r.kept.weight for r in fleet.replicas if r.kept is not None]
        moved = sum(
            torch.cat([(start[n] - dict(r.model.named_parameters())[n]).flatten() for n in names])
            * (weight / sum(weights))
            for r, weight in zip(fleet.replicas, weights, strict=True)
        )
        fleet.exchange(whole)
        now = dict(fleet.replicas[0].model.named_parameters())
        applied = torch.cat([(start[n] - now[n]).flatten() for n in names])
        left = kept_by(fleet)
        assert float(left.norm()) > 0.0
        torch.testing.assert_close(applied + left, moved + before, rtol=0, atol=1e-6)


def test_steps_before_rounds_are_not_left_out() -> None:
    """They go as int4 would have them, bit for bit."""
    ends = []
    for codec in ("topk", "int4"):
        fleet = RoundFleet(in_rounds(codec), single(), (5, 3))
        for step in range(5):
            fleet.step(step)
        sent = [one.gradients.residual for one in fleet.replicas]
        assert all(one is not None and not one.of_updates for one in sent)
        ends.append(fleet.replicas[0].model)
    assert difference(*ends) == 0.0


def test_a_member_without_a_share_has_what_the_others_have() -> None:
    fleet = trained(in_rounds("int4"), single(), (5, 3, 0))
    assert alike(fleet)
    assert len({replica.learning_rate for replica in fleet.replicas}) == 1


@pytest.mark.parametrize("shares", [(5, 3), (4.5625, 3.4375), (5, 3, 0)])
def test_moments_become_the_mean_by_weight(shares: tuple[float, ...]) -> None:
    fleet = trained(in_rounds(), single(), shares)
    before = [r.trains.moments() for r in fleet.replicas]
    before = [{name: t.clone() for name, t in one.items()} for one in before]
    weights = [r.rounds.weight for r in fleet.replicas if r.rounds is not None]
    name = "optimizer/last.weight/exp_avg"
    wanted = sum(w * one[name] for w, one in zip(weights, before, strict=False) if name in one)
    fleet.average()
    after = [r.trains.moments() for r in fleet.replicas]
    assert all(one.keys() == after[0].keys() for one in after)
    for key in after[0]:
        assert all(torch.equal(one[key], after[0][key]) for one in after)
    torch.testing.assert_close(after[0][name], wanted / sum(weights), rtol=1e-4, atol=1e-7)
    assert float(after[0]["optimizer/last.weight/step"]) == ENDS[-1]


def test_a_gradient_that_is_not_finite_ends_it() -> None:
    class Broken(NetTask):
        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return super().loss(model, batch) * float("inf")

    fleet = RoundFleet(in_rounds(), NetTask(), (8,))
    whole = fleet.whole(0, 4)
    fleet.replicas[0].forward._task = Broken()
    with pytest.raises(DivergedError, match="own gradient is nan at step 0"):
        fleet.compute_steps(whole)


def test_what_an_optimizer_moves_beside_its_parameters_is_refused() -> None:
    class Teaching(NetTask):
        def model(self) -> Any:
            net: Any = super().model()
            net.teacher = torch.nn.Linear(2, 2).requires_grad_(False)
            return net

        def optimizer(self, model: Any) -> torch.optim.Optimizer:
            optimizer = super().optimizer(model)

            def after_step(*_: Any) -> None:
                with torch.no_grad():
                    model.teacher.weight.mul_(0.9)

            optimizer.register_step_post_hook(after_step)
            return optimizer

    fleet = RoundFleet(in_rounds(), Teaching(), (8,))
    with pytest.raises(TaskError, match=r"'teacher\.weight', which it does not train"):
        fleet.round(0, 4)


@pytest.mark.parametrize("shares", [(5, 3), (3, 3, 2), (5, 3, 0)])
def test_from_a_checkpoint_as_many_members_go_on_bit_by_bit(shares: tuple[float, ...]) -> None:
    asked = in_rounds("int4", "nesterov")
    fleet = RoundFleet(asked, single(), shares)
    for step in (0, 4, 8):
        fleet.round(step, step + 4)
    first = fleet.replicas[0]
    state = {n: t for n, t in first.state.tensors().items() if n not in first.trains.moments()}
    for number, replica in enumerate(fleet.replicas):
        state |= replica.state.own_tensors(number)
    state, values = {n: t.clone() for n, t in state.items()}, first.state.values()
    resumed = RoundFleet(asked, single(), shares)
    resumed.position = fleet.position
    for replica in resumed.replicas:
        replica.state.check_fits({name: tuple(t.shape) for name, t in state.items()}, values)
        replica.state.load({name: t.clone() for name, t in state.items()}, values)
        replica.statistics.settle()
    fleet.round(12, 16)
    resumed.round(12, 16)
    for one, other in zip(fleet.replicas, resumed.replicas, strict=True):
        a, b = one.state.tensors(), other.state.tensors()
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []
    alone = RoundFleet(asked, single(), (8,)).replicas[0]
    alone.state.load(state, values)
    name = "optimizer/last.weight/exp_avg"
    weights = [float(state[f"outer/weight/{k}"]) for k in range(len(shares))]
    every = [(w, state.get(f"outer/inner/{name}/{k}")) for k, w in enumerate(weights)]
    there = [(w, t) for w, t in every if t is not None]
    wanted = sum(w * t for w, t in there) / sum(w for w, _ in there)
    torch.testing.assert_close(alone.trains.moments()[name], wanted, rtol=1e-5, atol=1e-8)
    exact = RoundFleet(job(), single(), (8,)).replicas[0]
    exact.state.load(state, values)  # what has no rounds begins with moments of its own
    assert not exact.trains.moments()
