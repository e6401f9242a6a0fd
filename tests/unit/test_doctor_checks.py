"""The checks: what is well is called well, and every kind of finding is found where it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from raycloud.doctor import (
    CHECKS,
    ClusterFacts,
    Facts,
    Gpus,
    Level,
    Link,
    Machine,
    Node,
    Settings,
    examine,
    exit_code,
)
from raycloud.doctor.facts import Disk
from raycloud.doctor.findings import as_json, as_text

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
GB = 10**9
VERSIONS = {"python": "3.12.1", "raycloud": "1.0", "ray": "2.60.1", "torch": "2.13.0"}


def machine(name: str = "this machine", **changes: object) -> Machine:
    sound = Machine(
        name=name,
        versions=VERSIONS,
        temp=Disk(path="/tmp", total_bytes=100 * GB, free_bytes=50 * GB, writable=True),
        shm=Disk(path="/dev/shm", total_bytes=8 * GB, free_bytes=8 * GB, writable=True),
        memory_bytes=16 * GB,
        memory_free_bytes=8 * GB,
        gpus=Gpus(),
    )
    return replace(sound, **changes)


def node(name: str = "node a", **changes: object) -> Node:
    return replace(Node(name=name, machine=machine(name), versions=VERSIONS), **changes)


SOUND = Facts(
    settings=Settings(auth_mode="token"),
    machine=machine(),
    required={"python": ">=3.11", "ray": ">=2.60,<2.61", "torch": ">=2.13,<2.14"},
    cluster=ClusterFacts(
        address="127.0.0.1:6379",
        auth_mode="token",
        nodes=(node(), node("node b")),
        links=(Link(source="node a", target="node b", round_trip_s=0.001, bytes_per_s=1e9),),
    ),
)

Change = Callable[[Facts], Facts]


def here(**changes: object) -> Change:
    return lambda facts: replace(facts, machine=replace(facts.machine, **changes))


def asked(**changes: object) -> Change:
    return lambda facts: replace(facts, settings=replace(facts.settings, **changes))


def cluster(**changes: object) -> Change:
    return lambda facts: replace(facts, cluster=replace(facts.cluster, **changes))


def there(**changes: object) -> Change:
    """A change of the second node's machine."""
    second = node("node b")
    return cluster(nodes=(node(), replace(second, machine=replace(second.machine, **changes))))


def disk(**changes: object) -> Disk:
    return replace(machine().temp, **changes)


def links(*rates: float, **changes: object) -> Change:
    one = Link(source="node a", target="node b", round_trip_s=0.001)
    return cluster(links=tuple(replace(one, bytes_per_s=rate, **changes) for rate in rates))


