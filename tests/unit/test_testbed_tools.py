"""What `make test` does about the system's tools, on a PATH of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.live import ROOT

TOOLS = ("ip", "tc", "nsenter", "unshare")
SKIPS = "No ip, tc, nsenter or unshare: tests/testbed will skip; install iproute2 and util-linux.\n"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs it where the only programs are those of a folder, as a user, with an apt-get."""

    def program(name: str, script: str) -> None:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def run(
        *tools: str, user: int = 0, installs: bool | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        for tool in tools:
            program(tool, "exit 1")
        program("id", f"echo {user}")
        if installs is not None:
            asked = f"echo $* >> {tmp_path}/asked"
            made = f"cp -p {tmp_path}/id {tmp_path}/$tool" if installs else "exit 100"
            path = f"PATH=$PATH:{Path(shutil.which('cp')).parent}"
            program("apt-get", f"{path}\n{asked}\nfor tool in {' '.join(TOOLS)}; do {made}; done")
        return subprocess.run(
            [shutil.which("bash"), ROOT / ".ci/tools"],
            env={"PATH": str(tmp_path), **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_nothing_happens_where_all_are_there(run: Run, tmp_path: Path) -> None:
    done = run(*TOOLS, installs=True, CI="true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("missing", TOOLS)
def test_nothing_is_installed_that_nobody_asked_for(run: Run, tmp_path: Path, missing: str) -> None:
    done = run(*(tool for tool in TOOLS if tool != missing), installs=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, SKIPS, "")
    assert not (tmp_path / "asked").exists()


def test_continuous_integration_installs_them(run: Run, tmp_path: Path) -> None:
    done = run(installs=True, CI="true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    update, install = (tmp_path / "asked").read_text().splitlines()
    assert update.startswith("update")
    assert install.endswith("iproute2 util-linux")


@pytest.mark.parametrize("installs", [False, None])
def test_continuous_integration_fails_without_them(run: Run, installs: bool | None) -> None:
    done = run(installs=installs, CI="true")
    assert (done.returncode, done.stdout) == (1, "")
    assert "tests/testbed cannot run" in done.stderr
    assert "iproute2 and util-linux" in done.stderr


def test_who_is_not_root_is_only_told(run: Run, tmp_path: Path) -> None:
    done = run(user=1000, installs=True, CI="true")
    assert (done.returncode, done.stdout, done.stderr) == (0, SKIPS, "")
    assert not (tmp_path / "asked").exists()
