"""Measures that are kept: for whom they count, for how long, and what is measured all the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raycloud.clock import SystemClock
from raycloud.events import MemberReady
from raycloud.on_ray import survey as module
from raycloud.on_ray.survey import MeasuresFile, survey
from raycloud.packing.code import TaskCode
from raycloud.planner.inventory import Inventory, Node
from raycloud.planner.surveyed import (
    KEPT_S,
    LinkMeasure,
    Measures,
    NodeMeasures,
    name_of,
)
from raycloud.spec import Job

NOW_S = 1e9
CODE = TaskCode(module="m", qualname="T", digest="d")


def ready(micro_batch_s: float, member: int = 0) -> MemberReady:
    """One that has measured itself."""
    return MemberReady(
        member=member, samples=10, parameters=3, state_bytes=36, gradient_bytes=12, fixed_s=0.0,
        micro_batch_s=micro_batch_s, fingerprint={"train/1": "ab"}, node=f"before-{member}",
    )  # fmt: skip


def of(kind: str, address: str, *seconds: float, ago_s: float = 0.0) -> NodeMeasures:
    """A node whose workers take so long for a micro-batch."""
    told = tuple(ready(one, member) for member, one in enumerate(seconds))
    return NodeMeasures(kind=kind, address=address, unix_s=NOW_S - ago_s, readies=told)


def test_a_node_s_own_measures_count_first() -> None:
    found = Measures(nodes=(of("a", "1", 0.1), of("a", "2", 0.4), of("b", "1", 0.2)))
    assert found.of("a", "2", 1) == of("a", "2", 0.4)
    assert found.of("b", "1", 1) == of("b", "1", 0.2)
    assert found.of("a", "2", 2) is None  # two at the same time take longer
    assert found.of("a", "3", 1) is None  # those of its type are unlike


def test_others_of_its_type_count_where_all_agree_and_there_are_two() -> None:
    one, other = of("a", "1", 0.100, ago_s=5.0), of("a", "2", 0.109)
    assert Measures(nodes=(one, other)).of("a", "3", 1) == other
    assert Measures(nodes=(one,)).of("a", "3", 1) is None
    assert Measures(nodes=(one, other, of("a", "4", 0.2))).of("a", "3", 1) is None


def test_after_a_day_nothing_counts_and_nothing_of_the_future() -> None:
    link = LinkMeasure(
        addresses=("1", "2"), unix_s=NOW_S - KEPT_S, bytes_per_s=1.0, round_trip_s=0.1
    )
    nodes = (of("a", "1", 1.0, ago_s=KEPT_S - 1.0), of("a", "2", 1.0, ago_s=-1.0))
    found = Measures(nodes=nodes, links=(link,)).fresh(NOW_S)
    assert found == Measures(nodes=nodes[:1])


def test_a_link_is_that_of_exactly_these_nodes() -> None:
    link = LinkMeasure(addresses=("2", "1"), unix_s=NOW_S, bytes_per_s=None, round_trip_s=0.1)
    found = Measures().learn([], link)
    assert found.link(["1", "2"]) == link
    assert found.link(["1", "2", "3"]) is None
    newer = replace(link, bytes_per_s=7.0)
    assert found.learn([], newer).links == (newer,)


def test_what_is_measured_anew_takes_the_place_of_what_was() -> None:
    before = Measures(nodes=(of("a", "1", 0.1), of("a", "2", 0.1)))
    assert before.learn([of("a", "1", 0.3)], None).nodes == (of("a", "2", 0.1), of("a", "1", 0.3))


def test_a_file_is_read_as_it_was_written() -> None:
    link = LinkMeasure(addresses=("1",), unix_s=NOW_S, bytes_per_s=2.5, round_trip_s=0.0)
    made = Measures(nodes=(of("a", "1", 0.1, 0.2),), links=(link,))
    assert Measures.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "nodes": [], "links": []}',
        '{"format": 1, "nodes": [{}], "links": []}',
        '{"format": 1, "nodes": 3, "links": []}',
        '{"format": 1, "nodes": [], "links": [{"addresses": 3}]}',
        json.dumps({"format": 1, "nodes": [{"kind": "a", "address": "", "unix_s": 1.0,
                    "readies": []}], "links": []}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Measures.from_json(text)


def test_what_changes_no_measure_has_no_part_in_the_name() -> None:
    job = Job(task="m:T", steps=10)
    same = job.model_copy(update={"steps": 20, "name": "other"})
    assert name_of(same, "d", ()) == name_of(job, "d", ())
    assert name_of(job.model_copy(update={"global_batch": 64}), "d", ()) != name_of(job, "d", ())
    assert name_of(job, "e", ()) != name_of(job, "d", ())
    assert name_of(job, "d", ("2.0",)) != name_of(job, "d", ("2.1",))


class Measuring:
    """Stands for the workers: notes which nodes were measured, and whether links were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[list[str], list[str]]] = []
        monkeypatch.setattr(module, "_measured", self)

    def __call__(
        self,
        job: Job,
        code: TaskCode,
        nodes: Sequence[Node],
        many: Mapping[str, int],
        ring: Sequence[Node],
    ) -> tuple[dict[str, NodeMeasures], LinkMeasure | None]:
        del job, code
        self.asked.append(([n.name for n in nodes], [n.name for n in ring]))
        now_s = SystemClock().unix_s()
        found = {
            n.name: NodeMeasures(
                kind=module.digest(*module._type_of(n)),
                address=n.address,
                unix_s=now_s,
                readies=tuple(ready(0.1 * len(n.name), k) for k in range(many[n.name])),
            )
            for n in nodes
        }
        link = LinkMeasure(
            addresses=tuple(n.address for n in ring), unix_s=now_s, bytes_per_s=5.0,
            round_trip_s=0.2,
        )  # fmt: skip
        return found, link if ring else None


