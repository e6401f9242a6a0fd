"""Results against baselines: what fell by more than a tenth is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.racing.results import Results


def rows(ours: list[float], **peers: list[float]) -> list[dict[str, Any]]:
    """Rows of S1 by repeat; the limit is 100 samples/s."""
    return [
        {
            "scenario": "S1",
            "repeat": repeat,
            "contestant": name.replace("_", "-"),
            "samples_per_s": value,
            "ratio_to_limit": value / 100,
        }
        for name, values in {"raycloud": ours, **peers}.items()
        for repeat, value in enumerate(values)
    ]


def test_ratios_are_medians_of_pairs_with_the_best_peer_of_each_repeat() -> None:
    now = rows([60.0, 50.0, 40.0], ray_train=[30.0, 50.0, 20.0], torchrun=[20.0, 25.0, 40.0])
    to_limit, to_best, _ = compare.compare(now, now)
    assert (to_limit.now, to_best.now) == (0.5, 1.0)
    assert to_limit.change == to_best.change == 0
    assert not to_limit.lost
    assert not to_best.lost


@pytest.mark.parametrize(("speed", "lost"), [(45.0, False), (44.9, True), (70.0, False)])
def test_a_tenth_is_tolerated(speed: float, lost: bool) -> None:
    to_limit, to_best, _ = compare.compare(
        rows([speed], torchrun=[20.0]), rows([50.0], torchrun=[20.0])
    )
    assert to_limit.lost == to_best.lost == lost


def test_only_peers_that_both_have_are_compared_with() -> None:
    now = rows([50.0], torchrun=[20.0], hivemind=[100.0])
    before = rows([50.0], torchrun=[20.0], ray_train=[40.0])
    assert compare.compare(now, before)[1].change == 0


def test_who_no_longer_finishes_has_lost_and_who_is_new_has_not() -> None:
    nothing = [{**row, "samples_per_s": None, "ratio_to_limit": None} for row in rows([50.0])]
    gone, *_ = compare.compare(nothing, rows([50.0]))
    assert (gone.lost, gone.now, gone.change) == (True, None, None)
    assert not any(one.lost for one in compare.compare(rows([50.0]), []))


def test_one_more_repeat_that_fails_is_lost_whatever_the_others_did() -> None:
    before = rows([50.0] * 20)
    now = rows([60.0] * 20)
    assert not any(one.lost for one in compare.compare(now, before))
    now[7] |= {"failed": "ended with status 1"}
    assert [one.lost for one in compare.compare(now, before)] == [False, False, True]
    assert not any(one.lost for one in compare.compare(now, now)), "it failed before, too"
    now[7] |= {"failed": None, "samples_per_s": None, "ratio_to_limit": None}
    assert compare.compare(now, before)[2].lost


def test_repeats_of_a_faster_processor_are_compared_with_their_own() -> None:
    """Its limit is higher, and the link is no faster: the same code has a lower ratio there."""

    def on(cpu: str, ours: float, repeat: int) -> list[dict[str, Any]]:
        return [{**row, "repeat": repeat, "machine": {"cpu": cpu}} for row in rows([ours])]

    slow, fast = on("slow", 60.0, 0), on("fast", 45.0, 1)
    found = {one.processor: one for one in reversed(compare.compare(slow + fast, slow))}
    assert {name: (one.before, one.now, one.lost) for name, one in found.items()} == {
        "slow": (0.6, 0.6, False),
        "fast": (None, 0.45, False),
    }
    worse = on("fast", 40.0, 1)
    lost = [one for one in compare.compare(slow + worse, slow + fast) if one.lost]
    assert [(one.processor, one.now) for one in lost] == [("fast", 0.4)]


def test_a_ratio_that_a_row_lacks_is_made_of_the_limits_row() -> None:
    now = [{**row, "ratio_to_limit": None} for row in rows([50.0])]
    assert compare.compare(now, rows([50.0]))[0].lost
    limit = {"scenario": "S1", "repeat": 0, "contestant": "limit", "samples_per_s": 80.0}
    assert compare.compare([*now, limit], rows([50.0]))[0].now == 50 / 80


def test_the_command_says_what_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baselines, now = tmp_path / "baselines", tmp_path / "now.json"
    for row in rows([50.0], torchrun=[25.0]):
        Results(baselines / "S1.json").add(row)
    for row in rows([40.0], torchrun=[20.0]):
        Results(now).add(row)
    assert compare.main([str(now), "--baselines", str(baselines)]) == 1
    said = capsys.readouterr().out
    assert "raycloud / limit         0.500   0.400   -20.0%  lost" in said
    assert "raycloud / best peer     2.000   2.000    +0.0%" in said
    assert "raycloud not failed      1.000   1.000    +0.0%" in said
    assert "1 of 3 are lost: a ratio by more than 10%" in said
    assert compare.main([str(baselines / "S1.json"), "--baselines", str(baselines)]) == 0
    assert compare.main([str(now), "--baselines", str(tmp_path / "none")]) == 0
    assert "no baseline" in capsys.readouterr().out
    assert compare.main([str(tmp_path / "missing.json")]) == 2
    assert "missing.json: cannot be read" in capsys.readouterr().err


def test_without_a_baseline_there_is_nothing_that_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text('{"format": 1, "rows": []}')
    assert compare.main([str(rows), "--baselines", str(tmp_path)]) == 2
    assert "no baseline" in capsys.readouterr().err
