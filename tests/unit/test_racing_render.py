"""The page and its charts, from rows alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import render
from benchmarks.racing.chart import Bar, Group, draw
from benchmarks.racing.results import Results
from benchmarks.racing.scenarios import SCENARIOS

MACHINE = {
    "cpu": "A processor",
    "cores": 2,
    "cpus_used": [0, 1],
    "memory_bytes": 8 * 2**30,
    "system": "Linux 6 x86_64",
    "python": "3.11.2",
}


def row(scenario: str, contestant: str, repeat: int, **more: Any) -> dict[str, Any]:
    return {
        "scenario": scenario,
        "contestant": contestant,
        "repeat": repeat,
        "samples_per_s": None,
        "ratio_to_limit": None,
        "time_to_target_s": None,
        "wire_bytes": None,
        "pauses_s": [],
        "faults": [],
        "lost_steps": None,
        "goodput": None,
        "first_step_s": None,
        "failed": None,
        "load_before": 0.25,
        "machine_use": {"steal": 0.01, "outside": 0.125},
        "congestion_control": "cubic",
        "commit": "0123456789abcdef",
        "changed": False,
        "versions": {"torch": "2.13", "ray": "2.60"},
        "machine": MACHINE,
        "settings": {"learning_rate": 0.001, "target_loss": 2.5},
        "settings_of_testbed": SCENARIOS[scenario].describe(),
        **more,
    }


def rows() -> list[dict[str, Any]]:
    """Two scenarios: S1 with two repeats and a failure, S5 with a fault."""
    fault = {"at_s": 15.0, "what": "kill-process n1", "no_pause_because": None}
    never = fault | {"no_pause_because": "no update for 90 s until the end"}
    again = fault | {"at_s": 45.0, "what": "kill-process n2"}
    return [
        *(row("S1", "limit", i, samples_per_s=40.0, ratio_to_limit=1.0) for i in (0, 1)),
        *(
            row("S1", "raycloud", i, samples_per_s=speed, ratio_to_limit=speed / 40)
            | {"time_to_target_s": 50.0 + i, "wire_bytes": 2_500.0, "first_step_s": 8.0}
            for i, speed in enumerate((20.0, 30.0))
        ),
        row("S1", "ray-train", 0, samples_per_s=10.0, ratio_to_limit=0.25, machine_use=None),
        row("S1", "ray-train", 1, failed="ended with status 1; no | route <host>"),
        row("S5", "raycloud", 0, samples_per_s=20.0, ratio_to_limit=0.5, goodput=0.5)
        | {"pauses_s": [2.0, 4.5], "faults": [fault, again], "lost_steps": 3},
        row("S5", "raycloud", 1, samples_per_s=20.0, ratio_to_limit=0.5, goodput=0.7)
        | {"pauses_s": [3.0, None], "faults": [fault, again], "lost_steps": 5},
        row("S5", "torchrun", 0, samples_per_s=5.0, ratio_to_limit=0.125, goodput=0.125)
        | {"pauses_s": [None], "faults": [never], "lost_steps": 0}
        | {"not_done": ["45 s kill-process n2: n2: no worker is there"]},
    ]


def cells(page: str, section: str, contestant: str) -> list[str]:
    """The cells of a contestant's line in a section's table, with its header as the keys."""
    text = page.split(f"## {section}")[1].split("\n## ", maxsplit=1)[0]
    header, line = (
        next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        for name in ("contestant", contestant)
    )
    return [
        f"{key}: {value}"
        for key, value in zip(*(re.split(r" ?\| ?", x)[1:-1] for x in (header, line)), strict=True)
    ]


def test_a_scenarios_table() -> None:
    page = render.page(rows(), "pictures")
    assert cells(page, "S1: equal nodes, a fast link", "raycloud") == [
        "contestant: raycloud",
        "repeats: 2 (2 disturbed)",
        "samples/s: 25.0 [20.0..30.0]",
        "of the limit: 0.625 [0.500..0.750]",
        "to raycloud's: 1.00 [1.00..1.00]",
        "s to target: 50.5 [50.0..51.0]",
        "wire bytes per sample: 2,500 [2,500..2,500]",
        "s to first step: 8.0 [8.0..8.0]",
    ]
    peer = cells(page, "S1", "ray-train")
    assert "repeats: 2 (1 disturbed)" in peer
    assert "samples/s: 10.0 (1 of 2)" in peer
    assert "of the limit: 0.250 (1 of 2)" in peer
    assert "to raycloud's: 0.50 (1 of 2)" in peer
    assert "s to target: not reached" in peer
    assert "s to target: -" in cells(page, "S1", "limit")


def test_a_scenario_with_faults_has_more_columns() -> None:
    page = render.page(rows(), "pictures")
    ours, peer = cells(page, "S5", "raycloud"), cells(page, "S5", "torchrun")
    assert ours[-3:] == [
        "pause after: kill-process n1: 2.5 [2.0..3.0] s<br>kill-process n2: 4.5 s (1 of 2)",
        "updates lost: 4 [3..5]",
        "goodput: 0.600 [0.500..0.700]",
    ]
    assert peer[-3:] == [
        "pause after: kill-process n1: without end",
        "updates lost: 0",
        "goodput: 0.125",
    ]
    assert "repeats: 1 (disturbed)" in peer
    assert (
        "torchrun, repeat 0, after 15 s kill-process n1: no update for 90 s until the end." in page
    )
    assert "torchrun, repeat 0, not done: 45 s kill-process n2: n2: no worker is there." in page


def test_what_it_was_is_said() -> None:
    page = render.page(rows(), "pictures")
    assert "n1 0.4 cores, 1 Gbit/s each way, zone a" in page
    assert "- Window: 120 s; 15 s kill-process n1; 45 s kill-process n2;" in page
    assert "a namespace of their own, without quota" in page
    assert "- Target held-out loss: 2.5." in page
    assert "- Learning rate: 0.001 (limit, raycloud, ray-train)." in page
    assert "- ray-train, repeat 1 failed: ended with status 1; no \\| route &lt;host>" in page
    assert page.count("- M1: A processor, 2 cores, 8 GiB, Linux 6 x86_64, Python 3.11.2") == 1
    origin = "| S1 | raycloud | 0 | 0123456789ab | ray 2.60, torch 2.13 | M1 | cubic | 0.2 | 1.0%"
    assert f"{origin} | 12.5% disturbed |" in page


def test_rows_that_differ_are_not_told_together_in_silence() -> None:
    assert "differ" not in render.page(rows(), "pictures").split("## S1")[1]
    found = rows()
    bed = found[3]["settings_of_testbed"]
    found[3] |= {
        "commit": "fedcba9876543210",
        "settings": {"learning_rate": 0.002, "target_loss": 2.5},
        "machine": {**MACHINE, "torch": "2.14"},
        "settings_of_testbed": {**bed, "window_s": 30.0},
    }
    page = render.page(found, "pictures")
    said = page.split("Told together although they differ:")[1].split("\n\n")[1].splitlines()
    assert said == [
        "- raycloud, commit: repeat 0 01234567; repeat 1 fedcba98.",
        "- raycloud, learning rate: repeat 0 0.001; repeat 1 0.002.",
        "- raycloud, the machine's torch: repeat 0 unknown; repeat 1 2.14.",
        "- raycloud, window: repeat 0 60 s; repeat 1 30 s.",
    ]


def test_a_limit_that_was_measured_later_is_the_rows_limit() -> None:
    found = [{**one, "ratio_to_limit": None, "goodput": None} for one in rows()]
    page = render.page(found, "pictures")
    assert "of the limit: 0.625 [0.500..0.750]" in cells(page, "S1", "raycloud")
    assert "of the limit: -" in cells(page, "S5", "raycloud"), "there is none"
    assert "0.625" in render.charts(found)["ratio"]


def test_charts_are_well_formed_and_always_the_same() -> None:
    charts = render.charts(rows())
    assert charts == render.charts(list(reversed(rows()))), "the order of rows means nothing"
    for svg in charts.values():
        ElementTree.fromstring(svg)
    assert "0.625" in charts["ratio"]
    assert ">limit<" not in charts["ratio"], "it is the scale"
    assert "50 s" in charts["target"]
    assert "failed" in charts["target"]


def test_a_bar_is_as_long_as_its_value() -> None:
    bar = Bar(name="a", value=0.5, low=0.5, high=0.5, words="0.5 <")
    svg = draw("Title", [Group(heading="S1", bars=(bar,))], axis="parts", least_end=1.0)
    assert 'x="170" y="94.5"' not in svg
    assert 'width="220" height="11"' in svg
    assert 'x1="258" y1="86" x2="258" y2="105"' in svg, "a rule is as high as the bars"
    assert "0.5 &lt;" in svg


def test_the_command_writes_page_and_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in rows():
        Results(tmp_path / "results" / f"{one['scenario']}.json").add(one)
    places = ["--results", str(tmp_path / "results"), "--out", str(tmp_path / "BENCHMARKS.md")]
    places += ["--pictures", str(tmp_path / "docs" / "pictures")]
    assert render.main(places) == 0
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert render.main(places) == 0
    assert written == {path: path.read_bytes() for path in written}
    page = (tmp_path / "BENCHMARKS.md").read_text()
    for name in re.findall(r"\]\((.*\.svg)\)", page):
        assert (tmp_path / name).is_file()
    assert render.main([*places, "--check"]) == 0
    (tmp_path / "BENCHMARKS.md").write_text(page + "by hand")
    assert render.main([*places, "--check"]) == 1
    assert "BENCHMARKS.md is older" in capsys.readouterr().err
    (tmp_path / "results" / "S9.json").write_text("{")
    assert render.main(places) == 2
    assert "S9.json" in capsys.readouterr().err


def test_without_rows_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.md"
    assert render.main(["--results", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "no rows" in capsys.readouterr().err
    assert not out.exists()
