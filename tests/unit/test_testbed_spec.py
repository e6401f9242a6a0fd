"""Specs: what can be, what is refused and how it is said, and reading them from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.spec import NodeSpec, Spec, SpecError, TrunkSpec

pytestmark = pytest.mark.unit


def zoned(*zones: str, trunks: tuple[tuple[str, str], ...] = ()) -> Spec:
    return Spec(
        nodes=tuple(NodeSpec(name=f"n{i}", zone=zone) for i, zone in enumerate(zones)),
        trunks=tuple(TrunkSpec(zones=pair) for pair in trunks),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "N1"}, r"name: 'N1' is not possible; use a lower-case letter"),
        ({"name": "n234567"}, r"name: 'n234567'"),
        ({"name": "sw-a"}, r"name: 'sw-a'"),
        ({"name": 7}, r"name: 7"),
        ({"cores": 0.05}, r"node n1: cores: 0.05 .*at least 0.1 \(0.4 is two fifths"),
        ({"cores": "many"}, r"cores: 'many'"),
        ({"cores": True}, r"cores: True"),
        ({"cores": float("nan")}, r"cores: nan"),
        ({"egress_bits_per_s": 20}, r"egress_bits_per_s: 20 .*20 Mbit/s are 20_000_000"),
        ({"ingress_bits_per_s": -1}, r"ingress_bits_per_s: -1"),
        ({"delay_s": 40}, r"delay_s: 40 .*from 0 to 10 \(40 ms are 0.04\)"),
        ({"delay_s": None}, r"delay_s: None"),
        ({"zone": "berlin"}, r"zone: 'berlin'"),
        ({"spot": "no"}, r"spot: 'no' is not possible; use true or false"),
        ({"labels": {"a": 1}}, r"labels: .*use a mapping of text to text"),
    ],
)
def test_a_node_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        NodeSpec(**({"name": "n1"} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zones": ("a",)}, r"name two zones"),
        ({"zones": ("a", "a")}, r"name two zones"),
        ({"zones": ("a", "-")}, r"trunk a--: zones: '-'"),
        ({"rate_bits_per_s": 1}, r"trunk a-b: rate_bits_per_s: 1"),
        ({"delay_s": -0.1}, r"trunk a-b: delay_s: -0.1"),
    ],
)
def test_a_trunk_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        TrunkSpec(**({"zones": ("a", "b")} | fields))


def test_names_differ_and_are_not_the_heads() -> None:
    with pytest.raises(SpecError, match=r"'n1' twice; give each node its own name"):
        Spec(nodes=(NodeSpec(name="n1"), NodeSpec(name="n1")))
    with pytest.raises(SpecError, match=r"'head' is the head's, which every bed has"):
        Spec(nodes=(NodeSpec(name="head"),))
    with pytest.raises(SpecError, match=r"201 of them; use at most 200"):
        zoned(*["a"] * 201)


def test_zones_that_no_trunk_names_are_joined_to_the_heads() -> None:
    spec = zoned("x", "a", "x", "b", "c", trunks=(("b", "x"),))
    assert spec.head_zone == "x"
    assert spec.zones == ("x", "a", "b", "c")
    assert [trunk.zones for trunk in spec.all_trunks()] == [("b", "x"), ("x", "a"), ("x", "c")]
    assert Spec(nodes=()).zones == ("a",)


def test_there_is_one_way_between_zones() -> None:
    zoned("a", "b", "c", trunks=(("b", "c"), ("a", "b")))
    with pytest.raises(SpecError, match=r"closes a circle; leave one trunk"):
        zoned("a", "b", "c", trunks=(("a", "b"), ("b", "c"), ("c", "a")))
    with pytest.raises(SpecError, match=r"b-a closes a circle"):
        zoned("a", "b", trunks=(("a", "b"), ("b", "a")))
    with pytest.raises(SpecError, match=r"b-c is not joined to zone a of the head; add a trunk"):
        zoned("a", "b", trunks=(("b", "c"),))


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(
        "nodes:\n"
        "- {name: n1, cores: 0.4, egress_bits_per_s: 20e6, spot: true, labels: {gpu: none}}\n"
        "- {name: n2, zone: b, ingress_bits_per_s: 100_000_000, delay_s: 0.01}\n"
        "trunks:\n"
        "- {zones: [a, b], rate_bits_per_s: 20000000, delay_s: 40e-3}\n"
    )
    assert Spec.load(file) == Spec(
        nodes=(
            NodeSpec(
                name="n1", cores=0.4, egress_bits_per_s=20e6, spot=True, labels={"gpu": "none"}
            ),
            NodeSpec(name="n2", zone="b", ingress_bits_per_s=1e8, delay_s=0.01),
        ),
        trunks=(TrunkSpec(zones=("a", "b"), rate_bits_per_s=2e7, delay_s=0.04),),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [", "cannot be read"),
        ("- n1", "the file: .* use a mapping"),
        ("trunks: []", "the file: nodes is missing"),
        ("nodes: {}", "nodes: {} is not possible; use a list"),
        ("nodes: [n1]", "a node: 'n1' is not possible; use a mapping"),
        ("nodes: [{cores: 1}]", "a node: name is missing in {'cores': 1}; add it"),
        ("nodes: [{name: n1, core: 1}]", "a node: 'core' is no field; there are name, cores, eg"),
        ("nodes: [{name: n1, cores: 4e}]", "node n1: cores: '4e'"),
        ("nodes: []\ntrunks: [{zones: a}]", "zones: 'a' is not possible; name two zones"),
        ("nodes: []\nnode: 1", "the file: 'node' is no field; there are nodes, trunks"),
    ],
)
def test_a_file_that_cannot_be_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bed.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=rf"{file}: .*{message}"):
        Spec.load(file)
    with pytest.raises(SpecError, match=r"none\.yaml: cannot be read"):
        Spec.load(tmp_path / "none.yaml")
