"""Speculation: notes come whole and in order; whose result of a micro-batch counts: the first."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycloud.clock import SystemClock, VirtualClock
from raycloud.errors import TransportError
from raycloud.net.stream import Stream
from raycloud.step.speculation import Kind, Note, Notes, Primary, Tail, ring
from tests.lockstep import never


@contextmanager
def two_ends() -> Iterator[tuple[Notes, Notes]]:
    one, other = (Notes(Stream(end)) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_what_is_said_is_heard_in_order() -> None:
    said = [Note(Kind.OFFERED, 7, 5), Note(Kind.BEGUN, 7, 0, 4, 0.25), Note(Kind.DONE, 2**40, 9)]
    with two_ends() as (one, other):
        assert other.hear() == []
        one.say(*said[:2])
        one.say(said[2])
        assert other.hear(5.0) == said
        other.say(Note(Kind.TAKEN, 7, 5))
        assert one.hear(5.0) == [Note(Kind.TAKEN, 7, 5)]


def test_the_format_is_known_byte_by_byte() -> None:
    wanted = bytes.fromhex("02 0000000000000007 00000003 00000004 3fd0000000000000")
    ours, theirs = socket.socketpair()
    with ours:
        notes = Notes(Stream(theirs))
        notes.say(Note(Kind.BEGUN, 7, 3, 4, 0.25))
        assert ours.recv(100) == wanted
        ours.sendall(wanted[:11])  # a note may come in pieces
        assert notes.hear(5.0) == []
        ours.sendall(wanted[11:] + wanted[:1])
        assert notes.hear(5.0) == [Note(Kind.BEGUN, 7, 3, 4, 0.25)]
        notes.close()
    assert [kind.value for kind in Kind] == [1, 2, 3, 4, 5, 6]


def test_what_is_no_note_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        notes = Notes(Stream(theirs))
        ours.sendall(b"\x09" + bytes(24))
        with pytest.raises(TransportError, match="a note of kind 9"):
            notes.hear(5.0)
        notes.close()


def test_an_end_is_told() -> None:
    with two_ends() as (one, other):
        one.say(Note(Kind.DONE, 1, 2))
        one.close()
        assert other.hear(5.0) == [Note(Kind.DONE, 1, 2)]  # what was said before arrives
        with pytest.raises(TransportError, match="closed"):
            other.hear(5.0)
        with pytest.raises(TransportError, match="broke"):
            one.say(Note(Kind.DONE, 1, 3))


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
