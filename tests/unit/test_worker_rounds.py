"""Rounds of a member's loop: where they end, and what happens there and nowhere else."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raycloud.commands import Halt, Save
from raycloud.errors import TaskError
from raycloud.events import ChangeApplied, EvaluationPart, Noticed, PartWritten, StepsCommitted
from raycloud.net.lane import Lane
from raycloud.order import Position, Steps, round_at
from raycloud.recovery.quorum import NOBODY
from raycloud.spec import Job
from raycloud.sync.period import Choice
from raycloud.worker import period as worker_period
from raycloud.worker.context import round_ends
from raycloud.worker.transition import _dealt
from tests.fragments import FragmentFleet
from tests.lockstep import NetTask, difference, job
from tests.loopback import Loopback
from tests.rounds import RoundFleet
from tests.unit.test_worker_loop import STEPS, Alone, Growing
from tests.unit.test_worker_plateau import Plateau
from tests.unit.test_worker_plateau import _looped as looped
from tests.unit.test_worker_plateau import _together as in_time


def in_rounds(warm_steps: int | str = 0, period: int | str = 4, **more: Any) -> Job:
    sync = {"period": period, "outer": "nesterov", "warm_steps": warm_steps}
    return job(sync={**sync, "bucket_bytes": 1024}, **more)


def streamed() -> Job:
    sync = {"period": 2, "outer": "nesterov", "warm_steps": 0, "stream": 2, "bucket_bytes": 1024}
    return job(sync=sync)


def ends(asked: Job) -> list[int]:
    found = [0]
    while found[-1] < STEPS:
        found.append(round_ends(asked, asked.sync_point.period).after(found[-1], STEPS))
    return found[1:]


def test_a_round_ends_where_something_reads_the_state(tmp_path: Path) -> None:
    asked = in_rounds(checkpoint={"every_steps": 6}, evaluate={"every_steps": 5})
    assert ends(asked) == [3, 5, 6, 9]
    alone = Alone(tmp_path, asked)
    assert alone.run()
    assert alone.steps_of(PartWritten) == [6, 9]
    assert alone.steps_of(EvaluationPart) == [5, 9]
    fleet, step = RoundFleet(asked, NetTask(), (8,)), 0
    for end in ends(asked):
        fleet.round(step, end)
        step = end
    assert difference(alone.replica.model, fleet.replicas[0].model) == 0.0


@pytest.mark.parametrize(("warm_steps", "wanted"), [(3, 3), ("auto", 7), (20, STEPS)])
def test_the_first_steps_are_exchanged_one_by_one(
    warm_steps: int | str, wanted: int, tmp_path: Path
) -> None:
    asked = in_rounds(warm_steps)
    assert ends(asked) == [*range(1, wanted + 1), *(e for e in (4, 8, 9) if e > wanted)]
    alone = Alone(tmp_path, asked)
    assert alone.run()
    fleet, step = RoundFleet(asked, NetTask(), (8,)), 0
    for end in ends(asked):
        if end <= wanted:
            fleet.step(step)
        else:
            fleet.round(step, end)
        step = end
    assert difference(alone.replica.model, fleet.replicas[0].model) == 0.0


def test_a_chosen_period_holds_from_the_next_exchange_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker_period, "choose", lambda now, _: (Choice(now.number + 1, 4, 16), "as asked")
    )
    monkeypatch.setattr(worker_period, "_FIRST_LOOK_STEPS", 2)
    alone = Alone(tmp_path, in_rounds(period="auto"))
    assert alone.run()
    fleet = RoundFleet(in_rounds(), NetTask(), (8,))
    fleet.step(0)
    fleet.step(1)
    for step, end in ((2, 4), (4, 8), (8, 9)):
        fleet.round(step, end)
    assert difference(alone.replica.model, fleet.replicas[0].model) == 0.0
    [told] = alone.of(Noticed)
    assert told.what == "sync.period auto: rounds of 4 steps from step 2 on: as asked"
    assert told.detail == {"period": 4, "step": 2, "generation": 1}  # nothing was seen, for once
    resumed = Alone(tmp_path, in_rounds(period="auto"))
    resumed.replica.state.load(alone.replica.state.tensors(), alone.replica.state.values())
    assert resumed.replica.period == 4


def test_the_momentum_is_of_as_many_steps_as_a_round(tmp_path: Path) -> None:
    rounds = Alone(tmp_path, in_rounds()).replica.rounds
    assert rounds is not None
    momenta = list(rounds.tensors().values())
    for number, (period, size) in enumerate([(8, 2.0), (2, 0.25), (1, 0.0), (4, 0.0)], 1):
        for momentum in momenta:
            momentum.fill_(1.0)
        before = rounds.choice
        rounds.take(Choice(number, period, 16))
        assert all(bool((momentum == size).all()) for momentum in momenta)
        rounds.take(before)  # an older one
        assert rounds.choice.period == period


@pytest.mark.parametrize(
    "more",
    [
        {"errors": {"on_nan": "rollback"}},
        {"errors": {"on_error": "skip"}},
        {"elastic": {"backup_micro_batches": 1}},
    ],
)
def test_where_rounds_cannot_be_their_length_is_not_chosen(more: dict[str, Any]) -> None:
    asked = job(sync={"period": "auto"}, **more)
    assert (asked.sync_point.period, asked.most_period, asked.warm_steps) == (1, 1, 0)


def test_it_tells_each_step_once(tmp_path: Path) -> None:
    alone = Alone(tmp_path, in_rounds())
    alone.run()
    reports = alone.of(StepsCommitted)
    assert [r.first_step for r in reports] == [0, *[r.last_step for r in reports[:-1]]]
    assert reports[0].last_step == 4
    assert reports[-1].last_step == STEPS
    assert sum(r.samples for r in reports) == 4 * 16 + 6 + 4 * 16
    assert sum(r.computed for r in reports) == 4 * 8 + 3 + 4 * 8
    assert not any(math.isnan(r.loss) or math.isnan(r.grad_norm) for r in reports)


def test_changes_take_effect_between_rounds(tmp_path: Path) -> None:
    alone = Alone(tmp_path, in_rounds())
    alone.changes.prepare(1, Save())
    alone.changes.prepare(2, Halt(reason="asked"))
    assert not alone.run()
    applied = [(one.change, one.step) for one in alone.of(ChangeApplied)]
    assert applied == [(1, 4), (2, 8)]
    assert alone.steps_of(PartWritten) == [4, 8]


def travelling(tmp_path: Path, asked: Job, task: NetTask | None = None) -> Alone:
    """A loop in whose rounds fragments travel, as a meeting would have it."""
    alone = Alone(tmp_path, asked, task)
    fragments, lane = alone.replica.fragments, Lane(Loopback(1).members[0])
    assert fragments is not None
    changes = alone.changes
    fragments.enter(lane, 0, mine=True, travels=True, behind=lambda: not changes.next_at_hand)
    alone.loop.take_period()
    return alone


def test_a_round_with_fragments_is_four_periods_long(tmp_path: Path) -> None:
    alone = travelling(tmp_path, streamed())
    assert alone.run()
    fleet = FragmentFleet(streamed(), NetTask(), (8,))
    fleet.round(0, 8)
    fleet.round(8, 9)
    assert difference(alone.replica.model, fleet.replicas[0].model) == 0.0


@pytest.mark.parametrize(("norm", "ends"), [(False, [2, 4]), (True, [8, 9])])
def test_changes_end_a_round_with_fragments_early(
    norm: bool, ends: list[int], tmp_path: Path
) -> None:
    """After the turn that follows the one at which all hold it; not with running averages."""
    alone = travelling(tmp_path, streamed(), NetTask(norm=norm))
    alone.changes.prepare(1, Save())
    alone.changes.prepare(2, Halt(reason="asked"))
    assert not alone.run() or norm
    applied = [(one.change, one.step) for one in alone.of(ChangeApplied)]
    assert applied == [(1, ends[0]), (2, ends[1])][: len(applied)]
    assert [one.step for one in alone.of(PartWritten)] == ends
    reports = alone.of(StepsCommitted)
    assert [r.first_step for r in reports] == [0, *[r.last_step for r in reports[:-1]]]


def test_data_that_grows_in_a_round_is_taken_up_by_a_later_epoch(tmp_path: Path) -> None:
    sync = {"period": 4, "warm_steps": 0, "bucket_bytes": 1024}
    alone = Growing(tmp_path, steps=None, epochs=3, sync=sync)
    assert alone.run()
    # All hold it at the end of the first round; in force from step 6 on, told where a round begins.
    assert alone.of(ChangeApplied) == [ChangeApplied(member=6, change=1, step=8)]
    taken = alone.task.taken
    assert Counter(taken[:70]) == Counter(taken[70:140]) == Counter(range(70))
    assert Counter(taken[140:]) == Counter(range(90))
    assert alone.of(StepsCommitted)[-1].last_step == 16


def test_a_schedule_by_what_is_measured_goes_on_between_rounds(tmp_path: Path) -> None:
    every = {"every_steps": 2}
    asked = in_rounds(period=2, task=Plateau, evaluate=every, checkpoint=every)
    made = [looped(tmp_path, value, asked) for value in (1.0, 3.0)]
    in_time(made)
    rates = {one.replica.learning_rate for one in made}
    assert rates == {1.5e-3}  # two measurings were no better than the first
    assert difference(made[0].replica.model, made[1].replica.model) == 0.0


def test_an_optimizer_with_averages_of_its_own_is_refused(tmp_path: Path) -> None:
    class Averaging(NetTask):
        def optimizer(self, model: Any) -> Any:
            optimizer: Any = super().optimizer(model)
            optimizer.train = optimizer.eval = lambda: None
            return optimizer

    with pytest.raises(TaskError, match="AdamW keeps averages of the parameters itself"):
        Alone(tmp_path, in_rounds(), Averaging())


def test_what_nobody_has_of_a_round_is_dealt_step_by_step() -> None:
    """Each survivor makes each step: it is no step of a single one, with all of its batch."""
    whole = round_at(Steps(samples=64, global_batch=16, micro_batch=2), 0, Position(), 3)
    first = [0, 0, 0, 1, 1, 1, NOBODY, NOBODY]
    dealt = _dealt(whole, [*first, *[NOBODY] * 16], (5, 3))
    assert dealt[0] == (6, 8, 9, 10, 11, 12, 16, 17, 18, 19, 20)
    assert dealt[1] == (7, 13, 14, 15, 21, 22, 23)


def test_an_optimizer_that_keeps_what_cannot_be_averaged_is_refused(tmp_path: Path) -> None:
    class Counting(NetTask):
        def optimizer(self, model: Any) -> Any:
            optimizer = super().optimizer(model)

            def count(changed: Any, *_: Any) -> None:
                for of in changed.state.values():
                    of["seen"] = of.get("seen", 0) + 1

            optimizer.register_step_post_hook(count)
            return optimizer

    with pytest.raises(TaskError, match="AdamW keeps 'seen', of type int"):
        Alone(tmp_path / "rounds", in_rounds(), Counting()).run()
    assert Alone(tmp_path / "steps", job(), Counting()).run()


@pytest.mark.parametrize("choice", [(1, 0, 16), (1, 32, 16), "144", (1, 4), (1, 2.5, 4), None])
def test_an_altered_choice_in_a_checkpoint_is_refused(choice: Any, tmp_path: Path) -> None:
    rounds = Alone(tmp_path, in_rounds(period="auto")).replica.rounds
    assert rounds is not None
    with pytest.raises(TaskError, match="the checkpoint has rounds of"):
        rounds.check_fits({}, {"choice": choice})
    rounds.check_fits({}, {"choice": [1, 4, 16]})
    rounds.check_fits({}, {})