FAULTS: dict[str, Change] = {
    "library-missing": here(versions=VERSIONS | {"torch": None}),
    "version-unsuited": lambda facts: replace(facts, required={"ray": ">=2.61"}),
    "version-differs": cluster(nodes=(node(), node(versions=VERSIONS | {"torch": "2.13.1"}))),
    "auth-mode-unknown": asked(auth_mode="tokens"),
    "auth-off": asked(auth_mode="disabled"),
    "cluster-open": cluster(auth_mode="disabled"),
    "token-missing": lambda facts: replace(facts, token=False),
    "temp-too-long": here(temp=disk(path="/tmp/" + 40 * "x")),
    "temp-not-writable": here(temp=disk(writable=False)),
    "temp-full": there(temp=disk(free_bytes=4 * GB)),
    "shm-small": there(shm=disk(path="/dev/shm", total_bytes=64 * 2**20)),
    "memory-full": there(memory_free_bytes=GB // 2),
    "gpu-absent": there(gpus=Gpus(driver=1, torch=0, ray=1.0)),
    "gpu-unused": here(gpus=Gpus(driver=1, torch=0)),
    "cluster-away": cluster(failure="ConnectionRefusedError"),
    "cluster-refused": cluster(failure="AuthenticationError", refused=True),
    "node-silent": cluster(nodes=(node(machine=None, silence="ModuleNotFoundError: raycloud"),)),
    "clock-apart": cluster(nodes=(node(ahead_s=-2.0, unsure_s=0.5),)),
    "link-blocked": links(1e9, failure="TimeoutError: timed out"),
    "link-far": links(1e9, round_trip_s=0.2),
    "link-slow": links(1e9, 9e7),
}
KINDS = {kind.name: kind for check in CHECKS for kind in check.kinds}


def test_what_is_sound_is_well() -> None:
    findings = examine(SOUND)
    assert {finding.level for finding in findings} == {Level.WELL}
    assert exit_code(findings) == 0
    named = {finding.name for finding in findings}
    assert named == {check.name for check in CHECKS}


def test_there_is_a_fault_for_every_kind_of_finding() -> None:
    assert FAULTS.keys() == KINDS.keys()
    assert len(KINDS) == sum(len(check.kinds) for check in CHECKS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    findings = examine(FAULTS[name](SOUND))
    bad = [finding for finding in findings if finding.level is not Level.WELL]
    assert {finding.name for finding in bad} == {name}
    (found,) = bad[:1]
    assert found.remedy == KINDS[name].remedy
    assert found.value
    assert exit_code(findings) == KINDS[name].level.exit_code
    assert findings[0] == found  # the worst stands first


def test_the_worst_decides_the_exit_code() -> None:
    facts = FAULTS["clock-apart"](FAULTS["auth-off"](SOUND))
    findings = examine(facts)
    assert [finding.name for finding in findings[:2]] == ["clock-apart", "auth-off"]
    assert exit_code(findings) == 3


def test_builds_of_one_version_are_the_same_version() -> None:
    other = VERSIONS | {"torch": "2.13.0+cu126", "python": "3.12.9"}
    findings = examine(cluster(nodes=(node(), node(versions=other)))(SOUND))
    assert exit_code(findings) == 0
    assert all(finding.level is Level.WELL for finding in findings)


def test_clocks_within_the_error_of_the_round_trip_are_well() -> None:
    findings = examine(cluster(nodes=(node(ahead_s=2.0, unsure_s=1.5),))(SOUND))
    assert not [finding for finding in findings if finding.name == "clock-apart"]


def test_text_tells_each_kind_once_with_its_remedy() -> None:
    facts = replace(
        there(memory_free_bytes=GB // 4)(SOUND), machine=machine(memory_free_bytes=GB // 2)
    )
    text = as_text(facts, examine(facts), lambda _level, word: word)
    assert text.count(KINDS["memory-full"].remedy) == 1
    assert "this machine: 500 MB of 16.0 GB free" in text
    assert "node b: 250 MB of 16.0 GB free" in text
    last = text.splitlines()[-1]
    assert last.startswith("this machine and the cluster at 127.0.0.1:6379 (2 node(s)): 2 unwell, ")


def test_json_is_for_scripts_and_holds_no_secret() -> None:
    facts = cluster(failure="cannot reach http://me:hunter2@host/", address="host:1")(SOUND)
    text = as_json(facts, examine(facts))
    record = json.loads(text)
    assert (record["format"], record["exit_code"], record["address"]) == (1, 3, "host:1")
    assert record["findings"][0].keys() == {"name", "level", "where", "value", "what", "remedy"}
    assert record["findings"][0]["level"] == "unwell"
    assert "hunter2" not in text


def test_text_obeys_no_control_characters_of_others() -> None:
    facts = there(name="node \x1b[2J\x07")(SOUND)
    assert "\x07" not in as_text(facts, examine(facts), lambda _level, word: word)
    assert "\x1b" not in as_text(facts, examine(facts), lambda _level, word: word)


def test_the_page_holds_the_tables() -> None:
    page = PAGE.read_text()
    for check in CHECKS:
        found = ", ".join(f"`{kind.name}`" for kind in check.kinds)
        assert f"| `{check.name}` | {check.asks} | {found} |\n" in page
        for kind in check.kinds:
            row = f"| `{kind.name}` | {kind.level.word} | {kind.what} | {kind.remedy} |\n"
            assert row in page
    assert page.count("\n| `") == 4 + len(CHECKS) + len(KINDS)  # four levels, and nothing else