def there(**addresses: str) -> Inventory:
    return Inventory(
        nodes=tuple(Node(name=name, address=address) for name, address in addresses.items())
    )


def test_a_second_survey_measures_what_is_new_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch)
    job = Job(task="m:T", steps=10)

    def look(nodes: Inventory, kept: Any) -> module.Survey:
        return survey(job, CODE, nodes, [node.name for node in nodes.nodes], kept)

    first = look(there(a="1", bb="2"), MeasuresFile(tmp_path / "new", job, CODE))
    assert first.kept_s is None
    again = look(there(x="1", yy="2"), MeasuresFile(tmp_path / "new", job, CODE))
    assert again.kept_s is not None
    assert again.profile(["x", "yy"]).speeds == first.profile(["a", "bb"]).speeds
    assert (again.link_bytes_per_s, again.round_trip_s) == (5.0, 0.2)
    assert {one.node for said in again.readies.values() for one in said} == {"x", "yy"}
    assert measuring.asked == [(["a", "bb"], ["a", "bb"])]
    more = look(there(x="1", yy="2", zzz="3"), MeasuresFile(tmp_path / "new", job, CODE))
    assert measuring.asked[1:] == [(["zzz"], ["x", "yy", "zzz"])]
    assert more.kept_s is not None
    look(there(x="1", yy="2"), None)
    assert measuring.asked[2:] == [(["x", "yy"], ["x", "yy"])]
    [file] = (tmp_path / "new").iterdir()
    file.write_text("{")
    assert look(there(x="1"), MeasuresFile(tmp_path / "new", job, CODE)).kept_s is None


def test_a_place_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Measuring(monkeypatch)
    (tmp_path / "file").write_text("")
    job = Job(task="m:T", steps=10)
    kept = MeasuresFile(tmp_path / "file" / "in", job, CODE)
    assert survey(job, CODE, there(a="1"), ["a"], kept).kept_s is None
