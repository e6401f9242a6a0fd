"""The page that reads a sweep: its cells run, one after the other, on what sweeps write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raycloud.tuning.results import Measured, Results
from tests.pages import DOCS, blocks

TRIALS = {  # batch, codec, then the loss, seconds and bytes of the last step, and how it ended
    0: (16, "none", 2.30, 30.0, 900, "finished"),
    1: (32, "none", 2.40, 20.0, 800, "finished"),
    2: (16, "int4", 2.35, 25.0, 150, "finished"),
    3: (32, "int4", 2.45, 15.0, 140, "finished"),
    4: (64, "int4", 3.00, 5.0, 20, "stopped"),
}


def write_sweep(path: Path) -> None:
    path.mkdir(parents=True)
    results = Results(path / "sweep.jsonl")
    for number, (batch, codec, loss, seconds, sent, status) in TRIALS.items():
        results.add(number, point={"global_batch": batch, "sync.codec": codec}, status="running")
        for part in (1, 2):
            one = Measured(
                step=5 * part,
                measure=loss + 2 - part,
                seconds=seconds * part / 2,
                samples=5 * part * batch,
                bytes=sent * part // 2,
            )
            results.add(number, measured=one)
        results.add(number, status=status)


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    write_sweep(tmp_path / "runs" / "swept")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(DOCS / "read-a-sweep.md"):
        if block.language == "python":
            exec(block.text, names)
    return names


def test_the_cells_find_what_is_there(cells: dict[str, Any]) -> None:
    assert cells["table"].index.tolist() == [0, 2, 1, 3, 4]
    assert cells["table"]["status"].tolist() == [*["finished"] * 4, "stopped"]
    assert cells["whole"].index.tolist() == [0, 2, 1, 3]
    assert cells["by_value"]["sync.codec"]["mean"].round(3).to_dict() == {"int4": 2.4, "none": 2.35}
    assert cells["by_value"]["global_batch"]["count"].to_dict() == {16: 2, 32: 2}
    assert cells["front"].index.tolist() == [3, 2, 0]
    assert cells["curves"].columns.tolist() == [*TRIALS]
    assert not cells["curves"].iloc[-1].isna().any()
