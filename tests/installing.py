"""raycloud as pip installs it: a wheel of these sources, in an environment of its own."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from tests.live import ROOT, ran

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def built(folder: Path) -> Path:
    """A wheel, built in a folder from a copy of the sources, without a network."""
    source, wheels = folder / "source", folder / "wheel"
    kept = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "raycloud", source / "raycloud", ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = (*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", wheels, source)
    code, one = ran(folder / "built", *words)
    assert code == 0, one.err
    (wheel,) = wheels.glob("raycloud-*.whl")
    return wheel


def installed(wheel: Path, folder: Path) -> Path:
    """The folder of the commands of a new environment with a wheel in it.

    What the wheel needs is that of this environment: fetching it takes gigabytes.
    """
    code, one = ran(folder / "made", sys.executable, "-m", "venv", "--without-pip", folder / "env")
    assert code == 0, one.err
    python = folder / "env/bin/python"
    (site,) = (folder / "env/lib").glob("python*/site-packages")
    (site / "those_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = (*PIP, "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed")
    code, one = ran(folder / "installed", *words, wheel)
    assert code == 0, one.err
    return python.parent
