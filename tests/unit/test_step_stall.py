"""A thread that computes uses processor time, however slow it is; one that is stuck uses none."""

from __future__ import annotations

import threading

from raycloud.clock import SystemClock, VirtualClock
from raycloud.step.straggler import Stalled, StallWatch


class Clock(VirtualClock):
    """Virtual seconds, and a thread's own."""

    used_s = 0.0

    def thread_cpu_s(self, thread: int) -> float:
        return self.used_s

    def passes(self, seconds: float, used_s: float = 0.0) -> None:
        self.advance(seconds)
        self.used_s += used_s


def watch(clock: Clock, usual_s: list[float | None]) -> StallWatch:
    made = StallWatch(clock, 1, lambda: usual_s[0])
    assert made.look() == []
    return made


def test_it_is_told_for_how_long_it_stands_still() -> None:
    clock = Clock()
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
    clock, usual_s = Clock(), list[float | None]([None])
    one = watch(clock, usual_s)
    for _ in range(20):
        clock.passes(1.0)
        assert one.look() == []
    usual_s[0] = 0.1
    clock.passes(1.0)
    assert one.look() == [Stalled(1.0)]


def test_who_has_taken_long_before_is_given_twice_that() -> None:
    clock = Clock()
    one = watch(clock, [3.0])
    for _ in range(5):
        clock.passes(1.0)
        assert one.look() == []
    clock.passes(1.0)
    assert one.look() == [Stalled(6.0)]


def test_a_process_that_was_frozen_does_not_take_its_own_silence_for_that() -> None:
    clock = Clock()
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
    before_s = clock.thread_cpu_s(thread.ident or 0)
    busy.clear()
    assert busy.wait(10.0)
    assert clock.thread_cpu_s(thread.ident or 0) > before_s
    go.set()
    while True:  # until it waits
        before_s = clock.thread_cpu_s(thread.ident or 0)
        if not end.wait(0.2) and clock.thread_cpu_s(thread.ident or 0) == before_s:
            break
    end.set()
    thread.join()
