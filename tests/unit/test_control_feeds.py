"""Shares where data comes slowly, and what is learnt of that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raycloud.control.shares import Feeds, Resharing
from tests.control_events import ready
from tests.control_job import control, report, training


class Fed:
    """Two members who compute alike, and exchange for 1 s; the second's data comes slowly.

    Each report is of a step. `steps` are the seconds of all so far, `seen` changed shares.
    """

    def __init__(self):
        self.resharing = Resharing(control()._state.settings)
        for member in (0, 1):
            self.resharing.know(ready(member))
        self.shares, self.generation, self.step, self.now_s = (4, 4), 0, 0, 0.0
        self.steps, self.seen = [], []

    def go(self, steps, feed_s):
        for _ in range(steps):
            computing = [0.1 * share for share in self.shares]
            waits_s = max(0.0, feed_s * self.shares[1] - computing[1] - 1.0)
            ends_s = computing[0], computing[1] + waits_s
            wall_s = 1.0 + max(ends_s)
            for member, data_s in ((0, 0.0), (1, waits_s)):
                if not self.shares[member]:
                    continue
                told = report(
                    training(), member, self.step, self.step + 1, share=self.shares[member]
                )
                exchange_s = wall_s - ends_s[member]
                self.resharing.observe(
                    replace(
                        told, generation=self.generation, wall_s=wall_s, data_s=data_s,
                        exchange_s=exchange_s,
                    )
                )  # fmt: skip
            self.step, self.now_s = self.step + 1, self.now_s + wall_s
            self.steps.append(wall_s)
            better = self.resharing.look(
                group=(0, 1), shares=self.shares, step=self.step, now_s=self.now_s
            )
            if better is not None:
                self.shares, self.generation = better, self.generation + 1
                self.seen.append(better)


@pytest.mark.parametrize("feed_s", [0.36, 0.4, 0.45, 0.47, 0.5, 0.6, 1.0])
def test_who_waits_for_data_gets_what_it_can_be_fed(feed_s):
    """Now and then it is tried again, ever less often: in 1,000 steps a few times."""
    fed = Fed()
    fed.go(1000, feed_s)
    best_s = min(
        1.0 + max(0.1 * (8 - share), 0.1 * share, feed_s * share - 1.0) for share in range(1, 8)
    )
    assert sum(fed.steps[100:]) <= 1.05 * 900 * best_s  # a gain of 5% is worth a change
    assert len(fed.seen) <= 13
    assert fed.resharing.slow_feeds((0, 1)) is None or feed_s > 0.35


def test_whose_data_comes_fast_again_has_its_share_again():
    fed = Fed()
    fed.go(40, 1.0)
    assert fed.shares == (7, 1)
    fed.go(200, 0.1)
    assert fed.shares == (4, 4)
    fed = Fed()
    fed.go(40, 4.0)  # one would hold up all for long
    assert fed.shares == (8, 0)
    fed.go(300, 0.1)
    assert fed.shares == (4, 4)


def told(member, step, **changes):
    return replace(report(training(), member, step, step + 1), **changes)


def test_what_is_seen_right_after_a_change_of_shares_or_once_tells_nothing_of_a_feed():
    feeds = Feeds()
    for step in range(6):
        feeds.observe(told(1, step, wall_s=2.0, data_s=1.0, exchange_s=0.6))
        assert (feeds.micro_batch_s((0, 1)) is None) == (step < 4)
        assert feeds.beside_s((0, 1)) == (0.6 if step > 2 else 0.0)
    assert feeds.micro_batch_s((0, 1)).tolist() == [0.0, 0.5]
    assert feeds.micro_batch_s((0,)) is None
    assert feeds.said((0, 1)).detail == {"member 1": "0.5 s a micro-batch"}
    assert feeds.said((0, 1)) is None
    feeds.observe(told(1, 6, wall_s=1.0))
    assert feeds.micro_batch_s((1,)).tolist() == [0.25]  # it was fed as fast as that
    feeds.rename(1, 2)
    assert feeds.micro_batch_s((1, 2)).tolist() == [0.0, 0.25]


def test_who_is_idle_by_now_does_not_say_what_exchanging_takes():
    feeds = Feeds()
    for step in range(4):
        for member, seconds in ((0, 0.5), (1, 0.1)):
            feeds.observe(told(member, step, generation=0, exchange_s=seconds))
    assert feeds.beside_s((0, 1)) == 0.1
    for step in range(4, 8):
        feeds.observe(told(0, step, generation=1, exchange_s=0.4))
    assert feeds.beside_s((0, 1)) == 0.4
    assert feeds.beside_s((1,)) == 0.1
    assert feeds.beside_s((2,)) == 0.0


def test_a_feed_is_believed_for_twice_as_long_where_it_is_seen_again():
    feeds, step, believed = Feeds(), 3, []
    for early in range(3):
        feeds.observe(told(0, early))
    for _ in range(7):
        for _ in range(2):
            feeds.observe(told(0, step, generation=0, wall_s=10.0, data_s=5.0))
            step += 1
        began = step
        while feeds.micro_batch_s((0,)) is not None:
            feeds.observe(told(0, step, generation=0, wall_s=10.0))
            step += 1
        believed.append(10 * (step - began))
    assert believed == [120, 240, 480, 960, 1920, 3600, 3600]
