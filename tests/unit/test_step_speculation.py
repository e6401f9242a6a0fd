"""Notes between a member and its backup: whole, in order, and nothing else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raycloud.errors import TransportError
from raycloud.net.stream import Stream
from raycloud.step.speculation import Kind, Note, Notes


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
        one.hang_up()
        assert other.hear(5.0) == [Note(Kind.DONE, 1, 2)]  # what was said before arrives
        with pytest.raises(TransportError, match="closed"):
            other.hear(5.0)
        with pytest.raises(TransportError, match="broke"):
            one.say(Note(Kind.DONE, 1, 3))
