"""Retry: samples that cannot be computed are left out exactly, alike by all; or the run ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raycloud.commands import Form
from raycloud.errors import DivergedError, TaskError, TransportError
from raycloud.events import MemberDone, MemberLost
from raycloud.order import MicroBatch, Order, Position, Steps, StepSpan
from raycloud.recovery.quorum import adopt
from raycloud.spec import Job
from raycloud.step.contract import raised
from raycloud.worker.loop import Loop
from tests.fellows import Fellows
from tests.live_tasks import Steady
from tests.lockstep import difference, job, plain_loop
from tests.poisoned import Looped, Poisoned, hit, ran
from tests.sockets import gloo_members, together
from tests.tiers import variants

STEPS = 9
BAD = (5, 31, 32)  # of 70 samples, 16 a step
ALLOWED = {"on_error": "skip", "on_nan": "skip", "most_skipped": 20, "most_nan_in_a_row": 9}
SHARES = [(8,), (5, 3), (3, 0, 4, 1)]
EXACT = 1e-9


def lenient(**changes: Any) -> Job:
    return job(**({"errors": ALLOWED} | changes))


def places(asked: Job, bad: Sequence[int]) -> list[tuple[int, MicroBatch]]:
    """The micro-batches with a bad sample, and their steps, as the sequence has them."""
    cut = Steps(samples=70, global_batch=asked.global_batch, micro_batch=asked.micro_batch)
    at, found, task = Position(), [], Poisoned(bad=bad)
    for step in range(STEPS):
        span = cut.span(step, at)
        found += [(step, m) for m in span.micro_batches if hit(asked, task, m)]
        at = cut.after(span)
    return found


def left_out(asked: Job) -> list[tuple[int, int, int]]:
    """Step, start and stop of those of `BAD`."""
    return [(step, m.start, m.stop) for step, m in places(asked, BAD)]


@pytest.mark.parametrize("shares", variants(*((shares,) for shares in reversed(SHARES))), ids=str)
@pytest.mark.parametrize("how", variants("loss", "backward", "batch"))
def test_what_fails_each_time_weighs_nothing(
    tmp_path: Path, how: str, shares: tuple[int, ...]
) -> None:
    asked = lenient()
    members = ran(tmp_path, asked, shares, STEPS, bad=BAD, how=how)
    clean = Poisoned(bad=BAD, how="memory", most=99)
    reference = plain_loop(asked, clean, STEPS, without=lambda m: hit(asked, clean, m))
    assert len(left_out(asked)) == 5  # of three samples, in almost two epochs
    for member in members:
        assert difference(member.replica.model, reference) <= EXACT
        told = [(skip["step"], skip["start"], skip["stop"]) for skip in member.skips()]
        assert told == left_out(asked)
        assert {skip["why"] for skip in member.skips()} == {"error"}
    notices = [what for member in members for what in member.notices()]
    assert len(notices) == 5  # by who was to compute it
    assert all("of the sequence; ids" in what for what in notices)


@pytest.mark.parametrize("shares", variants(*((shares,) for shares in reversed(SHARES))), ids=str)
@pytest.mark.parametrize("how", variants("batch", "loss", "backward"))
def test_what_fails_once_is_computed_again(
    tmp_path: Path, how: str, shares: tuple[int, ...]
) -> None:
    asked = lenient()
    members = ran(tmp_path, asked, shares, STEPS, bad=BAD, how=how, times=1)
    reference = plain_loop(asked, Poisoned(bad=BAD, how="memory", most=99), STEPS)
    for member in members:
        assert difference(member.replica.model, reference) <= EXACT
        assert member.skips() == []
        assert member.notices() == []


def test_what_fails_once_is_computed_again_without_being_asked_for(tmp_path: Path) -> None:
    """That is no skip: the default has it, too."""
    (member,) = ran(tmp_path, job(), (8,), STEPS, bad=BAD, how="backward", times=1)
    reference = plain_loop(job(), Poisoned(bad=BAD, how="memory", most=99), STEPS)
    assert difference(member.replica.model, reference) <= EXACT


def test_statistics_of_the_others_stand_for_what_is_left_out(tmp_path: Path) -> None:
    """The same for any shares; a running average stays one, its weights sum to one."""
    asked = lenient()
    settings = {"bad": BAD, "how": "loss", "norm": True}
    one, *others = (ran(tmp_path, asked, shares, STEPS, **settings)[0] for shares in SHARES)
    for other in others:
        assert difference(one.replica.model, other.replica.model) <= EXACT
    clean = Looped(tmp_path, asked, Poisoned(norm=True), STEPS).replica.model
    assert difference(one.replica.model, clean) > 0


@pytest.mark.parametrize("shares", variants(*((shares,) for shares in reversed(SHARES))), ids=str)
@pytest.mark.parametrize("how", variants("hidden", "nan"))
def test_a_step_that_is_not_finite_changes_nothing(
    tmp_path: Path, how: str, shares: tuple[int, ...]
) -> None:
    asked = lenient()
    members = ran(tmp_path, asked, shares, STEPS, bad=BAD, how=how)
    clean = Poisoned(bad=BAD, how="memory", most=99)

    def bad(span: StepSpan) -> bool:
        return any(hit(asked, clean, m) for m in span.micro_batches)

    reference = plain_loop(asked, clean, STEPS, passed_over=bad)
    for member in members:
        assert difference(member.replica.model, reference) <= EXACT
        skips = member.skips()
        assert [skip["step"] for skip in skips] == sorted({s for s, _, _ in left_out(asked)})
        assert {skip["why"] for skip in skips} == {"nan"}
        assert all(skip["stop"] - skip["start"] in {16, 6} for skip in skips)
    assert len(members[0].notices()) == len(members[0].skips())
    assert not any(member.notices() for member in members[1:])


def alone(root: Path, asked: Job, **settings: Any) -> Looped:
    return ran(root, asked, (8,), STEPS, **settings)[0]


@pytest.mark.parametrize("how", ["loss", "backward"])
def test_by_default_it_ends_the_run_with_the_samples_named(tmp_path: Path, how: str) -> None:
    with pytest.raises(TaskError, match=r"each time, on micro-batch \d of step \d .*ids \d+") as e:
        alone(tmp_path, job(), bad=(5,), how=how)
    assert " 5" in e.value.message.split("ids")[1]
    assert "errors.on_error skip" in e.value.hint
    assert isinstance(e.value.__cause__, ValueError | ArithmeticError)


def test_no_more_is_skipped_than_is_allowed(tmp_path: Path) -> None:
    few = lenient(errors=ALLOWED | {"most_skipped": 3})
    with pytest.raises(TaskError, match=r"errors\.most_skipped = 3 micro-batches were skipped"):
        alone(tmp_path, few, bad=range(70))


def test_a_step_of_which_nothing_is_left_changes_nothing(tmp_path: Path) -> None:
    asked = lenient(global_batch=2, micro_batch=2)
    members = ran(tmp_path, asked, (1, 0), STEPS, bad=range(0, 70, 7))
    clean = Poisoned(bad=range(0, 70, 7), how="memory", most=99)
    reference = plain_loop(asked, clean, STEPS, without=lambda m: hit(asked, clean, m))
    for member in members:
        assert member.skips()
        assert difference(member.replica.model, reference) <= EXACT


def test_steps_in_a_row_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    asked = lenient(errors=ALLOWED | {"most_nan_in_a_row": 2})
    with pytest.raises(DivergedError, match=r"at step 2, and errors.most_nan_in_a_row = 2 steps"):
        alone(tmp_path, asked, bad=range(70), how="nan")
    asked = lenient(errors=ALLOWED | {"most_skipped": 3})
    with pytest.raises(DivergedError, match=r"at step 3, and errors.most_skipped = 3 steps"):
        alone(tmp_path, asked, bad=range(70), how="nan")


@pytest.mark.parametrize("shares", variants(*((shares,) for shares in reversed(SHARES))), ids=str)
@pytest.mark.parametrize("most", variants(2, 5))
def test_passes_become_smaller_where_memory_runs_out(
    tmp_path: Path, shares: tuple[int, ...], most: int
) -> None:
    members = ran(tmp_path, job(), shares, STEPS, how="memory", most=most)
    reference = plain_loop(job(), Poisoned(how="memory", most=99), STEPS)
    for member, share in zip(members, shares, strict=True):
        assert difference(member.replica.model, reference) <= EXACT
        assert member.skips() == []
        assert member.task.largest <= most
        assert bool(member.notices()) == (share * 2 > most)
        assert all("memory ran out" in what for what in member.notices())
        assert len(member.notices()) <= 3
        assert member.replica.fuse * 2 <= most or not member.notices()


@pytest.mark.full(only="memory too little for one micro-batch")
def test_memory_that_is_too_little_for_one_is_an_error_of_that_one(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"can't allocate memory.*each time, on micro-batch 0 of"):
        alone(tmp_path, job(), how="memory", most=1)


@pytest.mark.full(only="skipped as a generation breaks")
def test_what_is_skipped_when_a_generation_breaks_is_told_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three is lost after the step in which another will have to skip something."""
    right = Loop.settle

    def settle(loop: Loop) -> None:
        if (loop.seat.rank, loop.step) != (2, 3):  # it is lost there, not done
            right(loop)

    monkeypatch.setattr(Loop, "settle", settle)
    asked, shares = lenient(), (3, 3, 2)
    where = {i: places(asked, (i,)) for i in range(70)}
    bad = next(i for i, ((step, m), *_) in where.items() if step == 3 and m.index < 3)
    settings: dict[str, Any] = {"bad": (bad,), "how": "backward"}
    steps = (STEPS, STEPS, 3)
    members = [Looped(tmp_path, asked, Poisoned(**settings), many) for many in steps]
    gone, left = threading.Event(), members[:2]

    def run(rank: int, gradients: Any, lane: Any) -> None:
        if rank == 2:
            members[2].run(gradients, lane, shares)
            gone.set()
            return
        with pytest.raises(TransportError):
            members[rank].run(gradients, lane, shares, gone.is_set)

    with gloo_members(3) as gradients, gloo_members(3) as lanes:
        together(partial(run, r, g, lanes[r]) for r, g in enumerate(gradients))
        for transport in (*gradients, *lanes):  # with exchanges under way
            transport.close()
    have = [-1] * 8
    for rank, member in enumerate(left):
        assert member.replica.kept is not None
        for k in member.replica.kept.micro_batches:
            have[k] = rank
    assert members[0].replica.kept is not None
    assert len(members[0].replica.kept.skipped) == 1
    assert have == [0, 0, 0, 1, 1, 1, -1, -1]
    adopted = adopt(have, (3, 3))
    with gloo_members(2) as gradients, gloo_members(2) as lanes:
        several = zip(left, gradients, lanes, strict=True)
        assert all(together(partial(m.run_on, g, lane, (4, 4), adopted) for m, g, lane in several))
    clean = Poisoned(bad=(bad,), how="memory", most=99)
    reference = plain_loop(asked, clean, STEPS, without=lambda m: hit(asked, clean, m))
    for member in left:
        assert difference(member.replica.model, reference) <= EXACT
        assert [skip["step"] for skip in member.skips()] == [step for step, _ in where[bad]]


