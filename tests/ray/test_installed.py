"""From nothing to a first step in three commands, the first of which is `pip install`."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from raycloud.events import StepsCommitted
from raycloud.spec import load_job
from tests.installing import built, installed
from tests.live import ROOT, events, exact_steps, of_kind, ran

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of these sources."""
    return built(tmp_path_factory.mktemp("wheel"))


def test_what_pip_installs_is_whole(wheel: Path) -> None:
    """A wheel is built without a network: it has the command, the types and the templates."""
    with zipfile.ZipFile(wheel) as held:
        names = set(held.namelist())
        (entry,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "raycloud = raycloud.cli:main" in held.read(entry).decode()
    tracked = (path for path in (ROOT / "raycloud").rglob("*") if path.is_file())
    wanted = {str(path.relative_to(ROOT)) for path in tracked if "__pycache__" not in path.parts}
    assert not wanted - names


@pytest.mark.full(only="from nothing to a first step in three commands")
def test_from_nothing_to_a_first_step_in_three_commands(
    ray_tmpdir: Path, tmp_path: Path, wheel: Path
) -> None:
    """As a stranger types them, in a fresh directory, on a Ray of the command's own.

    The quick start's test does the same with the other template.
    """
    raycloud = installed(wheel, tmp_path / "pip") / "raycloud"
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
