"""`raycloud chaos` in earnest: real faults on real workers, and what an undisturbed run gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raycloud.report.summary import of_run
from tests.live import RAYCLOUD, ROOT, command, exact_steps

STEPS = 40
LONG_S = 240.0
FAULTS = """
format: 1
faults:
- {at_step: 4, action: kill}
- {at_step: 5, action: cut, rank: 1}
- {at_step: 16, action: terminate}
"""


@pytest.mark.full(only="a run under injected faults of many kinds is the undisturbed run")
@pytest.mark.timeout(300)
def test_a_run_under_faults_is_the_undisturbed_run(tmp_path: Path, ray_tmpdir: Path) -> None:
    (tmp_path / "faults.yaml").write_text(FAULTS)
    out = tmp_path / "out"
    with command(
        tmp_path / "at",
        RAYCLOUD, "chaos", ROOT / "jobs/rings.yaml", "--schedule", tmp_path / "faults.yaml",
        "--steps", STEPS, "--out", out, "--json",
        RAY_TMPDIR=str(ray_tmpdir),
    ) as one:  # fmt: skip
        assert one.code(LONG_S) == 0, one.err
    told = json.loads(one.out)
    assert told["proved"]
    assert told["difference"]["largest"] <= 1e-9
    assert told["difference"]["precision"] == "float64"
    assert [fault["action"] for fault in told["faults"]] == ["kill", "cut", "terminate"]
    assert [fault["why"] for fault in told["faults"]] == ["", "", ""]
    kill, cut, terminate = told["faults"]
    assert kill["resumed_s"] > 0
    assert cut["resumed_s"] > 0
    assert terminate["resumed_s"] is None
    for side in ("undisturbed", "disturbed"):
        assert exact_steps(out / side) == STEPS
        goodput = of_run(out / side).goodput
        parts = [seconds for name, seconds in goodput.items() if name not in ("whole_s", "goodput")]
        assert sum(parts) == pytest.approx(goodput["whole_s"])
    assert told["undisturbed"]["pauses"] == []
    assert told["disturbed"]["goodput"]["recovering_s"] > 0
    assert "<svg" in (out / "chaos.html").read_text()
