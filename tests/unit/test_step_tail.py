"""Whose result of a micro-batch counts: the first one's, once."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.clock import SystemClock, VirtualClock
from raycloud.recovery.backups import ring
from raycloud.step.speculation import Kind, Note, Primary, Tail
from tests.lockstep import never

COUNT = 6


def offered(clock: VirtualClock | SystemClock | None = None) -> Tail:
    tail = Tail(clock or VirtualClock())
    tail.offer(3, range(2, COUNT))
    return tail


def test_what_is_begun_counts_here_and_what_was_done_before_counts_there() -> None:
    tail = offered()
    assert tail.begin(2, 1.0, never)
    assert not tail.done(3, 2)
    assert tail.done(3, 5)
    assert not tail.done(3, 5)  # once
    assert not tail.begin(5, 1.0, never)
    assert tail.begin(0, 1.0, never)  # not of the tail: nobody else has it
    assert not tail.done(3, 0)
    assert tail.close() == {5}
    assert not tail.done(3, 4)


def test_nothing_of_another_step_counts() -> None:
    tail = offered()
    assert not tail.done(2, 4)
    tail.offer(4, range(2, COUNT))
    assert not tail.done(3, 4)
    assert tail.close() == frozenset()


def test_it_is_over_once_all_that_is_left_was_done_elsewhere() -> None:
    tail = offered()
    assert tail.done(3, 5)
    assert not tail.all_elsewhere([4, 5])
    assert tail.all_elsewhere([5])
    assert not tail.done(3, 4)


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "done", "over"]), st.integers(0, COUNT - 1))),
    st.integers(0, 2**32),
)
def test_each_micro_batch_counts_once_whatever_comes_when(
    events: list[tuple[str, int]], seed: int
) -> None:
    tail, here, there = offered(), set[int](), set[int]()
    begun = iter(range(COUNT))
    closed = False
    for what, index in events:
        if what == "done" and tail.done(3, index):
            there.add(index)
        elif what == "begin" and not closed and (k := next(begun, None)) is not None:
            here |= {k} if tail.begin(k, random.Random(seed).random(), never) else set()
        elif what == "over":
            left = sorted(set(range(COUNT)) - here - there)
            closed = closed or tail.all_elsewhere(left)
    here |= {k for k in begun if not closed and tail.begin(k, 1.0, never)}
    assert tail.close() == there
    assert here | there == set(range(COUNT))
    assert not here & there


def test_who_is_at_it_is_waited_for_and_counts() -> None:
    tail = offered(SystemClock())
    tail.started(3, 5, 60.0)
    threading.Timer(0.05, tail.done, (3, 5)).start()
    assert not tail.begin(5, None, never)
    assert 0.0 < tail.waited_s < 30.0


def test_nobody_is_waited_for_who_would_be_later() -> None:
    tail = offered(SystemClock())
    tail.started(3, 5, 60.0)
    assert tail.begin(5, 1.0, never)
    assert not tail.done(3, 5)


def test_patience_ends() -> None:
    tail = offered(SystemClock())
    tail.started(3, 4, 0.02)  # it takes far longer than it was likely to
    assert tail.begin(4, 60.0, never)
    assert 0.04 <= tail.waited_s < 30.0
    assert not tail.done(3, 4)


@pytest.mark.parametrize("how", ["abandoned", "forsaken"])
def test_nobody_is_waited_for_who_does_not_come(how: str) -> None:
    tail = offered(SystemClock())
    tail.started(3, 5, 600.0)
    if how == "forsaken":
        threading.Timer(0.05, tail.forsaken).start()
    assert tail.begin(5, None, lambda: how == "abandoned")


def told(*notes: Note, now_s: float = 0.0) -> Primary:
    primary = Primary()
    for index in range(2, COUNT):
        primary.heard(Note(Kind.OFFERED, 3, index, 1), 0.0)
    for note in notes:
        primary.heard(note, now_s)
    return primary


def test_the_last_that_is_not_begun_is_backed_up_first() -> None:
    primary = told(Note(Kind.BEGUN, 3, 2, 1, 4.0))
    assert primary.next(3, 1.0, 0.0) == (5, 1)
    primary.started(5)
    assert primary.next(3, 1.0, 0.0) == (4, 1)
    primary.heard(Note(Kind.BEGUN, 3, 3, 1, 4.0), 4.0)
    primary.heard(Note(Kind.BEGUN, 3, 4, 1, 4.0), 8.0)
    assert primary.next(3, 1.0, 8.0) is None


def test_who_is_not_late_is_not_backed_up() -> None:
    one_left = told(*(Note(Kind.BEGUN, 3, k, 1, 1.0) for k in (2, 3, 4)))
    assert one_left.rest_s(0.25) == 1.75
    assert one_left.next(3, 1.0, 0.0, busy=1) is None
    assert one_left.next(3, 1.0, 0.0) == (5, 1)
    assert one_left.next(3, None, 0.0) is None  # one's own speed is not known
    assert told().next(3, 1.0, 100.0) is None  # nor is anything of the other's
    assert one_left.next(4, 1.0, 0.0) is None
    assert one_left.next(3, 3.0, 0.0) is None  # slower than that itself


def test_a_pass_of_several_is_backed_up_as_one() -> None:
    primary = Primary()
    primary.heard(Note(Kind.OFFERED, 3, 4, 4), 0.0)
    primary.heard(Note(Kind.BEGUN, 3, 0, 4, 4.0), 0.0)
    assert primary.rest_s(0.0) == 32.0
    assert primary.next(3, 4.0, 0.0, busy=1) == (4, 4)
    assert primary.next(3, 4.0, 0.0, busy=2) is None
    primary.started(4)
    assert primary.next(3, 1.0, 0.0) is None


def test_what_takes_long_shows_while_it_does() -> None:
    head = told(Note(Kind.BEGUN, 3, 0, 2, 1.0))
    assert head.rest_s(0.0) == 6.0
    assert head.rest_s(20.0) == 40.0  # two in 20 s and not done: four more in 40


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_everyone_is_backed_up_by_one_on_another_node_where_there_is_any(nodes: list[str]) -> None:
    found = ring(nodes, len(nodes))
    assert sorted(found) == list(range(len(nodes)))
    assert len(nodes) == 1 or all(rank != other for rank, other in enumerate(found))
    if max(map(nodes.count, nodes)) <= len(nodes) / 2:
        assert all(nodes[rank] != nodes[other] for rank, other in enumerate(found))