def test_what_is_skipped_is_part_of_the_state(tmp_path: Path) -> None:
    member = alone(tmp_path, lenient(), bad=BAD)
    state, other = member.replica.state, Looped(tmp_path, lenient(), Poisoned(), STEPS)
    skips = member.replica.history.skips
    other.replica.state.load(state.tensors(), state.values())
    assert other.replica.history.skips == skips
    assert len(skips) == 5
    other.replica.state.load(state.tensors(), {**state.values(), "skips": []})
    assert other.replica.history.skips == ()


@pytest.mark.parametrize("shares", variants(*((shares,) for shares in reversed(SHARES))), ids=str)
def test_samples_that_are_not_finite_are_named_by_every_member(
    tmp_path: Path, shares: tuple[int, ...]
) -> None:
    asked, bad = job(), (31, 32)
    cut, order = (
        Steps(samples=70, global_batch=16, micro_batch=2),
        Order(samples=70, seed=asked.seed),
    )
    at = Position()
    while True:
        span = cut.span(0, at)
        first = [int(i) for i in order.ids(span.epoch, span.start, span.stop) if i in bad]
        if first:
            break
        at = cut.after(span)
    made = [Looped(tmp_path, asked, Poisoned(bad=bad, how="data"), STEPS) for _ in shares]
    told: list[DivergedError] = []

    def run(one: Looped, gradients: Any, lane: Any) -> None:
        with pytest.raises(DivergedError) as caught:
            one.run(gradients, lane, shares)
        told.append(caught.value)

    with gloo_members(len(shares)) as gradients, gloo_members(len(shares)) as lanes:
        several = zip(made, gradients, lanes, strict=True)
        together(partial(run, one, g, lane) for one, g, lane in several)
    named = f"the data holds values that are not finite, in samples {', '.join(map(str, first))}"
    assert [error.message.endswith(named) for error in told] == [True] * len(shares)
    assert {error.hint for error in told} == {told[0].hint}
    assert "learning rate" not in told[0].hint


