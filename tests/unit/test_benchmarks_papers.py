"""`benchmarks.papers` without a testbed: its server, its rows, and its table."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from benchmarks.papers.page import (
    CHART,
    FILES,
    MARK,
    PAGE,
    RESULTS,
    beside,
    chart,
    found,
    loss_beside,
    sections,
    table,
)
from benchmarks.papers.runs import Look, RayTrainLog
from benchmarks.papers.scenario import ALL, NONE, ROWS, STRATEGIES, ZONE_LABEL, Setting
from benchmarks.papers.serving import Local, Pace, Remote, answering, read, together
from benchmarks.papers.unequal import gains

COUNT = 12


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Grey images whose shade is their number, and whose label is its last digit."""
    images = []
    for number in range(COUNT):
        written = io.BytesIO()
        Image.fromarray(np.full((32, 32, 3), 10 * number, np.uint8)).save(written, "JPEG")
        images.append(written.getvalue())
    rows = pa.table({"image": images, "label": [n % 10 for n in range(COUNT)]})
    pq.write_table(rows, tmp_path / "images.parquet")
    return tmp_path / "images.parquet"


@pytest.fixture
def url(file: Path) -> Iterator[str]:
    answers = answering(*read(file, COUNT - 1), Pace(1e9))
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_images_come_one_by_one_and_as_a_file(url: str, file: Path) -> None:
    remote, local = Remote(url), Local(file, COUNT)
    assert len(remote) == COUNT - 1
    some = together(remote.__getitems__([3, 7]))
    remote.close()
    held = together([local[i] for i in (3, 7)])
    assert np.array_equal(some["image"], held["image"])
    assert some["label"].tolist() == [3, 7]
    whole = urlopen(f"{url}/train.parquet").read()
    assert pq.read_table(io.BytesIO(whole)).num_rows == COUNT - 1
    part = Request(f"{url}/train.parquet", headers={"Range": "bytes=4-9"})
    with urlopen(part) as answer:
        assert (answer.status, answer.read()) == (206, whole[4:10])


def test_the_rate_is_that_of_all_together() -> None:
    pace = Pace(8e4)  # 10 KB/s
    began_s = time.monotonic()
    threads = [threading.Thread(target=pace.wait, args=(1000,)) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert time.monotonic() - began_s >= 0.2  # the third begins when two have gone


def test_each_strategy_is_alone_and_left_out_once() -> None:
    told = {name: [getattr(row, one) for one in STRATEGIES] for name, row in ROWS.items()}
    assert sorted(map(sum, told.values())) == [0, 0, 1, 1, 1, 1, 3, 3, 3, 3, 4]
    assert len({(*row, ROWS[name].peer) for name, row in told.items()}) == len(ROWS)
    assert (ROWS["baseline"], ROWS["all"]) == (NONE, ALL)


def test_zones_are_told_only_where_they_are_known() -> None:
    setting = Setting(trunk_mbit=100.0)
    blind, seeing = (setting.spec(zones_known=known) for known in (False, True))
    assert [node.zone for node in blind.nodes] == [node.zone for node in seeing.nodes]
    assert {node.labels[ZONE_LABEL] for node in blind.nodes} == {"one"}
    assert not any(node.labels for node in seeing.nodes)
    assert blind.trunks[0].rate_bits_per_s == 100e6


def run(row: str, seconds: float | None, *, repeat: int = 0, losses: str = "") -> Mapping[str, Any]:
    looks = [[10 * at, 0.1, float(one)] for at, one in enumerate(losses.split(), 1)]
    numbers = dict.fromkeys(
        ("from_first_step_s", "samples_per_s", "bytes_per_sample", "wait_s_per_step", "cpu",
         "memory_bytes", "cost"), 1.0,
    )  # fmt: skip
    return {
        "row": row, "repeat": repeat, "seconds": seconds, "why": "" if seconds else "late",
        "looks": looks, **numbers,
    }  # fmt: skip


def test_the_table_has_medians_and_who_was_not_there() -> None:
    base = [run("baseline", s, repeat=i) for i, s in enumerate((300.0, 280.0, 320.0))]
    every = [run("all", s, repeat=i) for i, s in enumerate((50.0, 60.0, 70.0))]
    lines, sooner = table([*base, *every, run("Ray Train", None)])
    assert sooner == 5.0
    assert any(line.startswith("| all | 60 | 1 | 5.00 |") for line in lines)
    assert lines[-1].startswith("| Ray Train | late |")
    assert table([run("baseline", None), run("all", 50.0)])[1] is None


def test_losses_are_compared_at_the_last_common_step() -> None:
    base, other = run("baseline", 1.0, losses="2.0 1.0"), run("all", 1.0, losses="1.9 1.1 0.5")
    assert loss_beside([base], [other]) == pytest.approx(0.1)
    assert loss_beside([base], [run("all", 1.0, repeat=1, losses="2.0")]) is None


def test_what_the_papers_say_is_beside_what_was_measured() -> None:
    base = {**run("baseline", 300.0), "cpu": 0.75, "cost": 0.04}
    lines = beside([base, {**run("all", 60.0), "cpu": 0.9, "cost": 0.01}])
    assert "| all: time | -33%; 30 h to 10 h | -80% |  |" in lines
    assert "| all: processors | 75% to 90-95% | 75% to 90% |  |" in lines
    assert "| all: cost | -25% | -75% |  |" in lines
    assert "| data: wait for it | -35% | not known | not known |" in lines
    without = {**run("all but data", 90.0), "wait_s_per_step": 4.0}
    lines = beside([base, run("all", 60.0), without, run("all but allocation", 80.0)])
    assert "| data: wait for it | -35% | not known | -75% |" in lines
    assert "| dynamic allocation: time | -25% | not known | -25% |" in lines


def test_the_page_and_the_chart_are_those_of_the_results() -> None:
    settings = found()
    assert PAGE.read_text().partition(MARK)[2] == sections(settings)
    if settings:
        runs = {FILES[name]: told["runs"] for name, told in settings.items()}
        assert CHART.read_text() == chart(runs)
    for told in settings.values():
        asked = Setting(trunk_mbit=told["setting"]["trunk_mbit"])
        assert told["setting"] == asked.describe(), "what was run is what stands there"


def test_the_curve_is_what_the_planner_gains() -> None:
    points = json.loads((RESULTS / "unequal.json").read_text())["points"]
    assert points == [{name: round(value, 4) for name, value in one.items()} for one in gains()]
    assert all(one["gain"] <= one["bound"] for one in points)


def test_what_ray_trains_workers_say_is_put_together(tmp_path: Path) -> None:
    log = RayTrainLog(tmp_path / "steps", 2)
    log.read()
    assert log.seen.steps == 0
    for rank in range(2):
        lines = [
            {"step": 1, "waited_s": 0.5 + rank, "bytes": 10 * (rank + 1)},
            {"step": 2, "waited_s": 0.0, "bytes": 5, "accuracy": 0.25, "loss": 2.0},
        ]
        text = "".join(json.dumps(one) + "\n" for one in lines)
        (tmp_path / f"steps-{rank}.jsonl").write_text(text + '{"step": 3')
        log.read()
    seen = log.seen
    assert (seen.steps, seen.waits, seen.waited_s, seen.memory_bytes) == (2, 4, 2.0, 20)
    assert seen.looks == [Look(step=2, accuracy=0.25, loss=2.0)]
