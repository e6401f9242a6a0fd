"""What fails in a step of a round is computed again, and what fails each time is left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from raycloud.errors import TaskError
from raycloud.order import Position, Round, Steps, round_at
from raycloud.spec import Job
from tests.lockstep import difference, job
from tests.poisoned import Looped, Poisoned, hit, ran
from tests.rounds import simulated_rounds
from tests.sockets import gloo_members, together
from tests.tiers import variants

ENDS = (4, 8, 9)
BAD = (5, 31, 32)  # of 70 samples, 16 a step
SHARES = variants(((3, 0, 4, 1),), ((5, 3),), ((8,),))
EXACT = 1e-9


def in_rounds(on_error: str = "skip") -> Job:
    sync = {"period": 4, "outer": "mean", "warm_steps": 0, "bucket_bytes": 1024}
    return job(sync=sync, errors={"on_error": on_error, "most_skipped": 20})


def clean() -> Poisoned:
    return Poisoned(bad=BAD, how="memory", most=99)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("how", variants("loss", "backward", "batch"))
def test_what_fails_each_time_weighs_nothing(
    tmp_path: Path, how: str, shares: tuple[int, ...]
) -> None:
    asked = in_rounds()
    members = ran(tmp_path, asked, shares, ENDS[-1], bad=BAD, how=how)
    wanted, *_ = simulated_rounds(
        asked, clean(), shares, ENDS, without=lambda m: hit(asked, clean(), m)
    )
    cut = Steps(samples=70, global_batch=asked.global_batch, micro_batch=asked.micro_batch)
    every = round_at(cut, 0, Position(), ENDS[-1])
    left_out = [
        (one.step, m.start, m.stop)
        for one in every.spans
        for m in one.micro_batches
        if hit(asked, clean(), m)
    ]
    for member in members:
        assert difference(member.replica.model, wanted) <= EXACT
        told = [(skip["step"], skip["start"], skip["stop"]) for skip in member.skips()]
        assert told == left_out
    assert len([what for member in members for what in member.notices()]) == len(left_out)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("how", variants("backward", "loss", "batch"))
def test_what_fails_once_is_computed_again(
    tmp_path: Path, how: str, shares: tuple[int, ...]
) -> None:
    asked = in_rounds()
    members = ran(tmp_path, asked, shares, ENDS[-1], bad=BAD, how=how, times=1)
    wanted, *_ = simulated_rounds(asked, clean(), shares, ENDS)
    for member in members:
        assert difference(member.replica.model, wanted) <= EXACT
        assert member.skips() == []


def test_passes_become_smaller_where_memory_runs_out(tmp_path: Path) -> None:
    asked, shares = in_rounds("stop"), (5, 3)
    members = ran(tmp_path, asked, shares, ENDS[-1], bad=BAD, how="memory", most=2)
    wanted, *_ = simulated_rounds(asked, clean(), shares, ENDS)
    for member in members:
        assert difference(member.replica.model, wanted) <= EXACT
        assert member.task.largest <= 2
        assert all("memory ran out" in what for what in member.notices())


def test_by_default_it_ends_the_run_with_the_samples_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"a bad sample, each time, on micro-batch \d+ of step"):
        ran(tmp_path, in_rounds("stop"), (8,), ENDS[-1], bad=BAD, how="loss")


def test_who_goes_on_without_rounds_averages_moments_first(tmp_path: Path) -> None:
    shares = (5, 3)
    before = ran(tmp_path, in_rounds(), shares, ENDS[-1])
    state = before[0].replica.common_tensors()
    for number, one in enumerate(before):
        state |= one.replica.state.own_tensors(number)
    values = before[0].replica.state.values()
    sync = {"period": 4, "warm_steps": 40, "bucket_bytes": 1024}
    made = [Looped(tmp_path, job(sync=sync), Poisoned(), ENDS[-1]) for _ in shares]
    with gloo_members(len(shares)) as gradients, gloo_members(len(shares)) as lanes:
        for one, g in zip(made, gradients, strict=True):
            one.replica.connect(g)
            one.replica.state.load({n: t.clone() for n, t in state.items()}, values)
            assert one.replica.rounds is not None
            assert one.replica.rounds.unlike
        several = zip(made, gradients, lanes, strict=True)
        assert all(together(partial(one.run, g, lane, shares) for one, g, lane in several))
    a, b = (one.replica.state.tensors() for one in made)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_round_numbers_its_micro_batches_through() -> None:
    cut = Steps(samples=10, global_batch=4, micro_batch=2)
    whole = round_at(cut, 0, Position(), 4)
    assert isinstance(whole, Round)
    assert [m.index for m in whole.micro_batches] == list(range(7))
    assert [one.first for one in whole.spans] == [0, 2, 4, 5]
    assert whole.samples == 14
