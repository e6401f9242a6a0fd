"""What a run did of what its workers could do, without running one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.present import arrivals_s, main, present, read
from raycloud.events import Event, GenerationFormed, MemberLost
from raycloud.order import Position
from tests.control_events import committed, ready


def log(*, joining_s: float = 2.0) -> Iterator[tuple[float, Event]]:
    """Four workers take 2 s a step; at 20, 40 and 60 s one is lost, and is back 10 s later.

    Three of them take 2.5 s for each of four steps, and the step in which another joins takes
    `joining_s`.
    """
    members, step, now_s = [0, 1, 2, 3], 0, 0.0
    for member in members:
        yield 0.0, ready(member)
    for generation in range(7):
        yield now_s, formed(generation, members, step)
        whole = generation % 2 == 0
        for k in range(5 if whole else 4):
            now_s += joining_s if whole and generation and k == 0 else 2.0 if whole else 2.5
            for member in members:
                yield (
                    now_s,
                    committed(member, step, step + 1, generation=0, at=Position(), computed=0),
                )
            step += 1
        if whole and generation < 6:
            now_s = 20.0 * (generation // 2 + 1)  # five steps, and then nothing for a while
            yield now_s, MemberLost(member=members.pop(0), reason="killed")
        else:
            members.append(4 + generation // 2)
            yield now_s, replace(ready(members[-1]))


def formed(generation: int, members: list[int], step: int) -> Event:
    shares = (1,) * len(members)
    return GenerationFormed(
        generation=generation, members=tuple(members), shares=shares, first_step=step
    )


def test_who_is_not_there_could_do_nothing() -> None:
    """In each 20 s four are there for ten and three for ten, which makes 8.75 steps of 2 s."""
    found = present(read(log()))
    assert (found.losses, found.most, found.window_s) == (3, 4, 60.0)
    assert found.workers == pytest.approx(3.5)
    assert found.undisturbed_s == 2.0
    assert found.done == pytest.approx(found.steps / (3 * 8.75))


def test_a_step_in_which_another_joins_is_none_of_those_that_are_undisturbed() -> None:
    assert present(read(log(joining_s=9.0))).undisturbed_s == 2.0


@pytest.mark.parametrize(("joining_s", "cost_s"), [(2.0, 0.0), (2.5, 0.0), (2.75, 0.25)])
def test_an_arrival_costs_what_its_step_is_longer_than_those_before(
    joining_s: float, cost_s: float
) -> None:
    """Three took 2.5 s."""
    assert list(arrivals_s(read(log(joining_s=joining_s)))) == pytest.approx([cost_s] * 3)


def test_the_steps_of_a_report_are_equally_long() -> None:
    two = replace(committed(0, 0, 2, generation=0, at=Position(), computed=0), wall_s=3.0)
    story = read([(10.0, two), (12.0, committed(0, 2, 3, generation=0, at=Position(), computed=0))])
    assert story.committed_s == {0: 8.5, 1: 10.0, 2: 12.0}


def test_who_follows_without_a_share_has_not_arrived_yet() -> None:
    one = GenerationFormed(generation=0, members=(0, 1), shares=(8, 0), first_step=3)
    assert read([(1.0, one)]).formed == [(3, frozenset({0}))]


def test_a_step_in_which_another_is_lost_tells_nothing_of_an_arrival() -> None:
    story = read(log(joining_s=9.0))
    story.lost_s[99] = story.committed_s[9] - 1.0  # the first in which one has joined
    assert len(list(arrivals_s(story))) == 2
    assert list(arrivals_s(read([]))) == []


def test_a_run_in_which_nothing_happened_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="0 losses"):
        present(read([]))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run")])
    assert "cannot read the event log" in capsys.readouterr().err
