"""A member's words are kept until they are in the log."""

from __future__ import annotations

from dataclasses import replace

from raycloud.events import MemberLeaving, Noticed
from raycloud.worker.outbox import Outbox, OutboxEntry


def said(*names: str) -> list[Noticed]:
    return [Noticed(what=name) for name in names]


def whats(words: list[OutboxEntry]) -> list[tuple[int, str]]:
    return [(word.number, word.event.what) for word in words]


def test_words_are_told_once_and_in_their_order():
    words = Outbox(3)
    words.add(said("a", "b"))
    assert words.unsent
    told = words.take(0)
    assert whats(told) == [(1, "a"), (2, "b")]
    assert {word.member for word in told} == {3}
    assert not words.unsent
    words.add(said("c"))
    assert whats(words.take(2)) == [(3, "c")]


def test_another_driver_is_told_what_is_not_written():
    words = Outbox(0)
    words.add(said("a", "b", "c"))
    words.take(0)
    words.add(said("d"))
    words.resend(1)
    assert words.unsent
    assert whats(words.take(1)) == [(2, "b"), (3, "c"), (4, "d")]
    words.resend(1)  # that one is killed, too, and had written nothing
    assert whats(words.take(1)) == [(2, "b"), (3, "c"), (4, "d")]


def test_what_is_written_is_forgotten():
    words = Outbox(0)
    words.add(said("a", "b", "c"))
    words.take(0)
    assert words.take(3) == []
    words.resend(0)
    assert words.take(0) == []


def test_the_same_process_as_another_member_says_only_that_its_machine_goes():
    words = Outbox(1)
    leaving = MemberLeaving(member=1, reason="spot", deadline_s=9.0)
    words.add([*said("a"), leaving, *said("b")])
    words.take(0)
    again = words.rejoin_as(4)
    assert [word.event for word in again.take(0)] == [replace(leaving, member=4)]
    words.take(3)
    assert not words.rejoin_as(5).unsent
