"""A member's words are kept until they are in the log."""

from __future__ import annotations

from raycloud.events import Noticed
from raycloud.training.words import Word, Words


def said(*names: str) -> list[Noticed]:
    return [Noticed(what=name) for name in names]


def whats(words: list[Word]) -> list[tuple[int, str]]:
    return [(word.number, word.event.what) for word in words]


def test_words_are_told_once_and_in_their_order():
    words = Words(3)
    words.add(said("a", "b"))
    assert words.untold
    told = words.tell(0)
    assert whats(told) == [(1, "a"), (2, "b")]
    assert {word.member for word in told} == {3}
    assert not words.untold
    words.add(said("c"))
    assert whats(words.tell(2)) == [(3, "c")]


def test_another_driver_is_told_what_is_not_written():
    words = Words(0)
    words.add(said("a", "b", "c"))
    words.tell(0)
    words.add(said("d"))
    words.again(1)
    assert words.untold
    assert whats(words.tell(1)) == [(2, "b"), (3, "c"), (4, "d")]
    words.again(1)  # that one is killed, too, and had written nothing
    assert whats(words.tell(1)) == [(2, "b"), (3, "c"), (4, "d")]


def test_what_is_written_is_forgotten():
    words = Words(0)
    words.add(said("a", "b", "c"))
    words.tell(0)
    assert words.tell(3) == []
    words.again(0)
    assert words.tell(0) == []
