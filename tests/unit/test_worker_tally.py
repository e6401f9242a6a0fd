"""Committed steps are added up into reports; losses come a step later."""

from __future__ import annotations

import math

from raycloud.clock import VirtualClock
from raycloud.order import Position
from raycloud.worker.tally import StepCount, Tally


def counted(step: int, **changes: float) -> StepCount:
    values: dict[str, float] = {
        "generation": 1,
        "weight": 10.0,
        "samples": 8,
        "micro_batches": 2,
        "norm": 0.5 + step,
        "learning_rate": 0.1 / (1 + step),
        "compute_s": 1.0,
        "data_s": 0.25,
        "exchange_s": 0.5,
        "bytes_sent": 100,
        "bytes_dense": 400,
    }
    fields = values | changes
    return StepCount(step=step, after=Position(epoch=1, offset=8 * step), **fields)  # type: ignore[arg-type]


def tally() -> tuple[Tally, VirtualClock]:
    clock = VirtualClock(100.0)
    return Tally(member=3, clock=clock), clock


def test_nothing_counted_is_no_report() -> None:
    empty, clock = tally()
    assert empty.report() is None
    empty.add_loss(1.0, 2.0)
    clock.advance(3.0)
    assert empty.report() is None
    empty.add(counted(0))
    made = empty.report()
    assert made is not None
    assert (made.loss, made.wall_s) == (1.0, 3.0)  # nothing was lost on the way
    assert empty.report() is None


def test_sums_and_lasts() -> None:
    sums, clock = tally()
    for step in (4, 5, 6):
        clock.advance(2.0)
        sums.add(counted(step, generation=step))
    made = sums.report()
    assert made is not None
    assert (made.member, made.generation, made.first_step, made.last_step) == (3, 6, 4, 7)
    assert (made.epoch, made.offset) == (1, 48)
    assert (made.weight, made.samples, made.micro_batches) == (30.0, 24, 6)
    assert (made.grad_norm, made.learning_rate) == (6.5, 0.1 / 7)
    assert (made.compute_s, made.data_s, made.exchange_s) == (3.0, 0.75, 1.5)
    assert (made.bytes_sent, made.bytes_dense) == (300, 1200)
    assert (made.wall_s, made.cpu_s) == (6.0, 6.0)


def test_a_report_has_the_losses_that_became_known_since_the_last() -> None:
    lags, _ = tally()
    lags.add(counted(0))
    first = lags.report()
    assert first is not None
    assert math.isnan(first.loss)  # of step 0, not known yet
    lags.add_loss(4.0, 1.0)  # of step 0
    lags.add(counted(1))
    lags.add_loss(1.0, 3.0)  # of step 1
    lags.add(counted(2))
    second = lags.report()
    assert second is not None
    assert second.loss == (4.0 * 1.0 + 1.0 * 3.0) / 4.0
    lags.add(counted(3))
    third = lags.report()
    assert third is not None
    assert third.loss == second.loss  # none became known: the last one stands


def test_age_is_since_the_last_report() -> None:
    aging, clock = tally()
    clock.advance(0.75)
    assert aging.age_s == 0.75
    assert aging.report() is None
    assert aging.age_s == 0.75
    aging.add(counted(0))
    aging.report()
    assert aging.age_s == 0.0
