"""The charts of a sweep as PNG files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from raycloud import cli
from raycloud.errors import JobError
from raycloud.report import charts
from raycloud.spec import Job
from raycloud.spec.sweep import Sweep, dump_sweep
from raycloud.tuning.results import JOB, LOG, Measured, Results, Status, Trial
from tests.lockstep import NetTask

AT = Measured(step=10, measure=2.0, seconds=1.5, samples=320, bytes=99)
SPACE: dict[str, Any] = {
    "global_batch": {"choice": [16, 32]},
    "sync.codec": {"choice": ["none", "int4"]},
    "clip_norm": {"log": [0.1, 100.0], "when": {"sync.codec": "int4"}},
}


def swept(**more: Any) -> Sweep:
    return Sweep(space=SPACE, **more)


def trial(number: int, status: Status = "finished", money: float | None = None) -> Trial:
    point: dict[str, Any] = {"global_batch": 16 * (1 + number % 2)}
    point["sync.codec"] = ("none", "int4")[number // 2 % 2]
    if point["sync.codec"] == "int4":
        point["clip_norm"] = 0.2 * 4**number
    last = replace(AT, step=20, measure=1.0 + number % 3, seconds=3.0 + number, money=money)
    return Trial(
        number=number,
        point=point,
        status=status,
        measured=(AT, replace(last, bytes=10 ** (3 + number))),
    )


def drawn(folder: Path, trials: list[Trial], sweep: Sweep) -> dict[str, tuple[int, int]]:
    found = {}
    for path in charts.draw(folder, trials, sweep):
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert len(image.getcolors(10**6) or []) > 2  # something is in it
            found[path.stem] = image.size
    assert {path.stem for path in folder.iterdir()} == found.keys()
    return found


def test_each_chart_is_drawn_of_which_something_is_known(tmp_path: Path) -> None:
    trials = [*map(trial, range(6)), trial(6, "stopped"), Trial(number=7, point={})]
    plain = {"parallel_coordinates", "importance", "early_stops", "over_seconds", "against_bytes"}
    sizes = drawn(tmp_path / "free", trials, swept())
    assert sizes.keys() == plain
    assert sizes["early_stops"][1] > sizes["importance"][1]  # as tall as it has bars
    priced = [trial(number, "reached", money=0.1 * number) for number in range(6)]
    best = swept(target=3.0, minimize=["seconds", "money"], mode="max")
    assert drawn(tmp_path / "paid", priced, best).keys() == {*plain, "against_money"}


def test_of_few_trials_or_none_there_is_less_to_draw(tmp_path: Path) -> None:
    assert drawn(tmp_path / "none", [], swept()) == {}
    odd = replace(trial(0), measured=(replace(AT, measure=math.inf, bytes=0),))
    found = drawn(tmp_path / "few", [odd, trial(1, "running")], swept())
    assert "importance" not in found
    assert "over_seconds" in found


def test_without_matplotlib_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda _: None)
    with pytest.raises(JobError) as caught:
        charts.draw(tmp_path / "there", [trial(0)], swept())
    assert caught.value.hint == "pip install 'raycloud[charts]'"
    assert not (tmp_path / "there").exists()


def test_show_draws_them_where_one_says(tmp_path: Path) -> None:
    job = Job(task=NetTask, steps=20, global_batch=16)
    (tmp_path / JOB).write_text(dump_sweep(job, swept()))
    results = Results.open(tmp_path / LOG)
    for one in map(trial, range(3)):
        results.add(one.number, point=dict(one.point), status=one.status, measured=one.last)
    there = tmp_path / "charts"
    ran = CliRunner().invoke(cli.app, ["sweep", "show", str(tmp_path), "--png", str(there)])
    assert ran.exit_code == 0, ran.output
    assert "4 charts in" in ran.stderr
    assert len([*there.glob("*.png")]) == 4