ECC = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nSearch for ...")


class Calm(Steady):
    """Members share the generator of torch here: nothing is drawn."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0, branch=False)


def _in_a_pass() -> Exception:
    error = raised("the backward pass", ECC)
    error.__cause__ = ECC
    return error


@pytest.mark.parametrize("error", [ECC, _in_a_pass()], ids=["between passes", "in a pass"])
def test_its_member_is_lost_and_the_others_go_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop._one_step

    def failing(loop: Loop) -> None:
        if (loop.seat.member, loop.step) == (1, 2):
            raise error
        step(loop)

    monkeypatch.setattr(Loop, "_one_step", failing)
    asked = job(task=Calm, steps=4)
    fellows = Fellows(tmp_path, asked, 2, joining=0, task=Calm)
    fellows.form(Form(generation=0, members=(0, 1), shares=(4, 4), step=0))
    fellows.until(MemberLost, [1])
    (lost,) = fellows.of(MemberLost, 1)
    assert lost.reason == "its GPU failed: CUDA error: uncorrectable ECC error encountered"
    fellows.form(Form(generation=1, members=(0,), shares=(8,), step=2))
    fellows.until(MemberDone, [0])
    reference = plain_loop(asked, Calm(), 4)
    assert difference(fellows.replica(0).model, reference) <= 1e-12
