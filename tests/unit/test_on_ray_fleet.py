"""When a member that was left out is back, as its answers show."""

from __future__ import annotations

from typing import Any

from raycloud.on_ray.fleet import POLL_S, MemberProcess


class Asked:
    """A handle that numbers what it is asked, and remembers for how long each may wait."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    @property
    def poll(self) -> Asked:
        return self

    def remote(self, wait_s: float, *_: Any) -> int:
        self.waits_s.append(wait_s)
        return len(self.waits_s)


def test_what_was_asked_for_before_shows_nothing_and_the_next_answer_does() -> None:
    process = MemberProcess(actor=(asked := Asked()))
    process.ask(1, None)
    assert not process.is_back(1, None)
    assert (process.poll, asked.waits_s) == (2, [POLL_S, 0.0])
    assert process.is_back(1, None)
    assert process.poll == 2  # nothing more is awaited of it


def test_who_could_not_be_reached_is_asked_anew_and_its_answer_shows_that_it_is_back() -> None:
    process = MemberProcess(actor=(asked := Asked()))
    process.ask(1, None)
    process.ask_anew(1, None)
    assert process.is_back(1, None)
    assert asked.waits_s == [POLL_S, POLL_S]
