"""A run's numbers on the metrics port of a real head, as Prometheus would read them."""

from __future__ import annotations

import importlib.util
import re
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycloud.report.exported import MEASURES
from raycloud.spec import dump_job
from tests.live import RAYCLOUD, Command, asked, command, ended, processes_below, wait_for

TOKEN = {"RAY_AUTH_MODE": "token"}
END_S = 90.0
NEEDED = ("opencensus", "prometheus_client", "opentelemetry.exporter.prometheus")
# Known only with prices on nodes, or where a task measures held-out samples.
SOMETIMES = {"raycloud_cost", "raycloud_held_out"}


def there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


pytestmark = pytest.mark.skipif(
    not all(map(there, NEEDED)), reason="Ray's metrics port needs ray[default]"
)


@pytest.fixture(scope="module")
def port() -> int:
    """A free one, below those that Ray gives to its own processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def running(ray_tmpdir: Path, port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a head that shows its metrics."""
    ray = Path(sys.executable).with_name("ray")
    with command(
        tmp_path_factory.mktemp("head"), ray, "start", "--head", "--block", "--num-cpus=2",
        "--port=0", "--include-dashboard=false", "--disable-usage-stats",
        "--node-ip-address=127.0.0.1", f"--metrics-export-port={port}",
        RAY_metrics_report_interval_ms="500", **TOKEN,
    ) as head:  # fmt: skip
        yield wait_for("the head", lambda: _address(head))
        head.process.send_signal(signal.SIGTERM)
        head.code()
    assert ended(processes_below(ray_tmpdir), END_S) == {}


def _address(head: Command) -> str | None:
    assert head.process.poll() is None, head.err
    found = re.search(r"--address='([\d.]+:\d+)'", head.out)
    return found[1] if found else None


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


def test_what_is_exported_is_there_to_scrape(tmp_path: Path, running: str, port: int) -> None:
    gate = tmp_path / "gate"
    job = asked(
        "Gated", [5, 3], steps=20, checkpoint={"every_steps": 2},
        settings={"gate": str(gate), "free": 60},
    )  # fmt: skip
    (tmp_path / "job.yaml").write_text(dump_job(job))
    run_dir = tmp_path / "line-1"
    expected = {measure.name for measure in MEASURES} - SOMETIMES
    with command(
        tmp_path, RAYCLOUD, "train", "job.yaml", "--run-dir", run_dir, "--address", running,
        RAY_metrics_report_interval_ms="500", **TOKEN,
    ) as one:  # fmt: skip
        found: dict[str, list[str]] = {}  # a scrape shows what was reported since the last one

        def all_there() -> bool:
            found.update(scraped(port))
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
