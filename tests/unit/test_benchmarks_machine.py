"""What the benchmarks say of the checkout that they measured."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import machine

pytestmark = pytest.mark.unit
GIT = shutil.which("git")


@pytest.mark.skipif(GIT is None, reason="no git")
def test_results_that_are_being_written_are_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    results = tmp_path / "benchmarks" / "results" / "S1.json"
    results.parent.mkdir(parents=True)
    results.write_text("one row")
    (tmp_path / "benchmarks" / "run.py").write_text("code")
    who = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run([str(GIT), *command], cwd=tmp_path, check=True)
    assert not machine.describe(set())["changed_since_commit"]
    results.write_text("two rows")
    results.with_name("S2.json").write_text("one row")
    assert not machine.describe(set())["changed_since_commit"]
    (tmp_path / "benchmarks" / "run.py").write_text("other code")
    assert machine.describe(set())["changed_since_commit"]
