"""A run's numbers on the metrics port of a real head, as Prometheus would read them."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from raycloud.report.run_status import MEASURES
from raycloud.spec import dump_job
from tests.heads import TOKEN, Head
from tests.live import RAYCLOUD, asked, command, wait_for

SOMETIMES = {  # known where a task measures held-out samples, and of GPUs where there are some
    "raycloud_held_out",
    "raycloud_node_gpu",
    "raycloud_node_gpu_bytes",
}


def scraped(port: int) -> dict[str, list[str]]:
    """Our numbers by name, each with its labels."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:  # not yet
        return {}
    found: dict[str, list[str]] = {}
    for name, labels in re.findall(r"^ray_(raycloud_\w+)\{(.*)\} ", text, re.M):
        found.setdefault(name, []).append(labels)
    return found


@pytest.mark.full(only="metrics are exported to Prometheus")
def test_what_is_exported_is_there_to_scrape(tmp_path: Path, head: Head) -> None:
    gate = tmp_path / "gate"
    job = asked(
        "Gated", [5, 3], steps=20, checkpoint={"every_steps": 2},
        settings={"gate": str(gate), "free": 60},
    )  # fmt: skip
    (tmp_path / "job.yaml").write_text(dump_job(job))
    run_dir = tmp_path / "line-1"
    expected = MEASURES.keys() - SOMETIMES
    with command(
        tmp_path, RAYCLOUD, "train", "job.yaml", "--run-dir", run_dir, "--address", head.joined,
        RAY_metrics_report_interval_ms="500", **TOKEN,
    ) as one:  # fmt: skip
        found: dict[str, list[str]] = {}  # a scrape shows what was reported since the last one

        def all_there() -> bool:
            found.update(scraped(head.metrics))
            return expected <= found.keys() or one.ended()

        wait_for("all numbers", all_there)
        gate.touch()
        assert one.code() == 0, one.err
    assert expected <= found.keys()
    assert all(
        'job="run"' in labels and 'run="line-1"' in labels for labels in found["raycloud_step"]
    )
    assert {re.search(r'member="(\d+)"', x)[1] for x in found["raycloud_member_share"]} == {
        "0",
        "1",
    }  # type: ignore[index]
