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
    assert words.untold
    told = words.tell(0)
    assert whats(told) == [(1, "a"), (2, "b")]
    assert {word.member for word in told} == {3}
    assert not words.untold
    words.add(said("c"))
    assert whats(words.tell(2)) == [(3, "c")]


def test_another_driver_is_told_what_is_not_written():
    words = Outbox(0)
    words.add(said("a", "b", "c"))
    words.tell(0)
    words.add(said("d"))
    words.again(1)
    assert words.untold
    assert whats(words.tell(1)) == [(2, "b"), (3, "c"), (4, "d")]
    words.again(1)  # that one is killed, too, and had written nothing
    assert whats(words.tell(1)) == [(2, "b"), (3, "c"), (4, "d")]


def test_what_is_written_is_forgotten():
    words = Outbox(0)
    words.add(said("a", "b", "c"))
    words.tell(0)
    assert words.tell(3) == []
    words.again(0)
    assert words.tell(0) == []


def test_the_same_process_as_another_member_says_only_that_its_machine_goes():
    words = Outbox(1)
    leaving = MemberLeaving(member=1, reason="spot", deadline_s=9.0)
    words.add([*said("a"), leaving, *said("b")])
    words.tell(0)
    again = words.another(4)
    assert [word.event for word in again.tell(0)] == [replace(leaving, member=4)]
    words.tell(3)
    assert not words.another(5).untold
