"""A share that takes far longer than usual is told of while it is computed, by whoever looks."""

from __future__ import annotations

import math
import threading

import pytest

from raycloud.clock import SystemClock, VirtualClock
from raycloud.step.straggler import Stalled, StallWatch, StragglerWatch, Straggling


class Clock(VirtualClock):
    """Virtual seconds, and those in which the process had a processor."""

    used_s = 0.0

    def cpu_s(self) -> float:
        return self.used_s

    def passes(self, seconds: float, part: float = 1.0) -> None:
        self.advance(seconds)
        self.used_s += part * seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def usual(clock: Clock, seconds: float = 1.0, micro_batches: int = 4) -> StragglerWatch:
    """One that has computed a share with four tenths of a processor."""
    pace = StragglerWatch(clock)
    pace.begin(micro_batches)
    clock.passes(seconds, 0.4)
    pace.end(done=True)
    return pace


def test_how_long_the_rest_will_take_follows_from_the_processor_time_of_now(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(0.5, 0.4)
    assert pace.look() == []
    clock.passes(1.0, 0.1)  # a quarter of what it had
    assert pace.look() == []
    clock.passes(1.0, 0.1)
    assert not pace.told()
    [told] = pace.look()
    assert told == Straggling(4, pytest.approx(4.0))
    with pace.waiting():
        pass
    assert pace.told()
    pace.end(done=True)
    pace.begin(4)
    assert not pace.told()


def shares(clock: Clock, pace: StragglerWatch, left: range, seconds: float) -> list[Straggling]:
    """Shares of a round, each looked at before its end: the first thing that is told."""
    for steps in left:
        pace.begin(4, steps)
        clock.passes(seconds)
        if told := pace.look():
            return told
        pace.end(done=True)
    return []


def test_in_a_round_all_its_shares_count(clock: Clock) -> None:
    """One of them is far from two seconds late; who waits for the last one waits for all."""
    pace = StragglerWatch(clock)
    assert not shares(clock, pace, range(8, 0, -1), 0.4)
    assert not shares(clock, pace, range(8, 5, -1), 0.4)
    told = shares(clock, pace, range(5, 0, -1), 1.6)
    assert told == [Straggling(4, pytest.approx(1.6), pytest.approx(4.8), pytest.approx(1.2))]
    assert pace.told()


def test_a_round_is_compared_with_the_one_before(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert not shares(clock, pace, range(8, 0, -1), 0.4)
    assert not shares(clock, pace, range(8, 0, -1), 0.7)  # slower, and yet not far
    assert not shares(clock, pace, range(8, 0, -1), 1.0)
    assert shares(clock, pace, range(8, 0, -1), 2.1)


def test_four_slow_shares_of_a_round_in_a_row_are_told_of_sooner(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert not shares(clock, pace, range(16, 0, -1), 0.1)
    assert not shares(clock, pace, range(16, 13, -1), 0.3)  # three, and late by 0.6 s
    assert not shares(clock, pace, range(13, 12, -1), 0.1)
    assert not shares(clock, pace, range(12, 9, -1), 0.3)
    told = shares(clock, pace, range(9, 0, -1), 0.3)
    assert told == [Straggling(4, pytest.approx(0.3), pytest.approx(2.4), pytest.approx(0.8))]
    assert pace.told()


def test_four_short_ones_may_be_a_hiccup(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert not shares(clock, pace, range(16, 0, -1), 0.05)
    assert not shares(clock, pace, range(16, 12, -1), 0.15)  # late by 0.4 s
    assert shares(clock, pace, range(12, 0, -1), 0.15)


def test_the_first_round_is_compared_with_the_steps_before_it(clock: Clock) -> None:
    """The last of them may have been slow already."""
    pace = StragglerWatch(clock)
    for seconds in (*[0.4] * 6, 1.6, 1.6):
        pace.begin(4)
        clock.passes(seconds)
        pace.end(done=True)
    told = shares(clock, pace, range(8, 0, -1), 1.6)
    assert told == [Straggling(4, pytest.approx(1.6), pytest.approx(9.6), pytest.approx(2.4))]


def test_where_nobody_waits_for_rounds_a_share_counts_alone(clock: Clock) -> None:
    pace = StragglerWatch(clock, meets=False)
    assert not shares(clock, pace, range(8, 0, -1), 0.4)
    assert not shares(clock, pace, range(8, 0, -1), 1.6)
    assert shares(clock, pace, range(8, 0, -1), 3.3) == [Straggling(4, pytest.approx(3.3))]


def test_in_a_round_what_is_over_is_not_told(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert not shares(clock, pace, range(8, 0, -1), 0.4)
    pace.begin(4, 8)
    clock.passes(3.0)
    pace.end(done=True)
    assert not shares(clock, pace, range(7, 2, -1), 0.4)


def test_after_rounds_a_share_is_compared_with_the_one_before(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert not shares(clock, pace, range(8, 0, -1), 0.4)
    pace.begin(4)
    clock.passes(2.5)
    assert pace.look() == [Straggling(4, pytest.approx(2.5))]
    pace.end(done=True)
    assert not shares(clock, pace, range(8, 0, -1), 0.4)


def test_where_nobody_has_looked_before_the_whole_share_counts(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(2)
    clock.passes(2.5, 0.1)
    assert pace.look() == [Straggling(2, pytest.approx(2.5))]  # half a second at this pace, and yet


def test_with_as_much_processor_time_as_ever_it_has_taken_what_it_has(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(3.0, 0.4)
    assert pace.look() == [Straggling(4, pytest.approx(3.0))]


def test_what_stands_still_has_not_taken_for_ever(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(3.0, 0.0)
    assert pace.look() == [Straggling(4, pytest.approx(12.0))]


def test_a_hiccup_and_a_large_share_are_not_told_of(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    clock.passes(1.9, 0.1)
    assert pace.look() == []
    pace.end(done=True)
    pace.begin(16)
    clock.passes(4.0 * 1.9, 0.4)
    assert pace.look() == []


def test_who_waits_for_others_is_not_late(clock: Clock) -> None:
    pace = usual(clock)
    looked: list[object] = []

    def others() -> int:
        clock.passes(30.0, 0.0)
        looked.extend(pace.look())
        return 7

    pace.begin(4)
    clock.passes(0.5, 0.4)
    with pace.waiting():
        assert others() == 7
    clock.passes(0.5, 0.4)
    assert looked == pace.look() == []
    pace.end(done=True)
    assert pace.longest_s == pytest.approx(1.0)


def test_of_the_first_share_and_of_one_given_up_nothing_is_known(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert pace.look() == []
    for _ in range(2):
        pace.begin(4)
        clock.passes(60.0, 0.1)
        assert pace.computing
        assert pace.look() == []
        pace.end(done=False)
    assert not pace.computing
    assert pace.longest_s is None


def test_a_share_of_nothing_is_not_told_of(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(0)
    clock.passes(60.0, 0.1)
    assert pace.look() == []
    pace.end(done=True)
    pace.begin(4)
    clock.passes(2.5, 0.4)
    assert pace.look() == [Straggling(4, pytest.approx(2.5))]


def test_when_a_share_will_be_late_is_known(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert pace.late_in_s() == math.inf
    pace = usual(clock, 3.0)
    assert pace.late_in_s() == math.inf
    pace.begin(2)
    assert pace.late_in_s() == pytest.approx(3.0)  # twice 1.5 s
    clock.passes(2.0)
    assert pace.late_in_s() == pytest.approx(1.0)
    clock.passes(pace.late_in_s())
    assert pace.look() != []
    assert pace.late_in_s() == math.inf  # it is told by now, and again with each look
    pace.end(done=True)
    pace.begin(0)
    assert pace.late_in_s() == math.inf


def test_when_a_round_will_be_late_is_known(clock: Clock) -> None:
    pace = StragglerWatch(clock)
    assert not shares(clock, pace, range(8, 0, -1), 0.4)
    assert not shares(clock, pace, range(8, 7, -1), 0.4)
    pace.begin(4, 7)
    assert pace.late_in_s() == math.inf  # however long it takes, it is one alone
    clock.passes(1.4)
    pace.end(done=True)  # a second late
    pace.begin(4, 6)
    assert pace.late_in_s() == pytest.approx(1.4)
    clock.passes(1.4)
    assert pace.look() != []
    assert pace.late_in_s() == math.inf
    pace.end(done=True)
    pace.begin(0, 5)
    assert pace.late_in_s() == math.inf


def test_when_a_share_will_be_late_is_not_known_while_it_waits_for_others(clock: Clock) -> None:
    pace = usual(clock)
    pace.begin(4)
    with pace.waiting():
        assert pace.late_in_s() == math.inf
    assert pace.late_in_s() == pytest.approx(2.0)


class ThreadClock(VirtualClock):
    """Virtual seconds, and a thread's own."""

    used_s = 0.0

    def thread_cpu_s(self, thread: int) -> float:
        return self.used_s

    def passes(self, seconds: float, used_s: float = 0.0) -> None:
        self.advance(seconds)
        self.used_s += used_s


def watch(clock: ThreadClock, usual_s: list[float | None]) -> StallWatch:
    made = StallWatch(clock, 1, lambda: usual_s[0])
    assert made.look() == []
    return made


def test_it_is_told_for_how_long_it_stands_still() -> None:
    clock = ThreadClock()
    one = watch(clock, [0.1])
    clock.passes(0.75)
    assert one.look() == []
    for seconds in (1.5, 2.25, 3.0):
        clock.passes(0.75)
        assert one.look() == [Stalled(seconds)]
    clock.passes(0.75, used_s=1e-5)
    assert one.look() == []
    clock.passes(0.75)
    assert one.look() == []


def test_who_waits_for_others_may_stand_still() -> None:
    clock, usual_s = ThreadClock(), list[float | None]([None])
    one = watch(clock, usual_s)
    for _ in range(20):
        clock.passes(1.0)
        assert one.look() == []
    usual_s[0] = 0.1
    clock.passes(1.0)
    assert one.look() == [Stalled(1.0)]


def test_who_has_taken_long_before_is_given_twice_that() -> None:
    clock = ThreadClock()
    one = watch(clock, [3.0])
    for _ in range(5):
        clock.passes(1.0)
        assert one.look() == []
    clock.passes(1.0)
    assert one.look() == [Stalled(6.0)]


def test_a_process_that_was_frozen_does_not_take_its_own_silence_for_that() -> None:
    clock = ThreadClock()
    one = watch(clock, [0.1])
    clock.passes(60.0)
    assert one.look() == [Stalled(1.5)]  # less than anybody is given up for
    clock.passes(0.1, used_s=0.05)
    assert one.look() == []


def test_a_real_thread() -> None:
    busy, go, end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        while not go.is_set():
            sum(range(10_000))
            busy.set()
        end.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    clock = SystemClock()
    assert busy.wait(10.0)
    before_s = clock.thread_cpu_s(thread.native_id or 0)
    busy.clear()
    assert busy.wait(10.0)
    assert clock.thread_cpu_s(thread.native_id or 0) > before_s
    go.set()
    while True:  # until it waits
        before_s = clock.thread_cpu_s(thread.native_id or 0)
        if not end.wait(0.2) and clock.thread_cpu_s(thread.native_id or 0) == before_s:
            break
    end.set()
    thread.join()
    while clock.thread_cpu_s(thread.native_id or 0) < math.inf:  # the kernel ends it a little later
        pass


def test_a_thread_that_has_ended_stands_not_still() -> None:
    clock = ThreadClock()
    one = watch(clock, [0.1])
    clock.used_s = math.inf
    for _ in range(3):
        clock.advance(1.0)
        assert one.look() == []
