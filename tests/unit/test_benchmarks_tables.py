"""How long a worker stood still is counted, also where it never went on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import pauses


@pytest.mark.parametrize(
    ("updates", "longest_s"),
    [([1, 2, 3, 4, 5, 6, 7, 8], 1.0), ([1, 2, 3, 4, 7, 8], 3.0), ([1, 2, 3, 4], 4.0)],
)
def test_the_longest_pause(updates: list[float], longest_s: float, tmp_path: Path) -> None:
    (tmp_path / "1").write_text("".join(f"{at}\n" for at in updates))
    found = pauses(tmp_path, began_s=3.5, ended_s=8.0)
    assert found == {"longest_s": longest_s, "usual_s": 1.0}
