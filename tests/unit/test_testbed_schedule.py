from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks.testbed.schedule import Action, Event, Schedule, ScheduleError
from benchmarks.testbed.spec import NodeSpec, Spec
from tests.pages import DOCS, blocks

SPEC = Spec(nodes=(NodeSpec(name="n1"), NodeSpec(name="n2")))


def event(at_s: float, action: Any, node: str = "n1", **fields: Any) -> Event:
    return Event(at_s=at_s, action=action, node=node, **fields)


def brief(events: tuple[Event, ...]) -> list[tuple[float, str, str]]:
    return [(e.at_s, e.action, e.node) for e in events]


def test_each_is_due_once_and_in_order() -> None:
    schedule = Schedule([event(3, "mend"), event(1, "cut"), event(1, "freeze"), event(9, "thaw")])
    assert schedule.next_s == 1
    assert brief(schedule.due(0.5)) == []
    assert brief(schedule.due(4)) == [(1, "cut", "n1"), (1, "freeze", "n1"), (3, "mend", "n1")]
    assert brief(schedule.due(4)) == []
    assert schedule.next_s == 9
    assert brief(schedule.due(9)) == [(9, "thaw", "n1")]
    assert schedule.next_s is None


def test_a_drain_kills_at_its_deadline() -> None:
    schedule = Schedule([event(2, "drain", deadline_s=3), event(4, "freeze", "n2")])
    assert brief(schedule.due(2)) == [(2, "drain", "n1")]
    assert brief(schedule.due(10)) == [(4, "freeze", "n2"), (5, "kill-node", "n1")]


@pytest.mark.parametrize(
    "meanwhile",
    [[event(3, "kill-node")], [event(3, "kill-node"), event(4, "add")], [event(5, "kill-node")]],
)
def test_a_drain_does_not_kill_who_was_killed_before(meanwhile: list[Event]) -> None:
    schedule = Schedule([event(2, "drain", deadline_s=3), *meanwhile])
    assert brief(schedule.due(10))[1:] == brief(tuple(meanwhile))


def test_a_drain_kills_though_another_node_is_killed() -> None:
    schedule = Schedule([event(2, "drain", deadline_s=3), event(3, "kill-node", "n2")])
    assert brief(schedule.due(10))[-1] == (5, "kill-node", "n1")


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "events.yaml"
    file.write_text(
        "events:\n"
        "- {at_s: 1, action: kill-process, node: n1, matching: train.py}\n"
        "- {at_s: 2, action: rate, node: n1, egress_bits_per_s: 20e6, ingress_bits_per_s: null}\n"
        "- {at_s: 3, action: throttle, node: n1, cores: 0.2}\n"
        "- {at_s: 4, action: throttle, node: n1}\n"
        "- {at_s: 5, action: add, node: n3, spec: {cores: 1, egress_bits_per_s: 1e8, zone: b}}\n"
        "- {at_s: 6, action: cut, node: head, direction: in}\n"
    )
    schedule = Schedule.load(file)
    assert schedule.events == (
        event(1, "kill-process", matching="train.py"),
        event(2, "rate", egress_bits_per_s=20e6, ingress_bits_per_s=None),
        event(3, "throttle", cores=0.2),
        event(4, "throttle"),
        event(5, "add", "n3", spec=NodeSpec(name="n3", cores=1, egress_bits_per_s=1e8, zone="b")),
        event(6, "cut", "head", direction="in"),
    )
    schedule.check(SPEC)


def test_json_is_read(tmp_path: Path) -> None:
    file = tmp_path / "events.json"
    file.write_text(json.dumps({"events": [{"at_s": 0, "action": "freeze", "node": "n2"}]}))
    assert Schedule.load(file).events == (event(0, "freeze", "n2"),)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"action": "explode"}, "action: 'explode' is not possible; use one of kill-process, "),
        ({"colour": 1}, "'colour' is no field of"),
        ({"at_s": -1}, "at_s: -1 is not possible; use seconds, at least 0"),
        ({"at_s": "soon"}, "at_s: 'soon' is not possible; use seconds"),
        ({"at_s": True}, "at_s: True is not possible"),
        ({"at_s": float("nan")}, "at_s: nan is not possible"),
        ({"node": 1}, "node: 1 is not possible; use a node's name"),
        ({"cores": 1}, "freeze of 'n1': cores: no field of this action; it has none"),
        ({"action": "cut", "cores": 1}, "cores: no field of this action; it has direction"),
        ({"action": "cut", "direction": "up"}, "direction: 'up' is not possible; use both, in or"),
        ({"action": "kill-process"}, "matching is missing; add it"),
        ({"action": "kill-process", "matching": ""}, "matching: '' is not possible; use part of"),
        ({"action": "drain"}, "deadline_s is missing; add it"),
        ({"action": "drain", "deadline_s": 0}, "deadline_s: 0 is not possible; use seconds, at"),
        ({"action": "throttle", "cores": 0.0}, "cores: 0.0 is not possible; use a number"),
        ({"action": "rate"}, "nothing changes; give egress_bits_per_s or ingress_bits_per_s"),
        ({"action": "rate", "egress_bits_per_s": "fast"}, "egress_bits_per_s: 'fast' is not"),
        ({"action": "add", "spec": 4}, "spec: 4 is not possible; use a mapping"),
        ({"action": "add", "spec": {"speed": 4}}, "spec: 'speed' is no field; there are cores, "),
        ({"action": "add", "spec": {"cores": -1}}, "add of 'n1': spec: node n1: cores: -1"),
        ({"action": "add", "node": "head"}, "the head always stays; name another node"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, value: dict[str, Any], said: str) -> None:
    file = tmp_path / "events.yaml"
    file.write_text(json.dumps({"events": [{"at_s": 1, "action": "freeze", "node": "n1"} | value]}))
    with pytest.raises(ScheduleError) as caught:
        Schedule.load(file)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "not a mapping with a list `events`"),
        ("events: 3", "not a mapping with a list `events`"),
        ("{events: [], more: 1}", "not a mapping with a list `events`"),
        ("events: [3]", "an event: 3 is not possible; use a mapping"),
        ("events: [{at_s: 1, node: n1}]", "action is missing in"),
        ("{", "cannot be read"),
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "events.yaml"
    file.write_text(text)
    with pytest.raises(ScheduleError, match=r"events\.yaml") as caught:
        Schedule.load(file)
    assert said in str(caught.value)


def test_an_add_of_another_name_is_refused() -> None:
    with pytest.raises(ScheduleError, match="its name is 'n2'; use the node's"):
        event(1, "add", "n1", spec=NodeSpec(name="n2"))


def test_nodes_are_known_by_the_time_they_are_named() -> None:
    add, freeze = event(2, "add", "n3", spec=NodeSpec(name="n3")), event(2, "freeze", "n3")
    Schedule([add, freeze]).check(SPEC)
    with pytest.raises(ScheduleError, match=r"freeze at 2 s: node: 'n3' is not known .* head, n1"):
        Schedule([freeze, add]).check(SPEC)
    with pytest.raises(ScheduleError, match="add at 1 s: node: 'n3' is not known"):
        Schedule([event(1, "add", "n3")]).check(SPEC)


def test_the_files_of_the_docs_can_be(tmp_path: Path) -> None:
    files = [block.text for block in blocks(DOCS / "testbed.md") if block.language == "yaml"]
    spec, schedule = tmp_path / "spec.yaml", tmp_path / "schedule.yaml"
    spec.write_text(files[0])
    schedule.write_text(files[1])
    found = Schedule.load(schedule)
    found.check(Spec.load(spec))
    assert {one.action for one in found.events} == set(get_args(Action))
