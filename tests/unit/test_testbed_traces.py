from __future__ import annotations

import doctest
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed import traces
from benchmarks.testbed.schedule import Schedule
from benchmarks.testbed.spec import NodeSpec
from benchmarks.testbed.traces import SPOT, TraceError, Window

DATA = Path(__file__).parents[3] / "shared/data/spot"
NODES = tuple(NodeSpec(name=f"n{n}", cores=0.4) for n in range(1, 5))


def window(*held: int, gap_s: float = 300) -> Window:
    return Window(source="", file="trace.json", start_hour=0, gap_s=gap_s, held=held)


def brief(*held: int, **options: float) -> list[tuple[float, str, str]]:
    return [(e.at_s, e.action, e.node) for e in traces.events(window(*held), NODES, **options)]


def file(folder: Path, content: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps(content))
    return path


def test_the_example_is_true() -> None:
    found = doctest.testmod(traces)
    assert found.attempted > 0
    assert found.failed == 0


def test_who_was_there_longest_goes_first_and_who_was_away_longest_comes_first() -> None:
    assert brief(4, 2, 3, 3, 2, 4) == [
        (5, "kill-node", "n1"),
        (5, "kill-node", "n2"),
        (10, "add", "n1"),
        (20, "kill-node", "n3"),
        (25, "add", "n2"),
        (25, "add", "n3"),
    ]


def test_those_not_held_at_the_beginning_go_at_once() -> None:
    assert brief(3, 4) == [(0, "kill-node", "n1"), (5, "add", "n1")]


def test_notice_comes_before_the_end() -> None:
    assert brief(4, 3, 4, notice_s=2) == [(3, "drain", "n1"), (10, "add", "n1")]
    schedule = Schedule(traces.events(window(4, 3, 4), NODES, notice_s=2))
    assert [(e.at_s, e.action) for e in schedule.due(100)] == [
        (3, "drain"),
        (5, "kill-node"),
        (10, "add"),
    ]


def test_who_comes_back_is_what_it_was() -> None:
    (_, back) = traces.events(window(4, 3, 4), NODES, seconds_per_hour=120)
    assert (back.at_s, back.spec) == (20, NODES[0])


def test_the_window_comes_back_from_zero_nodes() -> None:
    assert SPOT.hours == 6
    assert SPOT.changes == 12
    assert SPOT.held[0] == SPOT.held[-1] == 4
    assert set(SPOT.held) == {0, 1, 2, 3, 4}
    here = {node.name for node in NODES}
    held = {}
    for event in traces.events(SPOT, NODES):
        if event.action == "add":
            assert event.node not in here
            here.add(event.node)
        else:
            here.remove(event.node)
        held[event.at_s] = len(here)
    changes = [
        (5.0 * n, b) for n, (a, b) in enumerate(itertools.pairwise(SPOT.held), start=1) if a != b
    ]
    assert list(held.items()) == changes


def test_the_window_is_in_the_trace() -> None:
    path = DATA / SPOT.file
    if not path.exists():
        pytest.skip(f"there is no {path}")
    found = traces.read(path, start_hour=SPOT.start_hour, hours=SPOT.hours)
    assert (found.held, found.gap_s) == (SPOT.held, SPOT.gap_s)


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    path = file(tmp_path, {"metadata": {"gap_seconds": 1800}, "data": [0, 1, 2, 3, 4, 5]})
    assert traces.read(path).held == (0, 1, 2, 3, 4, 5)
    assert traces.read(path, start_hour=2).held == (4, 5)
    assert traces.read(path, start_hour=1, hours=1).held == (2, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "no trace with gap_seconds and data"),
        ({"metadata": {}, "data": [1]}, "no trace with gap_seconds and data"),
        ({"metadata": {"gap_seconds": 0}, "data": [1]}, "gap_seconds: 0"),
        ({"metadata": {"gap_seconds": 1}, "data": [-1]}, "data: -1 is no number of machines"),
        ({"metadata": {"gap_seconds": 1}, "data": [0.5]}, "data: 0.5 is no number of machines"),
        ({"metadata": {"gap_seconds": 3600}, "data": [1]}, "it has 1.0 hours; there are none from"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.json") as caught:
        traces.read(file(tmp_path, content), start_hour=1, hours=1)
    assert said in str(caught.value)


def test_too_few_nodes_and_too_much_notice_are_refused() -> None:
    with pytest.raises(TraceError, match="it holds 4 nodes, and there are 2; add nodes"):
        traces.events(SPOT, NODES[:2])
    with pytest.raises(TraceError, match="notice_s: 6 is longer than a gap; use at most 5"):
        traces.events(SPOT, NODES, notice_s=6)
