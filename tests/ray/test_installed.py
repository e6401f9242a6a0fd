"""From nothing to a first step in three commands, the first of which is `pip install`."""

from __future__ import annotations

from pathlib import Path

import pytest

from raycloud.events import StepsCommitted
from raycloud.spec import load_job
from tests.installing import built, installed
from tests.live import events, exact_steps, of_kind, ran

pytestmark = pytest.mark.timeout(300)


@pytest.mark.full(only="from nothing to a first step in three commands")
def test_from_nothing_to_a_first_step_in_three_commands(ray_tmpdir: Path, tmp_path: Path) -> None:
    """As a stranger types them, in a fresh directory, on a Ray of the command's own.

    The quick start's test does the same with the other template.
    """
    raycloud = installed(built(tmp_path / "pip"), tmp_path / "pip") / "raycloud"
    alone = {"PYTHONPATH": "", "RAYCLOUD_CACHE": str(tmp_path / "cache")}
    code, one = ran(tmp_path, raycloud, "init", "mine", "--from", "text", **alone)
    assert code == 0, one.err
    code, one = ran(tmp_path, raycloud, "train", "mine/job.yaml", **alone)
    assert code == 0, one.err
    run_dir = tmp_path / "runs/mine-1"
    steps = load_job(tmp_path / "mine/job.yaml").steps
    assert one.out.startswith(f"mine finished: {steps} steps")
    assert exact_steps(run_dir) == steps
    commits = of_kind(StepsCommitted, events(run_dir))
    assert commits[-1].loss < 0.8 * commits[0].loss
