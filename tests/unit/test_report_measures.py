"""The numbers for Prometheus, and the Grafana page that shows them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from raycloud.events import (
    CheckpointPublished,
    Evaluated,
    GenerationFormed,
    MemberReady,
    MemberSpawned,
    Noticed,
    RunStarted,
    StepsCommitted,
)
from raycloud.report.run_status import MEASURES, TAGS, values
from raycloud.report.state import Tally
from raycloud.spec import Job
from tests import logs

DASHBOARD = Path(__file__).parents[2] / "docs/grafana.json"
JOB = Job(task="/p/a.py:B", steps=8, name="line")
PREFIX = "ray_"  # Ray's own, before every name


def committed(member: int, first: int, last: int) -> StepsCommitted:
    report = logs.commit(member, first, last, loss=2.5)
    return replace(
        report, samples=32 * (last - first), weight=32.0, learning_rate=0.01, wall_s=2.0,
        compute_s=1.5, data_s=0.25, exchange_s=0.25, bytes_sent=100, cpu_s=1.0, memory_bytes=4096,
        gpu_bytes=8192, gpu_busy=0.75,
    )  # fmt: skip


def tally() -> Tally:
    """Two members, four of eight steps done."""
    found = Tally()
    events = [
        RunStarted(job="line", version="1"),
        *(MemberSpawned(member=m) for m in (0, 1)),
        *(
            MemberReady(
                member=m, samples=320, parameters=1, state_bytes=1, gradient_bytes=1, fixed_s=0.0,
                micro_batch_s=1.0, node=f"n{m}", price_per_hour=3600.0, cores=2.0,
            )
            for m in (0, 1)
        ),
        GenerationFormed(generation=0, members=(0, 1), shares=(5, 3), first_step=0),
        *(committed(m, a, b) for a, b in ((0, 1), (1, 2), (2, 4)) for m in (0, 1)),
        CheckpointPublished(step=4, path="p", state_bytes=1, write_s=0.1),
        Evaluated(step=4, metrics={"accuracy": 0.5, "loss": float("nan")}),
        Noticed(what="something"),
    ]  # fmt: skip
    for t, event in enumerate(events):
        found.apply(float(t), event)
    return found


def test_every_number_of_a_run_is_there() -> None:
    found = {
        (name.removeprefix("raycloud_"), of): value
        for name, value, of in values(tally(), JOB, 15.0)
    }
    expected = {
        ("step", ""): 4.0,
        ("steps", ""): 8.0,
        ("samples", ""): 128.0,
        ("loss", ""): 2.5,
        ("learning_rate", ""): 0.01,
        ("workers", ""): 2.0,
        ("generation", ""): 0.0,
        ("recoveries", ""): 0.0,
        ("notices", ""): 1.0,
        ("checkpoint_step", ""): 4.0,
        ("checkpoint_unix_s", ""): 12.0,
        ("bytes_sent", ""): 600.0,
        ("compute_s", ""): 9.0,
        ("data_wait_s", ""): 1.5,
        ("exchange_wait_s", ""): 1.5,
        ("member_share", "0"): 5.0,
        ("member_share", "1"): 3.0,
        ("member_compute_s", "0"): 4.5,
        ("member_compute_s", "1"): 4.5,
        ("held_out", "accuracy"): 0.5,
        **{("node_cpu", node): 0.25 for node in ("n0", "n1")},
        **{("node_gpu", node): 0.75 for node in ("n0", "n1")},
        **{("node_memory_bytes", node): 4096.0 for node in ("n0", "n1")},
        **{("node_gpu_bytes", node): 8192.0 for node in ("n0", "n1")},
        **{("node_sent_bytes_per_s", node): 50.0 for node in ("n0", "n1")},
    }
    assert expected.items() <= found.items()
    assert found.keys() - expected.keys() == {
        ("samples_per_s", ""), ("left_s", ""), ("cost", "")
    }  # fmt: skip
    assert found["cost", ""] > 0


def test_every_number_is_a_measure_with_its_tag() -> None:
    found = list(values(tally(), JOB, 12.0))
    assert {name for name, _, _ in found} == set(MEASURES)
    assert all(bool(of) == bool(MEASURES[name][1]) for name, _, of in found)


def test_a_run_that_has_not_begun_has_no_loss() -> None:
    names = {name for name, _, _ in values(Tally(), JOB, 0.0)}
    assert "raycloud_loss" not in names
    assert "raycloud_step" in names


def expressions(value: Any) -> list[str]:
    """Every expression and query of a dashboard."""
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
        return own + [text for inner in value.values() for text in expressions(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in expressions(inner)]
    return []


def test_the_dashboard_asks_for_what_is_exported() -> None:
    page = json.loads(DASHBOARD.read_text())
    asked = [text for text in expressions(page) if text != "prometheus"]
    assert len(asked) >= len(page["panels"])
    tags = {PREFIX + name: tag for name, (_, tag) in MEASURES.items()}
    shown = set()
    for text in asked:
        names = re.findall(r"\b[a-z_]*raycloud_\w+", text)
        assert names, text
        assert set(names) <= tags.keys(), text
        shown |= set(names)
        labels = set(re.findall(r"(\w+) *=~?", text))
        labels |= set(re.findall(r", (\w+)\)$", text) if text.startswith("label_values") else [])
        labels |= set(re.findall(r"\bby \((\w+)\)", text))
        assert labels <= {*TAGS, *(tags[name] for name in names)}, text
    assert shown == tags.keys(), "what is exported and not shown"


def test_the_dashboards_legends_name_labels_that_are_there() -> None:
    page = json.loads(DASHBOARD.read_text())
    tags = {PREFIX + name: tag for name, (_, tag) in MEASURES.items()}
    for panel in page["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\bray_raycloud_\w+", target["expr"])
            there = {*TAGS, *(tags[name] for name in names)}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= there


def test_the_page_lists_every_number() -> None:
    text = (DASHBOARD.parent / "tracking.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `ray_")]
    assert rows == [
        f"| `{PREFIX}{name}`{f', by `{tag}`' if tag else ''} | {meaning} |"
        for name, (meaning, tag) in MEASURES.items()
    ]
